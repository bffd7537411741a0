"""A pytest plugin that records the lines that each test runs, and its duration."""

from __future__ import annotations

import functools
import gc
import json
import os
from pathlib import Path
from typing import Any

import coverage
import pytest

#: Environment variables: the file of the map, and the package to measure.
OUTPUT = "TIDEBOOK_MUTANTS_MAP"
SOURCE = "TIDEBOOK_MUTANTS_SOURCE"
#: The name for lines that run while modules are imported, or between tests.
IMPORT = ""


class CoverageMap:
    """Switches coverage's context to the running test."""

    def __init__(self) -> None:
        self._coverage = coverage.Coverage(data_file=None, source=[os.environ[SOURCE]], config_file=False)
        self._seconds: dict[str, float] = {}
        self._failed: set[str] = set()
        self._memories: list[functools._lru_cache_wrapper[Any]] = []

    def pytest_sessionstart(self) -> None:
        self._coverage.start()

    def pytest_collection_finish(self) -> None:
        self._memories = [each for each in gc.get_objects() if isinstance(each, functools._lru_cache_wrapper)]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        for memory in self._memories:
            memory.cache_clear()  # otherwise only the first of several tests would run the cached function
        self._coverage.switch_context(nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._coverage.switch_context(IMPORT)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self._failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        data = self._coverage.get_data()
        lines: dict[str, dict[int, list[str]]] = {}
        for path in data.measured_files():
            found = data.contexts_by_lineno(path)
            # A test that fails without a mutant would seem to kill every mutant.
            lines[path] = {line: [test for test in tests if test not in self._failed] for line, tests in found.items()}
        Path(os.environ[OUTPUT]).write_text(json.dumps({"lines": lines, "seconds": self._seconds}))


def pytest_configure(config: Any) -> None:
    config.pluginmanager.register(CoverageMap(), "coverage-map")
