"""Nothing that was acknowledged is lost, and nothing hangs, whatever forks while a book is open."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tidebook

DRIVER = Path(__file__).with_name("fork_driver.py")


def driven(kind: str, folder: Path) -> Any:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", str(DRIVER), kind, str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=180)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_workers_that_open_a_book_of_their_own_lose_nothing(tmp_path: Path, method: str) -> None:
    report = driven(method, tmp_path)
    assert report["problems"] == []
    assert report["lost"] == {"journal": 0, "wal": 0, "queue": 0}
    assert [report["acknowledged"][name]["queue"] for name in "123"] == [40, 80, 120]


def test_workers_of_a_master_that_preloaded_the_application_are_refused_its_book(tmp_path: Path) -> None:
    report = driven("preload", tmp_path)
    assert len(report["refused"]) == 3
    assert {told for answers in report["refused"] for told in answers.values()} == {"InvalidInput"}
    assert report["pointers"] == [4, 5, 5, 5]


def test_an_async_book_is_refused_in_the_child_at_once(tmp_path: Path) -> None:
    refused = driven("async", tmp_path)["refused"]
    assert refused.pop("ended in the parent's loop") == refused.pop("ended in a loop of its own") == "0"
    assert len(refused) == 22
    assert {name: told for name, told in refused.items() if told != "InvalidInput"} == {}


CONFTEST = """
import os, sys, tidebook
if "PYTEST_XDIST_WORKER" not in os.environ:
    book = tidebook.open_sync(os.environ["FOLDER"]).__enter__()
    book.journal("t").append("controller", [tidebook.Event({})])
"""
TESTS = """
import os, pytest, tidebook
@pytest.mark.parametrize("number", range(4))
def test_append(number):
    with tidebook.open_sync(os.environ["FOLDER"]) as book:
        for n in range(10):
            book.journal("t").append(f"test {number}", [tidebook.Event({"n": n})])
"""


def test_workers_of_pytest_xdist_lose_nothing(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", str(tmp_path)]
    environment = {**os.environ, "FOLDER": str(tmp_path / "book")}
    environment.pop("PYTEST_XDIST_WORKER", None)
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=180
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    with tidebook.open_sync(tmp_path / "book") as book:
        assert [book.journal("t").pointer(f"test {number}") for number in range(4)] == [10] * 4
        assert book.journal("t").pointer("controller") == 1
