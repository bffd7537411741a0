"""Runs `tidebook` as a process."""

from __future__ import annotations

import subprocess
import sys
from typing import NamedTuple


class Done(NamedTuple):
    code: int
    out: str
    err: str


def run_command(*arguments: str) -> Done:
    command = [sys.executable, "-m", "tidebook.cli.app", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return Done(done.returncode, done.stdout, done.stderr)
