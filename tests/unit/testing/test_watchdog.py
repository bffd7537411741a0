"""A fixture that hangs in its teardown ends the test run, or its worker process, with a stack trace."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tools.commands import IN_PARALLEL, UNUSED_PLUGINS

ROOT = Path(__file__).resolve().parents[3]
CONFTEST = """
from tests.watchdog import Watchdog

def pytest_configure(config):
    config.pluginmanager.register(Watchdog(closing_s=0.5))
"""
STUCK = """
import threading
import pytest

@pytest.fixture
def stuck():
    yield
    threading.Event().wait()

@pytest.mark.timeout(30)
def test_that_leaves_something_open(stuck):
    assert False  # pytest-timeout does not cover the teardown
"""


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_stuck.py").write_text(STUCK)
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", str(folder), *UNUSED_PLUGINS]
    command += [*options, str(folder)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)


def test_in_one_process_the_run_ends_with_the_stack_of_the_fixture(tmp_path: Path) -> None:
    done = run(tmp_path, "-p", "no:xdist")
    assert done.returncode == 1
    assert "Timeout (0:00:00.5" in done.stderr
    assert "in stuck" in done.stderr


def test_in_a_worker_process_the_run_ends_with_the_name_of_the_test_and_its_failure(tmp_path: Path) -> None:
    done = run(tmp_path, *IN_PARALLEL, "-n", "1")
    assert done.returncode == 1
    assert "crashed while running 'test_stuck.py::test_that_leaves_something_open'" in done.stdout
    assert "assert False" in done.stdout
    assert "in stuck" in done.stderr
