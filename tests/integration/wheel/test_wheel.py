"""The wheel runs README's program and `tidebook up` in an otherwise empty environment."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

import pytest

from tools.build import build_archives, check_archives

ROOT = Path(__file__).resolve().parents[3]
#: Downloads of the pinned packages may be slow; a run with pip's cache takes about 20 s.
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build_archives(tmp_path_factory.mktemp("dist"), python=Path(sys.executable))


@pytest.fixture(scope="module")
def scripts(archives: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the scripts folder of a new environment with only the pinned packages and the wheel."""
    venv = tmp_path_factory.mktemp("empty") / "venv"
    python = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"
    subprocess.run([python, "-m", "venv", "--without-pip", venv], check=True, env=_outside())
    for arguments in (
        ["--require-hashes", "--no-deps", "--only-binary", ":all:", "-r", str(ROOT / "requirements" / "base.txt")],
        ["--no-deps", "--no-index", str(archives[0])],
    ):
        subprocess.run([*pip(venv), "install", "--quiet", "--no-compile", *arguments], check=True, env=_outside())
    return venv / "bin"


def pip(venv: Path) -> list[str]:
    """Return the command of this environment's pip for another one, which has none."""
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(venv / "bin" / "python")]


def _outside() -> dict[str, str]:
    """Return the environment without the variables that would make this checkout importable."""
    return {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV", "TIDEBOOK"}}


def test_the_archives_have_every_file_of_the_packages_and_no_tests(archives: tuple[Path, Path]) -> None:
    assert check_archives(*archives) == []
    with ZipFile(archives[0]) as wheel:
        names = wheel.namelist()
    assert "tidebook/py.typed" in names
    assert "tidebook/queue/postgres/sql/claim.sql" in names


def test_a_missing_an_unexpected_and_a_test_file_are_reported(archives: tuple[Path, Path], tmp_path: Path) -> None:
    wheel = tmp_path / archives[0].name
    with ZipFile(archives[0]) as source, ZipFile(wheel, "w") as target:
        for name in source.namelist():
            if not name.endswith("claim.sql"):
                target.writestr(name, source.read(name))
        target.writestr("tidebook/test_it.py", "")
    problems = check_archives(wheel, archives[1])
    assert problems == [
        "the wheel lacks tidebook/queue/postgres/sql/claim.sql",
        "the wheel has unexpected files: tidebook/test_it.py",
        "the wheel has tests: tidebook/test_it.py",
    ]


def test_the_source_archive_builds_the_same_wheel_at_another_time_and_place(
    archives: tuple[Path, Path], tmp_path: Path
) -> None:
    with tarfile.open(archives[1]) as sdist:
        sdist.extractall(tmp_path / "unpacked", filter="data")
    [root] = (tmp_path / "unpacked").iterdir()
    for file in root.rglob("*.py"):
        os.utime(file, (1_000_000_000, 1_000_000_000))
    again = build_archives(tmp_path / "dist", root=root, python=Path(sys.executable))
    assert again[0].read_bytes() == archives[0].read_bytes()


def test_readmes_commands_install_the_wheel(archives: tuple[Path, Path], tmp_path: Path) -> None:
    """pip resolves the extra as for a reader, but takes the pinned versions."""
    block, _ = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "dist").symlink_to(archives[0].parent)
    (tmp_path / "dev").write_text("#!/bin/sh\n")  # ./dev build has made the wheel
    (tmp_path / "dev").chmod(0o755)
    pinned = re.findall(r"^[\w-]+==[\w.]+", (ROOT / "requirements" / "base.txt").read_text(), re.M)
    (tmp_path / "pinned.txt").write_text("\n".join(pinned))
    variables = {
        **_outside(), "HOME": str(tmp_path), "PATH": f"{Path(sys.base_prefix) / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PIP_CONSTRAINT": str(tmp_path / "pinned.txt"),
    }  # fmt: skip
    script = f"set -e\n{block}\ncommand -v tidebook\ntidebook --version\n"
    done = subprocess.run(["sh", "-c", script], cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == [str(tmp_path / "tidebook" / "bin" / "tidebook"), "tidebook 0.1.0"]


def test_readmes_program_runs_twice(scripts: Path, tmp_path: Path) -> None:
    [program] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    file = tmp_path / "program.py"
    file.write_text(program)
    runs = [
        subprocess.run([scripts / "python", file], cwd=tmp_path, env=_outside(), capture_output=True, text=True)
        for _ in range(2)
    ]
    assert [(run.returncode, run.stderr) for run in runs] == [(0, ""), (0, "")]
    assert runs[0].stdout.splitlines() == ["1 {'total': 3}"]
    assert runs[1].stdout.splitlines() == ["1 {'total': 3}", "2 {'total': 3}"]


@pytest.fixture
def up(scripts: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [str(scripts / "tidebook"), "up", "--json", "--port", "0"]
    process = subprocess.Popen(command, cwd=tmp_path, env=_outside(), stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def test_up_opens_a_book_that_other_commands_use_and_stops_cleanly(
    scripts: Path, tmp_path: Path, up: subprocess.Popen[str]
) -> None:
    assert up.stdout is not None
    lines = map(json.loads, up.stdout)
    assert next(lines) == {"open": str(tmp_path / "tidebook-data")}
    assert any("url" in line for line in lines)
    append = [str(scripts / "tidebook"), "journal", "append", "orders", "o-1", '{"total": 3}', "--json"]
    done = subprocess.run(append, cwd=tmp_path, env=_outside(), capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["last"] == 1
    assert any(line.get("topics") for line in lines)
    up.send_signal(signal.SIGTERM)
    assert up.wait(60) == 0
    assert [each.name for each in tmp_path.iterdir()] == ["tidebook-data"]


def test_windows_is_refused_in_one_sentence(scripts: Path) -> None:
    program = "import sys; sys.platform = 'win32'; import tidebook"
    done = subprocess.run([scripts / "python", "-c", program], env=_outside(), capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ImportError: Tidebook runs on Linux and macOS; on Windows, run it in WSL 2"


def test_the_environment_has_only_pinned_packages(scripts: Path) -> None:
    listing = [*pip(scripts.parent), "list", "--format", "json"]
    done = subprocess.run(listing, env=_outside(), capture_output=True, text=True, check=True)
    found = {each["name"].lower().replace("_", "-") for each in json.loads(done.stdout)}
    pinned = set(re.findall(r"^([\w-]+)==", (ROOT / "requirements" / "base.txt").read_text(), re.M))
    assert found - pinned == {"tidebook"}
    assert shutil.which("tidebook", path=str(scripts)) is not None
