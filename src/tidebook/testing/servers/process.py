"""A process known by its number and its birth: so a later process that got the same number is never signalled."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

POLL_S = 0.02
#: Stopped, or ended, as the system calls it.
_AT_REST = ("", "T", "t", "Z", "X")


@dataclass(frozen=True)
class Process:
    """A process started here, or by an earlier run that wrote its pid and birth down."""

    pid: int
    birth: str
    child: subprocess.Popen[bytes] | None = None

    @classmethod
    def of(cls, child: subprocess.Popen[bytes]) -> Process:
        """The process just started."""
        return cls(child.pid, birth_of(child.pid) or "", child)

    def alive(self) -> bool:
        """Whether it still runs; one that ended but was not collected does not."""
        if self.child is not None:
            return self.child.poll() is None
        return birth_of(self.pid) == self.birth

    def signal_all(self, number: signal.Signals) -> None:
        """Signal the process and all that descend from it, as far as they still run."""
        family = [self.pid, *_descendants(self.pid)] if self.alive() else []
        for pid in family:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass  # it ended meanwhile

    def freeze(self, timeout_s: float) -> bool:
        """Stop the process and all that descend from it; False if one of their threads still runs after the timeout.

        One thread of a process takes the signal for all of them; on a busy machine the others go on till then.
        """
        self.signal_all(signal.SIGSTOP)
        deadline = time.monotonic() + timeout_s
        while self.alive() and not all(_is_stopped(pid) for pid in [self.pid, *_descendants(self.pid)]):
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True

    def signal(self, number: signal.Signals) -> None:
        """Signal the process itself, if it still runs."""
        if self.alive():
            os.kill(self.pid, number)

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end; False if it still runs after the timeout."""
        deadline = time.monotonic() + timeout_s
        while self.alive():
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True


def birth_of(pid: int) -> str | None:
    """When a process was started, in whatever unit the system tells it; None if there is none or it has ended."""
    if Path("/proc/self/stat").exists():
        fields = _stat(pid)
        return None if fields is None or fields[0] == "Z" else fields[19]
    told = subprocess.run(["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    state, _, birth = told.stdout.strip().partition(" ")
    return birth.strip() if birth and not state.startswith("Z") else None


def _is_stopped(pid: int) -> bool:
    """Whether every thread is stopped, or has ended."""
    if Path("/proc/self/stat").exists():
        threads = [_stat(f"{pid}/task/{each.name}") for each in Path(f"/proc/{pid}/task").glob("[0-9]*")]
        return all(fields is None or fields[0] in _AT_REST for fields in threads)
    told = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return told.stdout.strip()[:1] in _AT_REST


def _stat(pid: int | str) -> list[str] | None:
    """The fields of /proc/PID/stat after the name, which may itself hold spaces and brackets."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def _descendants(pid: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        if fields := _stat(int(entry.name)):
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found: list[int] = []
    waiting = [pid]
    while waiting:
        children = parents.get(waiting.pop(), [])
        found += children
        waiting += children
    return found
