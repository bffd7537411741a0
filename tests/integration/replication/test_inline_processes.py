"""Inline replication in several processes: one is active, and another takes over when it is killed; `tidebook up`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import tidebook
from tests.pipeline.commands import running
from tidebook.core.event import Event
from tidebook.replication import inline
from tidebook.wiring.book import Book

WITHIN_S = 30.0
TAKE_OVER_S = 10.0

# Prints its state whenever it changes; ends at the end of its input.
REPLICATOR = """
import asyncio, sys, tidebook
async def main():
    async with tidebook.open(sys.argv[1], replicate=True) as book:
        ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
        state = None
        while not ended.done():
            if (now := book.replication.status().state) != state:
                state = now
                print(state, flush=True)
            await asyncio.sleep(0.02)
asyncio.run(main())
"""

# Forks while it is active: the child must not keep the lock, and its copy of the book is refused.
FORKING = """
import os, sys, time, tidebook
with tidebook.open_sync(sys.argv[1], replicate=True) as book:
    book.journal("orders").append("o-1", [tidebook.Event(1, tags={"paid"})])
    while book.replication.status().state != "active":
        time.sleep(0.01)
    child = os.fork()
    if child == 0:
        try:
            book.journal("orders").append("o-2", [tidebook.Event(2)])
        except tidebook.InvalidInput:
            print("refused", os.getpid(), flush=True)
            time.sleep(60)
        os._exit(1)
    time.sleep(0.5)
    assert next(iter(book.tags.subscribe("paid", "g").__enter__())).payload == 1
os._exit(0)
"""


class Replicator:
    """A process that has the book open with `replicate=True`."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", REPLICATOR, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def wait_for(self, *states: str) -> str:
        """Read the process's states until one of these; a failing wait ends at the test's time limit."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.strip() in states:
                return line.strip()
        raise AssertionError(f"the replicator ended with {self.process.wait()}")

    def end(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


@contextmanager
def replicators(folder: Path, count: int) -> Iterator[list[Replicator]]:
    started = [Replicator(folder) for _ in range(count)]
    try:
        yield started
    finally:
        for each in started:
            each.end()


async def seen(book: Book, count: int) -> list[Any]:
    """Follow the tag until this many events have been seen."""
    found: list[Any] = []
    async with asyncio.timeout(WITHIN_S):
        async for event in book.tags.read("paid", follow=True):
            found.append(event.payload)
            if len(found) == count:
                break
    return found


async def test_when_the_active_process_is_killed_another_takes_over_and_nothing_is_lost(
    tmp_path: Path, long_form: bool
) -> None:
    folder, count = tmp_path / "book", 0
    async with tidebook.open(folder) as book:
        journal = book.journal("orders")

        async def append_some() -> None:
            nonlocal count
            for _ in range(20):
                await journal.append(f"o-{count % 7}", [Event(count, tags={"paid"})])
                count += 1

        await append_some()
        with replicators(folder, 2) as started:
            one, two = started
            first = await asyncio.to_thread(one.wait_for, "active", "passive")
            second = await asyncio.to_thread(two.wait_for, "active", "passive")
            assert {first, second} == {"active", "passive"}
            active, passive = (one, two) if first == "active" else (two, one)
            for _ in range(10 if long_form else 2):
                await append_some()
                active.process.kill()
                began_s = time.monotonic()
                await append_some()
                await asyncio.to_thread(passive.wait_for, "active")
                assert time.monotonic() - began_s < TAKE_OVER_S
                active, passive = passive, Replicator(folder)
                started.append(passive)
                assert await asyncio.to_thread(passive.wait_for, "active", "passive") == "passive"
                found = await seen(book, count)
                assert sorted(found) == list(range(count))
        for id in range(7):
            numbers = [event.payload async for event in journal.read(f"o-{id}")]
            assert numbers == list(range(id, count, 7))


async def test_a_stopped_holder_is_reported_replaced_and_harmless_when_it_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inline, "SILENT_S", 0.5)
    monkeypatch.setattr(inline, "SEIZE_S", 3.0)
    monkeypatch.setattr(inline, "LOCK_EVERY_S", 0.1)
    folder = tmp_path / "book"
    async with tidebook.open(folder) as before:
        await before.journal("orders").append("o-1", [Event(0, tags={"paid"})])
    with replicators(folder, 1) as (holder,):
        await asyncio.to_thread(holder.wait_for, "active")
        async with tidebook.open(folder, replicate=True) as book:
            journal, replication = book.journal("orders"), book.replication
            assert replication is not None
            await eventually(lambda: replication.status().state == "passive")
            assert await seen(book, 1) == [0]
            holder.process.send_signal(signal.SIGSTOP)
            await journal.append("o-2", [Event(1, tags={"paid"})])
            await eventually(lambda: replication.status().silent_holder is not None)
            problems = (await book.health()).problems
            assert any("has not responded" in each for each in problems), problems
            assert sorted(await seen(book, 2)) == [0, 1]
            status = replication.status()
            assert (status.state, status.silent_holder) == ("active", None)
            holder.process.send_signal(signal.SIGCONT)
            await asyncio.to_thread(holder.wait_for, "passive")
            await journal.append("o-1", [Event(2, tags={"paid"})])
            assert sorted(await seen(book, 3)) == [0, 1, 2]
            assert [event.payload async for event in journal.read("o-1")] == [0, 2]


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def test_a_forked_child_neither_replicates_nor_keeps_the_lock(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", FORKING, str(tmp_path / "book")],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )  # fmt: skip
    assert parent.stdout is not None
    word, child = parent.stdout.readline().split()
    try:
        assert word == "refused"
        assert parent.wait(WITHIN_S) == 0
        with replicators(tmp_path / "book", 1) as (other,):
            assert other.wait_for("active", "passive") == "active", "the living child holds the lock"
    finally:
        os.kill(int(child), signal.SIGKILL)
        parent.stdout.close()


async def test_up_replicates_without_spark_and_shows_it(tmp_path: Path) -> None:
    where = str(tmp_path / "book")
    without_java = {"JAVA_HOME": "", "PATH": str(tmp_path)}
    with running("up", "--json", "--every-s", "0.1", "--book", where, **without_java) as command:
        await asyncio.to_thread(command.until, lambda row: "topics" in row)
        async with tidebook.open(where) as book:
            await book.journal("orders").append("o-1", [Event(1, tags={"paid"})])
            assert await seen(book, 1) == [1]
        row = await asyncio.to_thread(
            command.until, lambda row: row.get("replication") == "running" and row["topics"][0]["lag"] == 0
        )
        assert row["engine"] == "inline"
        began_s = time.monotonic()
        code, _ = command.end()
        assert code == 0
        assert time.monotonic() - began_s < 5  # including the interpreter's shutdown


def test_replicate_once_of_a_folder_does_not_load_spark_and_prints_its_result(tmp_path: Path) -> None:
    with tidebook.open_sync(tmp_path / "book") as book:
        book.journal("orders").append("o-1", [Event(1, tags={"paid"})])
    code = "import atexit, sys; atexit.register(lambda: print('pyspark' in sys.modules))"
    command = [sys.executable, "-c", f"{code}; from tidebook.cli.app import main; main()"]
    command += ["pipeline", "replicate", "--once", "--json", "--book", str(tmp_path / "book")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    *_, last, loads_spark = done.stdout.splitlines()
    assert loads_spark == "False"
    row = json.loads(last)
    assert (row["done"], row["stopped"]) == (True, {})
    assert row["records"] >= 1
    with tidebook.open_sync(tmp_path / "book") as book:
        assert [event.payload for event in book.tags.read("paid")] == [1]


@pytest.mark.parametrize("arguments", [["up"], ["pipeline", "replicate", "--engine", "inline"]], ids=" ".join)
def test_inline_with_a_server_is_refused_with_the_remedy(tmp_path: Path, arguments: list[str]) -> None:
    toml = tmp_path / "tidebook.toml"
    toml.write_text("[log]\nurl = 'kafka://127.0.0.1:1'\n[pipeline]\nengine = 'inline'\n")
    done = subprocess.run(
        [sys.executable, "-m", "tidebook.cli", *arguments, "--book", str(toml)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "tidebook pipeline replicate" in done.stderr
