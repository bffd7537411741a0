"""`./dev build`: the wheel and the source archive, reproducible, and checked for the files that they must contain."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path
from zipfile import ZipFile

from tools import environment
from tools.environment import PYTHON, ROOT, SetupError, refuse, say

DIST = ROOT / "dist"
SOURCES = ROOT / "src"
#: The files outside src that a source archive needs to build the wheel, or that readers need.
SDIST_FILES = (
    "pyproject.toml",
    "README.md",
    "CHANGELOG.md",
    "ARCHITECTURE.md",
    "LICENSE",
    "PKG-INFO",
    "hatch_build.py",
)
_RELATIVE_LINK = re.compile(r"\]\((?!\w+:|#)([^)\s]+)\)")


def build(arguments: list[str]) -> int:
    """Build the wheel and the source archive into dist, and print their paths and digests."""
    if arguments:
        return refuse("build takes no argument")
    environment.ensure("base")
    DIST.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=DIST) as first, tempfile.TemporaryDirectory(dir=DIST) as second:
        archives = build_archives(Path(first))
        repeated = build_archives(Path(second))
        problems = check_archives(*archives)
        for one, other in zip(archives, repeated, strict=True):
            if one.read_bytes() != other.read_bytes():
                problems.append(f"{one.name} differs between two builds of the same files")
        if problems:
            say("; ".join(problems))
            return 1
        for archive in archives:
            done = shutil.move(archive, DIST / archive.name)
            digest = hashlib.sha256(Path(done).read_bytes()).hexdigest()
            print(f"dist/{archive.name}  {Path(done).stat().st_size:,} bytes  sha256:{digest}")
    return 0


def build_archives(folder: Path, *, root: Path = ROOT, python: Path = PYTHON) -> tuple[Path, Path]:
    """Build into a folder and return the wheel and the source archive.

    hatchling sorts the files and sets the same time and mode for all, so equal sources give equal bytes.
    """
    command = [str(python), "-m", "hatchling", "build", "--directory", str(folder.resolve())]
    done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        raise SetupError(f"hatchling could not build the archives:\n{done.stdout}")
    [wheel], [sdist] = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


def check_archives(wheel: Path, sdist: Path, *, sources: Path = SOURCES) -> list[str]:
    """Return the problems with the files of a wheel and a source archive, one sentence each."""
    with ZipFile(wheel) as opened:
        in_wheel = set(opened.namelist())
        [metadata] = [name for name in in_wheel if name.endswith(".dist-info/METADATA")]
        relative = _RELATIVE_LINK.findall(opened.read(metadata).decode())
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    expected = {str(file.relative_to(sources)) for file in _source_files(sources)}
    extra = {name for name in in_wheel - expected if ".dist-info/" not in name}
    return [
        *_sentence("the wheel lacks", expected - in_wheel),
        *_sentence("the wheel has unexpected files:", extra),
        *_sentence("the wheel has tests:", filter(_is_test, in_wheel)),
        *_sentence("the wheel lacks", {"tidebook/py.typed"} - in_wheel),
        *_sentence("a package index cannot follow these links of the description:", relative),
        *_sentence("the source archive lacks", {*SDIST_FILES, *(f"src/{name}" for name in expected)} - in_sdist),
    ]


def _source_files(sources: Path) -> Iterable[Path]:
    """Yield the files of the packages: modules, SQL, templates, static files and type markers."""
    for file in sources.rglob("*"):
        if file.is_file() and "__pycache__" not in file.parts and not file.parent.name.endswith(".egg-info"):
            yield file


def _is_test(name: str) -> bool:
    return name.startswith("tests/") or Path(name).name.startswith(("test_", "conftest"))


def _sentence(problem: str, names: Iterable[str]) -> list[str]:
    found = sorted(names)
    return [f"{problem} {', '.join(found)}"] if found else []
