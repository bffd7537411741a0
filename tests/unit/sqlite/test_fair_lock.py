"""The fair lock has one holder, starves no process, and times out if its holder is stopped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tidebook.core.errors import Unavailable
from tidebook.sqlite.fair_lock import FairLock

GREEDY = """
import sys, time
from pathlib import Path
from tidebook.sqlite.fair_lock import FairLock
lock = FairLock(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
turns, until = 0, time.monotonic() + 1.5
while time.monotonic() < until:
    lock.acquire(30)
    time.sleep(0.005)
    turns += 1
    lock.release()
print(turns, flush=True)
"""


def test_only_one_process_holds_the_lock(tmp_path: Path) -> None:
    one, two = FairLock(tmp_path / "f"), FairLock(tmp_path / "f")
    one.acquire(1)
    with pytest.raises(Unavailable):
        two.acquire(0.01)
    one.release()
    two.acquire(1)
    assert two.held
    assert not one.held
    one.close()
    two.close()


def test_a_process_that_dies_releases_the_lock(tmp_path: Path) -> None:
    script = "import sys\nfrom pathlib import Path\nfrom tidebook.sqlite.fair_lock import FairLock\n"
    script += "lock = FairLock(Path(sys.argv[1]))\nlock.acquire(1)\nprint('held', flush=True)\nsys.stdin.readline()"
    holder = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "f")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    assert holder.stdin is not None
    assert holder.stdout.readline() == b"held\n"
    lock = FairLock(tmp_path / "f")
    with pytest.raises(Unavailable):
        lock.acquire(0.01)
    holder.kill()
    holder.wait()
    lock.acquire(10)
    lock.close()
    holder.stdin.close()
    holder.stdout.close()


def test_a_waiting_process_is_not_overtaken(tmp_path: Path) -> None:
    command = [sys.executable, "-c", GREEDY, str(tmp_path / "f")]
    greedy = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    for each in greedy:
        assert each.stdout is not None
        assert each.stdout.readline() == "ready\n"
    for each in greedy:
        assert each.stdin is not None
        each.stdin.write("go\n")
        each.stdin.flush()
    turns = sorted(int(each.communicate(timeout=60)[0]) for each in greedy)
    assert turns[0] * 5 >= turns[-1], turns
