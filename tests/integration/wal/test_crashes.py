"""A region survives SIGKILL at every step and under load."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def drive(*arguments: str) -> int:
    command = [sys.executable, "-m", "tests.integration.wal.crash_driver", *arguments]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return int(done.stdout)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_kill_at_any_call_to_the_log_loses_and_invents_nothing(moment: str) -> None:
    assert drive(moment) > 25


def test_kills_under_load_lose_nothing_that_was_acknowledged(long_form: bool) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    assert drive("busy", "60" if long_form else "6", str(seed)) > 0
