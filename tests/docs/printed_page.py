"""Run the blocks of a page as they are printed: shell commands in a terminal, programs with Python.

A block of text after one of these is what it must print: its lines occur in the output in this order, and … stands for
anything.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tools.recording import Terminal

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PROGRAM_S_MAX = 60


def clone(folder: Path, *, status: str = "{}") -> Path:
    """Make a folder that looks like a clone to the commands of a page; its `./dev` has everything running already."""
    folder.mkdir(exist_ok=True)
    for name in (".venv", "examples"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "status.json").write_text(status)
    dev = folder / "dev"
    dev.write_text('#!/bin/sh\n[ "$1 $2" = "servers status" ] && cat status.json\nexit 0\n')
    dev.chmod(0o755)
    return folder


def run_page(page: Path, folder: Path) -> None:
    """Run every block of a page in a folder; fail on the first whose output differs."""
    blocks = BLOCK.findall(page.read_text())
    assert any(kind in {"sh", "python"} for kind, _ in blocks)
    exports: list[str] = []
    printed: list[str] = []
    for kind, body in blocks:
        match kind:
            case "sh":
                lines = Terminal("\n".join([*exports, body]), folder, columns=400).read()
                printed = [line for line in lines if line.strip()]
                exports += re.findall(r"^export .*$", body, re.MULTILINE)
            case "python":
                done = subprocess.run(
                    [sys.executable, "-c", body], cwd=folder, capture_output=True, text=True, timeout=PROGRAM_S_MAX
                )
                assert done.returncode == 0, done.stderr
                printed = done.stdout.splitlines()
            case "text":
                missing = not_printed(body, printed)
                assert missing is None, f"{page.name}: {missing!r} is not in:\n" + "\n".join(printed)


def not_printed(expected: str, printed: list[str]) -> str | None:
    """Return the first expected line that does not follow those before it in the output; None if all do."""
    rest = iter(printed)
    for line in expected.splitlines():
        pattern = ".*".join(map(re.escape, line.strip().split("…")))
        if not any(re.fullmatch(pattern, each.strip()) for each in rest):
            return line
    return None
