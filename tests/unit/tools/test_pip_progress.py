"""The progress that ./dev shows while pip installs."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from tools.environment import CONTENTS, ROOT
from tools.pip_progress import PipProgress, count_packages, run_pip

OUTPUT = """\
Ignoring colorama: markers 'sys_platform == "win32"' don't match your environment
Requirement already satisfied: anyio==4.16.0 in ./lib (from -r base.txt (line 1))
Collecting apsw==3.54.1.0 (from -r base.txt (line 10))
  Downloading apsw-3.54.1.0-cp311.whl (3.5 MB)
Collecting idna==3.20 (from -r base.txt (line 40))
  Using cached idna-3.20-py3-none-any.whl (69 kB)
Installing collected packages: apsw, idna
"""


def test_the_progress_counts_packages_and_downloads() -> None:
    progress = PipProgress(4)
    seen = []
    for line in OUTPUT.splitlines():
        progress.take(line)
        seen.append(progress.describe(1.0))
    assert seen[2] == "2 of 3 packages, 0.0 MB downloaded, 1 s: apsw"
    assert seen[-1] == "3 of 3 packages, 3.5 MB downloaded, 1 s: unpacking"


def test_every_pinned_package_of_a_requirement_file_is_counted() -> None:
    for name in ("build", *CONTENTS):
        text = (ROOT / "requirements" / f"{name}.txt").read_text()
        assert count_packages(text) == len(re.findall(r"^\S", text, re.M)) > 0


def test_the_last_lines_of_a_failed_run_are_shown(tmp_path: Path) -> None:
    shown = io.StringIO()
    program = "print('Collecting a==1'); print('ERROR: no such version'); raise SystemExit(3)"
    assert run_pip([sys.executable, "-c", program], tmp_path, 1, shown) == 3
    assert "ERROR: no such version" in shown.getvalue()
    assert "1 of 1 packages" not in shown.getvalue()


def test_a_finished_run_shows_its_counts_and_not_the_lines_of_pip(tmp_path: Path) -> None:
    shown = io.StringIO()
    assert run_pip([sys.executable, "-c", f"print({OUTPUT!r})"], tmp_path, 4, shown) == 0
    assert re.fullmatch(r"dev:   3 of 3 packages, 3.5 MB downloaded, \d+ s\n", shown.getvalue())
