"""Fails a test in which a secret appears in a log, in the text of an error, on standard error, or in a log file.

The secrets of tests are known: tokens have a recognizable form, and passwords are the words below. A test that gives a
secret to what masks it is exempt by name. Standard output is not scanned: `tidebook token create` prints its result.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Generator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tidebook.core.errors import TidebookError

#: The passwords that tests use, and the form of tokens.
SECRET = re.compile(r"hunter2|wrong-and-secret|\btb_[A-Za-z0-9_-]{43}")
#: Files whose tests give a secret to the code that masks it, so that it is in what comes before the mask.
EXEMPT = ("tests/unit/runtime/test_json_log.py", "tests/unit/testing/test_secret_scan.py")
LOG_NAME = re.compile(r".*\.log|.*stderr.*|.*\.err")
LOG_FILES_MAX = 200
LOG_BYTES_MAX = 1_000_000


class SecretScan(logging.Handler):
    """Collects where secrets appeared during a test, and reports them as its failure."""

    def __init__(self) -> None:
        super().__init__(logging.NOTSET)
        self.found: list[str] = []

    def pytest_sessionstart(self) -> None:
        logging.getLogger().addHandler(self)
        _watch_errors(self)

    def pytest_sessionfinish(self) -> None:
        logging.getLogger().removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Check a record as a plain handler would print it."""
        try:
            self.look(f"the log {record.name}", self.format(record))
        except Exception:  # a record that cannot be formatted is the business of its own test
            return

    def look(self, place: str, text: str) -> None:
        """Record that a secret appeared, without repeating it."""
        if SECRET.search(text):
            self.found.append(f"{place}: {SECRET.sub('<SECRET>', text)[:300]}")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[Any]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """After the teardown, turn what was found into a failure."""
        report = yield
        if call.when != "teardown":
            return report
        for name, text in report.sections:
            if "stderr" in name:
                self.look(name, text)
        for file in _log_files(getattr(item, "funcargs", {}).get("tmp_path")):
            self.look(str(file.name), file.read_bytes()[-LOG_BYTES_MAX:].decode("utf-8", "replace"))
        found, self.found = self.found, []
        if found and not item.nodeid.startswith(EXEMPT):
            report.outcome = "failed"
            report.longrepr = "a secret appeared in " + "\n".join(found[:5])
        return report


def _log_files(folder: Path | None) -> list[Path]:
    if folder is None or not folder.is_dir():
        return []
    named = (Path(at, name) for at, _, names in os.walk(folder) for name in names if LOG_NAME.fullmatch(name))
    return list(islice((file for file in named if file.is_file()), LOG_FILES_MAX))


def _watch_errors(scan: SecretScan) -> None:
    """Check the text of every error of Tidebook when it is created."""
    make = TidebookError.__init__

    def make_and_look(error: TidebookError, *args: Any, **fields: Any) -> None:
        make(error, *args, **fields)
        scan.look(type(error).__name__, " ".join(each for each in args if isinstance(each, str)))

    TidebookError.__init__ = make_and_look  # type: ignore[assignment, method-assign]
