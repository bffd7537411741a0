"""Ends a run in which a test exceeds its time and cannot be torn down, and prints the stacks of the threads."""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Generator
from typing import Any

import pytest

#: How long fixtures may take to close after a test, including the servers that they started.
CLOSING_S = 180.0


class Watchdog:
    """Ends the process, with the stacks of all its threads, if a test or its teardown takes too long.

    pytest-timeout ends a test only once, and stops its timer when a test fails, so that a fixture that waits for ever
    after a failure would keep the whole run waiting. In a parallel run, pytest-xdist names the test of the process that
    has ended, and ends the run with the failures so far.
    """

    def __init__(self, closing_s: float = CLOSING_S) -> None:
        self._closing_s = closing_s
        self._stderr = os.dup(2)  # what is captured would end with the process

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """End the run after pytest-timeout's limit, if its signal had no effect."""
        if (limit_s := _limit_s(item)) > 0:
            self._end_after(limit_s + self._closing_s, item)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Start the timer again, because a failure has cancelled it."""
        self._end_after(self._closing_s, item)
        return (yield)

    def _end_after(self, seconds: float, item: pytest.Item) -> None:
        if not (item.config.getoption("usepdb") or item.config.getoption("trace") or sys.gettrace() is not None):
            faulthandler.dump_traceback_later(seconds, exit=True, file=self._stderr)


def _limit_s(item: pytest.Item) -> float:
    """Return the time limit of a test as pytest-timeout reads it; 0 means none."""
    marker = item.get_closest_marker("timeout")
    given = item.config.getini("timeout") if marker is None else [*marker.args, *marker.kwargs.values()][0]
    return float(given or 0)
