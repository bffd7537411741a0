"""Reports which files' tests use the most processor time, with the processes that they started and waited for.

A run is bound by the processor, so this shows where it can be shortened; the duration of a test shows only how long it
waited beside the others. Processes that outlive their test are not counted. The servers that all tests share are listed
separately, including their start.
"""

from __future__ import annotations

import json
import os
import resource
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

FILES_SHOWN = 40


class ProcessorTime:
    """Measures each phase of a test in its process, and adds up the phases of all processes where they are reported."""

    def __init__(self, status: Path) -> None:
        #: The file in which the running servers are recorded.
        self._status = status
        self._measured_s = _used_s()
        self._by_file: defaultdict[str, float] = defaultdict(float)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_collection(self) -> Generator[None, object, object]:
        """Measure the tests without the collection before them."""
        try:
            return (yield)
        finally:
            self._measured_s = _used_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Add to a phase's report what was used since the phase before it."""
        report = yield
        used_s = _used_s()
        report.processor_s, self._measured_s = used_s - self._measured_s, used_s  # type: ignore[attr-defined]
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._by_file[report.nodeid.partition("::")[0]] += getattr(report, "processor_s", 0.0)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        by_folder: defaultdict[str, float] = defaultdict(float)
        for file, used_s in self._by_file.items():
            by_folder[str(PurePosixPath(file).parent)] += used_s
        terminalreporter.section(f"processor time of the tests: {sum(by_folder.values()):.0f} s")
        for name, used_s in [*self._servers(), *_most(by_folder), *_most(self._by_file)[:FILES_SHOWN]]:
            terminalreporter.write_line(f"{used_s:7.1f} s  {name}")

    def _servers(self) -> list[tuple[str, float]]:
        """Return what each running server has used, with its children; nothing if this system has no /proc."""
        servers = json.loads(self._status.read_text())["servers"] if self._status.exists() else {}
        files = {name: Path(f"/proc/{entry['pid']}/stat") for name, entry in servers.items()}
        ticks_s = os.sysconf("SC_CLK_TCK")
        return [
            (name, sum(map(int, file.read_text().rpartition(")")[2].split()[11:15])) / ticks_s)
            for name, file in files.items()
            if file.exists()
        ]


def _most(used: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(used.items(), key=lambda each: each[1], reverse=True)


def _used_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)
