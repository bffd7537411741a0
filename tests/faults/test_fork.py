"""If a process forks while a book is open, nothing acknowledged is lost and nothing hangs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import tidebook
from tests.integration.outbox.databases import postgres_database

DRIVER = Path(__file__).with_name("fork_driver.py")
ROOT = Path(__file__).resolve().parents[2]
SERVERS = (pytest.mark.kafka, pytest.mark.cassandra, pytest.mark.postgres)


def on_servers(test: Callable[..., None]) -> Callable[..., None]:
    for mark in SERVERS:
        test = mark(test)
    return test


def driver_report(kind: str, where: Path, name: str = "t") -> Any:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", str(DRIVER), kind, str(where), name]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=180)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_workers_that_open_their_own_books_lose_nothing(tmp_path: Path, method: str) -> None:
    report = driver_report(method, tmp_path)
    assert report["problems"] == []
    assert report["lost"] == {"journal": 0, "wal": 0, "queue": 0, "outbox": 0}
    for feature in ("queue", "outbox"):
        assert [report["acknowledged"][name][feature] for name in "123"] == [40, 80, 120]


def test_workers_of_a_master_that_preloaded_the_application_are_refused_its_book(tmp_path: Path) -> None:
    assert_workers_are_refused(driver_report("preload", tmp_path))


def assert_workers_are_refused(report: Any) -> None:
    assert [len(answers) for answers in report["refused"]] == [12, 12, 12]
    assert {reported for answers in report["refused"] for reported in answers.values()} == {"InvalidInput"}
    assert report["pointers"] == [4, 5, 5, 5]


def test_workers_of_gunicorn_with_preload_lose_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gunicorn", "--preload", "--workers", "3", "--bind", "127.0.0.1:0"]
    command += ["--worker-tmp-dir", str(tmp_path), "--no-control-socket", "tests.faults.preloaded_app:application"]
    variables = {**os.environ, "PRELOADED_FOLDER": str(tmp_path / "book")}
    server = subprocess.Popen(command, cwd=ROOT, env=variables, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        address = next(
            found.group(1) for line in server.stderr if (found := re.search(r"Listening at: (http://\S+)", line))
        )
        draining = threading.Thread(target=server.stderr.read)  # so that the server never waits for its log's reader
        draining.start()

        def ask(path: str) -> Any:
            with urllib.request.urlopen(f"{address}{path}", timeout=60) as answer:
                return json.load(answer)

        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(lambda n: ask(f"/append/{n}"), range(150)))
            refusals = list(pool.map(lambda _: ask("/inherited"), range(6)))
    finally:
        server.terminate()
        server.wait(60)
    draining.join(60)
    server.stderr.close()
    assert all("opened before this process forked" in answer["refused"] for answer in refusals)
    acknowledged: dict[str, set[int]] = {}
    for answer in answers:
        acknowledged.setdefault(answer["worker"], set()).add(answer["n"])
    with tidebook.open_sync(tmp_path / "book") as book:
        journal = book.journal("t")
        assert [event.payload["n"] for event in journal.read("master")] == [0]
        for worker, numbers in acknowledged.items():
            assert {event.payload["n"] for event in journal.read(worker)} == numbers


def test_an_async_book_is_refused_in_the_child_at_once(tmp_path: Path) -> None:
    assert_every_use_is_refused(driver_report("async", tmp_path)["refused"])


def assert_every_use_is_refused(refused: dict[str, str]) -> None:
    assert refused.pop("ended in the parent's loop") == refused.pop("ended in a separate loop") == "0"
    assert len(refused) == 42
    assert {name: reported for name, reported in refused.items() if reported != "InvalidInput"} == {}


@pytest.fixture
def servers(tmp_path: Path, kafka_bootstrap: str, cassandra_address: str, postgres_url: str) -> Iterator[Path]:
    """Write the settings of a book that uses servers for everything."""
    with postgres_database(postgres_url) as database:
        toml = tmp_path / "tidebook.toml"
        toml.write_text(
            f'[log]\nurl = "kafka://{kafka_bootstrap}"\n[store]\nurl = "cassandra://{cassandra_address}/fork_tests"\n'
            f'[sql]\nurl = "{database.url}"\n[journal]\nsegments = 8\n'
        )
        yield toml


@on_servers
def test_an_async_book_on_servers_is_refused_in_the_child_at_once(servers: Path) -> None:
    assert_every_use_is_refused(driver_report("async", servers, f"t{uuid4().hex[:12]}")["refused"])


@on_servers
def test_workers_of_a_master_that_preloaded_a_book_on_servers_are_refused_it(servers: Path) -> None:
    assert_workers_are_refused(driver_report("preload", servers, f"t{uuid4().hex[:12]}"))


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
