"""Tests of the house style: sizes, names, and text that no file may contain."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "tidebook"
LINES_MAX = 600
# Path under src/tidebook → why it may be longer.
LONGER: dict[str, str] = {}
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "manager", "managers", "misc"}
# Written in two halves, so that the test does not match this file.
HOSTS = ["pypi" + ".org", "python" + "hosted.org", "maven" + ".org", "maven" + ".apache.org", "npmjs" + ".org"]
MACHINE_PATH = re.compile(r"(?<![\w.:/>~$}-])/(?:wor" + r"k|roo" + r"t|hom" + r"e)/")
IGNORED_FOLDERS = {".git", ".venv", ".servers", "__pycache__", "dist", "build", "site", "tidebook-data"}


@cache
def project_files() -> tuple[Path, ...]:
    """Return every file that is or would be committed."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    if listed.returncode == 0:
        files = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    else:  # an unpacked source archive
        files = [f for f in ROOT.rglob("*") if not IGNORED_FOLDERS & set(f.relative_to(ROOT).parts)]
    return tuple(file for file in files if file.is_file())


def text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


def relative(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def test_source_files_are_short() -> None:
    sizes = {f.relative_to(SOURCE).as_posix(): len(text_of(f).splitlines()) for f in SOURCE.rglob("*.py")}
    too_long = {name: size for name, size in sizes.items() if size > LINES_MAX and name not in LONGER}
    assert not too_long, f"over {LINES_MAX} lines: split, or list with a reason"


def test_every_exception_to_the_size_is_still_needed() -> None:
    stale = [
        name for name in LONGER if not (SOURCE / name).exists() or len(text_of(SOURCE / name).splitlines()) <= LINES_MAX
    ]
    assert not stale


def test_no_module_has_a_vague_name() -> None:
    names = [relative(f) for f in project_files() if f.suffix == ".py"]
    vague = [name for name in names if VAGUE_NAMES & {part.strip("_") for part in name.removesuffix(".py").split("/")}]
    assert not vague


def test_no_file_contains_a_path_of_a_developers_machine() -> None:
    found = [relative(f) for f in project_files() if MACHINE_PATH.search(text_of(f))]
    assert not found


def test_no_symbolic_link_is_committed() -> None:
    listed = subprocess.run(["git", "ls-files", "--stage"], cwd=ROOT, capture_output=True, text=True, check=False)
    links = [entry.split("\t")[1] for entry in listed.stdout.splitlines() if entry.startswith("120000")]
    assert not links


@pytest.mark.parametrize("host", HOSTS)
def test_no_file_names_a_package_registry(host: str) -> None:
    found = [relative(f) for f in project_files() if host in text_of(f)]
    assert not found


def test_requirements_are_pinned_by_hash() -> None:
    unpinned = []
    for file in (ROOT / "requirements").glob("*.txt"):
        for requirement in text_of(file).replace("\\\n", " ").splitlines():
            if requirement.strip() and ("==" not in requirement or "--hash=sha256:" not in requirement):
                unpinned.append(f"{file.name}: {requirement[:60]}")
    assert not unpinned
