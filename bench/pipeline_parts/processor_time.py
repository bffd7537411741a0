"""The processor time and the memory of processes and their descendants, from /proc."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def _stat(pid: str) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def descendants(pid: int) -> set[int]:
    """Return the current descendants of a process."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int(_stat(folder.name)[1])
        except OSError:
            continue
    found, grown = {pid}, True
    while grown:
        more = {child for child, parent in parents.items() if parent in found} - found
        found |= more
        grown = bool(more)
    return found - {pid}


def processor_s(pids: Collection[int]) -> float:
    """Return the seconds that the processes have used, including children that have ended."""
    total = 0
    for pid in pids:
        try:
            total += sum(map(int, _stat(str(pid))[11:15]))
        except OSError:
            continue
    return total / _TICKS_PER_S


def memory_mb(pids: Collection[int]) -> float:
    """Return the memory of the processes; shared memory is counted once, by proportional shares."""
    total_kb = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total_kb += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total_kb / 1024
