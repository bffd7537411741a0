"""Closing during reads, and opening an open file: no raw error, no leaked descriptor, no lost lock."""

from __future__ import annotations

import asyncio
import os
import resource
import threading
from pathlib import Path

import apsw
import pytest

import tidebook
from tidebook.core.errors import TidebookError, Unavailable
from tidebook.core.event import Event
from tidebook.core.key import Key
from tidebook.sqlite.database import Database, Schema
from tidebook.wiring.book import Book

ONE = Schema(name="numbers", application_id=77, steps=("CREATE TABLE number (n INTEGER)",))
SECONDS_MAX = 30


def locks_held(path: Path) -> int:
    """Count the POSIX locks of this process on a file, as the kernel reports them."""
    inode = f":{path.stat().st_ino} "
    lines = Path("/proc/locks").read_text().splitlines()
    return sum(inode in line and f" {os.getpid()} " in line for line in lines)


def still_open(folder: Path) -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        found += [path] if path.startswith(str(folder)) else []
    return found


async def keep_reading(book: Book, begun: asyncio.Event) -> None:
    log, store = book.log, book.store
    while True:
        await log.read("t", 0, start=0, stop=10**6)
        await store.head(Key("t", "0"))
        begun.set()
        await asyncio.sleep(0)


async def test_a_book_is_closed_while_its_tasks_read(tmp_path: Path) -> None:
    for _ in range(10):
        async with tidebook.open(tmp_path) as book:
            await book.journal("t").append("0", [Event({"n": n}) for n in range(500)])
            begun = asyncio.Event()
            tasks = [asyncio.create_task(keep_reading(book, begun)) for _ in range(4)]
            await begun.wait()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert [error for error in ended if not isinstance(error, TidebookError)] == []
        assert still_open(tmp_path) == []


def test_close_waits_for_a_read_of_another_thread(tmp_path: Path) -> None:
    database = Database(tmp_path / "n.db", ONE)
    begun, finish = threading.Event(), threading.Event()
    steps: list[str] = []

    def read() -> None:
        with database.reading() as connection:
            rows = connection.execute("VALUES (1), (2)")
            next(rows)
            begun.set()
            assert finish.wait(SECONDS_MAX)
            steps.append(f"read {next(rows)}")

    def close() -> None:
        database.close()
        steps.append("closed")

    reader, closer = threading.Thread(target=read), threading.Thread(target=close)
    reader.start()
    assert begun.wait(SECONDS_MAX)
    closer.start()
    while not database.closed:  # it refuses new reads before it waits for those in progress
        pass
    with pytest.raises(Unavailable), database.reading():
        pass
    finish.set()
    closer.join()
    reader.join()
    assert steps == ["read (2,)", "closed"]
    assert still_open(tmp_path) == []


def test_opening_a_file_keeps_the_locks_that_the_process_has_on_it(tmp_path: Path) -> None:
    path = tmp_path / "n.db"
    Database(path, ONE).close()
    other = apsw.Connection(str(path))
    other.execute("SELECT count(*) FROM number").fetchall()
    held = locks_held(path)
    assert held
    database = Database(path, ONE)
    assert locks_held(path) >= held
    database.close()
    assert locks_held(path) == held
    other.close()
    assert still_open(tmp_path) == []


def test_a_new_folder_and_its_parents_are_synced_before_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[int, int]] = []
    fsync = os.fsync

    def recording(file: int) -> None:
        stats = os.fstat(file)
        synced.append((stats.st_dev, stats.st_ino))
        fsync(file)

    monkeypatch.setattr(os, "fsync", recording)
    with tidebook.open_sync(tmp_path / "a" / "b" / "book", create=True):
        pass
    for folder in (tmp_path, tmp_path / "a", tmp_path / "a" / "b", tmp_path / "a" / "b" / "book"):
        stats = folder.stat()
        assert (stats.st_dev, stats.st_ino) in synced, folder


def test_connections_of_threads_that_have_ended_are_closed(tmp_path: Path) -> None:
    database = Database(tmp_path / "n.db", ONE)

    def read() -> None:
        with database.reading() as connection:
            connection.execute("SELECT count(*) FROM number").fetchall()

    def read_in_threads(count: int) -> int:
        for _ in range(count):
            reader = threading.Thread(target=read)
            reader.start()
            reader.join()
        return len(still_open(tmp_path))

    read()
    few = read_in_threads(2)
    assert read_in_threads(20) == few
    database.close()
    assert still_open(tmp_path) == []


def test_too_many_open_files_are_reported_as_such(tmp_path: Path) -> None:
    database = Database(tmp_path / "n.db", ONE)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 8, limits[1]))
    try:
        while True:
            try:
                taken.append(os.dup(0))
            except OSError:
                break
        with pytest.raises(Unavailable, match="too many open files"), database.reading():
            pass
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        database.close()
