"""The report of the processor time of tests: what a phase used, added up by folder and file, and the shared servers."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.processor_time import ProcessorTime


def test_a_phase_reports_what_was_used_since_the_phase_before_it(tmp_path: Path) -> None:
    plugin, report = ProcessorTime(tmp_path / "none.json"), SimpleNamespace()
    used_s = []
    for busy_s in (0.05, 0.0):
        phase: Any = plugin.pytest_runtest_makereport()
        next(phase)
        end_s = time.process_time() + busy_s
        while time.process_time() < end_s:
            pass
        with pytest.raises(StopIteration):
            phase.send(report)
        used_s.append(report.processor_s)
    assert used_s[0] >= 0.05 > used_s[1]


def test_the_summary_lists_shared_servers_then_folders_and_files_by_what_they_used(tmp_path: Path) -> None:
    status = tmp_path / "status.json"
    status.write_text(json.dumps({"servers": {"kafka": {"pid": os.getpid()}, "ended": {"pid": 2**30}}}))
    plugin, lines = ProcessorTime(status), list[str]()
    for nodeid, used_s in (("a/b/test_1.py::test[x]", 1.0), ("a/test_2.py::test", 4.0), ("a/b/test_3.py::test", 2.0)):
        plugin.pytest_runtest_logreport(SimpleNamespace(nodeid=nodeid, processor_s=used_s))
    plugin.pytest_terminal_summary(SimpleNamespace(section=lines.append, write_line=lines.append))
    assert lines[0] == "processor time of the tests: 7 s"
    shown = [line.split() for line in lines[1:]]
    assert shown[0][1:] == ["s", "kafka"]
    assert shown[1:] == [
        [used_s, "s", name]
        for used_s, name in (
            ("4.0", "a"), ("3.0", "a/b"), ("4.0", "a/test_2.py"), ("2.0", "a/b/test_3.py"), ("1.0", "a/b/test_1.py")
        )
    ]  # fmt: skip
