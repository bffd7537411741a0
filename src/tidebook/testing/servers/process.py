"""A process identified by its pid and start time, so that a later process with the same pid is never signalled."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

POLL_S = 0.02
#: The states of a process that is stopped or has ended.
_AT_REST = ("", "T", "t", "Z", "X")


@dataclass(frozen=True)
class Process:
    """A process that this process started, or an earlier one, which stored its pid and start time."""

    pid: int
    birth: str
    child: subprocess.Popen[bytes] | None = None

    @classmethod
    def of(cls, child: subprocess.Popen[bytes]) -> Process:
        """Return the process of a child that was just started."""
        return cls(child.pid, birth_of(child.pid) or "", child)

    def alive(self) -> bool:
        """Return True if it is still running; a zombie process is not."""
        if self.child is not None:
            return self.child.poll() is None
        return birth_of(self.pid) == self.birth

    def signal_all(self, number: signal.Signals) -> None:
        """Signal the process and all its descendants that are still running."""
        family = [self.pid, *_descendants(self.pid)] if self.alive() else []
        for pid in family:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass  # it has ended

    def kill_all(self, timeout_s: float) -> bool:
        """Kill the process and all its descendants; return False if one is still running after the timeout.

        A descendant may outlive the process for a moment, with the files and the memory that they share.
        """
        descendants = _descendants(self.pid) if self.alive() else []
        family = [self, *(Process(pid, birth_of(pid) or "") for pid in descendants)]
        deadline = time.monotonic() + timeout_s
        self.signal_all(signal.SIGKILL)
        return all(each.wait(deadline - time.monotonic()) for each in family)

    def freeze(self, timeout_s: float) -> bool:
        """Stop the process and all its descendants; return False if a thread is still running after the timeout.

        One thread handles the signal for its whole process. On a busy machine the other threads run until then, and may
        start processes that the signal has not reached, so it is repeated.
        """
        self.signal_all(signal.SIGSTOP)
        deadline = time.monotonic() + timeout_s
        while self.alive() and not all(_is_stopped(pid) for pid in [self.pid, *_descendants(self.pid)]):
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
            self.signal_all(signal.SIGSTOP)
        return True

    def signal(self, number: signal.Signals) -> None:
        """Signal only the process itself, if it is still running."""
        if self.alive():
            os.kill(self.pid, number)

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end; return False if it is still running after the timeout."""
        deadline = time.monotonic() + timeout_s
        while self.alive():
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True


def birth_of(pid: int) -> str | None:
    """Return the start time of a process, in the system's unit; None if it does not exist or has ended."""
    if Path("/proc/self/stat").exists():
        fields = _stat(pid)
        return None if fields is None or fields[0] == "Z" else fields[19]
    ps = subprocess.run(["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    state, _, birth = ps.stdout.strip().partition(" ")
    return birth.strip() if birth and not state.startswith("Z") else None


def _is_stopped(pid: int) -> bool:
    """Return True if every thread is stopped or has ended."""
    if Path("/proc/self/stat").exists():
        threads = [_stat(f"{pid}/task/{each.name}") for each in Path(f"/proc/{pid}/task").glob("[0-9]*")]
        return all(fields is None or fields[0] in _AT_REST for fields in threads)
    ps = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return ps.stdout.strip()[:1] in _AT_REST


def _stat(pid: int | str) -> list[str] | None:
    """Return the fields of /proc/PID/stat after the name, which may contain spaces and brackets."""
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
