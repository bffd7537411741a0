"""Connections are closed before a fork; if that fails, the child refuses to open files."""

from __future__ import annotations

import asyncio
import fcntl
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import apsw
import pytest

from tests.forked_child import in_child
from tidebook.core.errors import InvalidInput
from tidebook.log.port import Outgoing
from tidebook.log.sqlite import SqliteLog
from tidebook.log.sqlite.relay_lock import RelayLocks
from tidebook.sqlite import forks
from tidebook.sqlite.database import Database, Schema
from tidebook.sqlite.shared_files import SharedFile

ONE = Schema(name="numbers", application_id=77, steps=("CREATE TABLE number (n INTEGER)",))
SECONDS_MAX = 30

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


@pytest.fixture
def file(tmp_path: Path) -> Iterator[SharedFile]:
    file = SharedFile.open(tmp_path, "n.db", ONE)
    yield file
    file.release()


def count(database: Database) -> int:
    with database.reading() as connection:
        return int(connection.execute("SELECT count(*) FROM number").get)


def insert(database: Database) -> None:
    with database.writing as connection:
        connection.execute("INSERT INTO number VALUES (1)")


def locks_held(path: Path) -> int:
    """Count the POSIX locks of this process on a file, as the kernel reports them."""
    inode = f":{path.stat().st_ino} "
    lines = Path("/proc/locks").read_text().splitlines()
    return sum(inode in line and f" {os.getpid()} " in line for line in lines)


def open_descriptors(path: Path) -> int:
    stats = path.stat()
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            other = os.fstat(int(name))
        except OSError:
            continue
        found += (other.st_dev, other.st_ino) == (stats.st_dev, stats.st_ino)
    return found


def test_a_child_is_refused_the_parents_file_and_takes_its_own_locks_on_another(file: SharedFile) -> None:
    insert(file.database)

    def child() -> str:
        with pytest.raises(InvalidInput, match="fork"):
            count(file.database)
        with pytest.raises(InvalidInput, match="fork"):
            insert(file.database)
        inherited = open_descriptors(file.path)
        own = SharedFile.open(file.path.parent, file.path.name, ONE)
        assert own is not file
        insert(own.database)
        return f"{inherited} inherited, {locks_held(file.path) > 0}, {count(own.database)} rows"

    assert in_child(child) == "0 inherited, True, 2 rows"
    assert count(file.database) == 2
    insert(file.database)
    assert count(file.database) == 3


def test_a_fork_waits_for_a_transaction_of_another_thread(file: SharedFile) -> None:
    begun, finish, forking = threading.Event(), threading.Event(), threading.Event()

    def commit() -> None:
        with file.database.writing as connection:
            connection.execute("BEGIN IMMEDIATE; INSERT INTO number VALUES (1)")
            begun.set()
            assert finish.wait(SECONDS_MAX)
            connection.execute("COMMIT")

    def finish_after_fork() -> None:
        assert forking.wait(SECONDS_MAX)
        finish.set()

    threads = [threading.Thread(target=each) for each in (commit, finish_after_fork)]
    for thread in threads:
        thread.start()
    assert begun.wait(SECONDS_MAX)
    in_time = _BeforeFork(forking)

    def child() -> str:
        own = SharedFile.open(file.path.parent, file.path.name, ONE)
        insert(own.database)  # an inherited copy of the parent's write lock would block it
        return f"{count(own.database)} rows"

    with in_time:
        assert in_child(child) == "2 rows"
    for thread in threads:
        thread.join()


class _BeforeFork:
    """Sets an event when the next fork starts to wait for this process's connections."""

    def __init__(self, event: threading.Event) -> None:
        self._event = event

    def __enter__(self) -> None:
        self._patch = pytest.MonkeyPatch()
        made = forks._Fork

        def make() -> forks._Fork:
            self._event.set()
            return made()

        self._patch.setattr(forks, "_Fork", make)

    def __exit__(self, *_: object) -> None:
        self._patch.undo()


def test_a_child_of_a_fork_that_timed_out_cannot_open_any_file(
    file: SharedFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forks, "FORK_S_MAX", 0.01)
    begun, finish = threading.Event(), threading.Event()

    def read() -> None:
        with file.database.reading():
            begun.set()
            assert finish.wait(SECONDS_MAX)

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(SECONDS_MAX)

    def child() -> str:
        refused = 0
        for folder in (tmp_path, tmp_path / "another"):
            try:
                SharedFile.open(folder, "n.db", ONE)
            except InvalidInput as error:
                refused += "spawn" in str(error)
        with pytest.raises(InvalidInput):
            count(file.database)
        return f"{refused} refused"

    assert in_child(child) == "2 refused"
    finish.set()
    reader.join()
    assert count(file.database) == 0


def test_a_refused_child_exits_without_touching_the_parents_connection(
    file: SharedFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forks, "FORK_S_MAX", 0.01)
    closed: list[str] = []

    class Watched:
        def close(self) -> None:
            closed.append("close")

        def __del__(self) -> None:
            closed.append("del")

    guarded: forks.GuardedConnection[Watched] = forks.GuardedConnection(Watched)
    begun, finish = threading.Event(), threading.Event()

    def use() -> None:
        with guarded:
            begun.set()
            assert finish.wait(SECONDS_MAX)

    user = threading.Thread(target=use)
    user.start()
    assert begun.wait(SECONDS_MAX)

    def child() -> str:
        nonlocal guarded
        guarded.close()
        del guarded
        return str(closed)

    assert in_child(child) == "[]"
    finish.set()
    user.join()


@pytest.mark.parametrize("library", [apsw.Connection, sqlite3.connect], ids=["apsw", "sqlite3"])
def test_a_file_that_the_application_had_open_at_the_fork_is_refused(
    file: SharedFile, library: Callable[[str], object]
) -> None:
    path = file.path.with_name("theirs.db")
    Database(path, ONE).close()
    theirs = library(str(path))
    theirs.execute("SELECT count(*) FROM number").fetchall()  # type: ignore[attr-defined]

    def child() -> str:
        with pytest.raises(InvalidInput, match="spawn"):
            Database(path, ONE)
        SharedFile.open(file.path.parent, file.path.name, ONE)
        return "refused"

    assert in_child(child) == "refused"
    theirs.close()  # type: ignore[attr-defined]


def test_a_child_of_a_child_opens_files_of_its_own(file: SharedFile) -> None:
    def grandchild() -> str:
        own = SharedFile.open(file.path.parent, file.path.name, ONE)
        insert(own.database)
        return f"{count(own.database)} rows"

    def child() -> str:
        own = SharedFile.open(file.path.parent, file.path.name, ONE)
        insert(own.database)
        return in_child(grandchild)

    assert in_child(child) == "2 rows"


def test_a_child_does_not_keep_its_parents_relay_lock(tmp_path: Path) -> None:
    locks = RelayLocks(tmp_path)
    assert locks.take("t")
    (answer, report), (until, end_child) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(end_child)
        os.write(report, b"taken" if locks.take("t") else b"refused")
        os.read(until, 1)  # stay alive until the parent has released the lock and checked it
        os._exit(0)
    try:
        assert os.read(answer, 10) == b"refused"
        locks.release("t")
        file = os.open(tmp_path / "outbox-locks" / "t.lock", os.O_RDWR)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError if the child still held the lock
        os.close(file)
    finally:
        for each in (answer, report, until, end_child):
            os.close(each)
        os.waitpid(pid, 0)


def test_a_fork_clears_the_cache_of_the_writer(tmp_path: Path) -> None:
    log = SqliteLog(tmp_path)

    async def append(to: SqliteLog, count: int) -> list[int]:
        return [(await to.append(Outgoing("t", 0, None, b""))).offset for _ in range(count)]

    async def remake() -> str:
        own = SqliteLog(tmp_path)
        await own.delete_topic("t")
        await own.create_topic("t", 1)
        offsets = await append(own, 2)
        await own.close()
        return str(offsets)

    asyncio.run(log.create_topic("t", 1))
    assert asyncio.run(append(log, 5)) == [0, 1, 2, 3, 4]
    assert in_child(lambda: asyncio.run(remake())) == "[0, 1]"
    assert asyncio.run(append(log, 1)) == [2]
    asyncio.run(log.close())


def test_a_signal_handler_that_forks_during_a_fork_blocks_nothing(
    file: SharedFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefork server replaces its workers in the handler of SIGCHLD."""
    take = forks._Fork.take
    nested: list[bool] = []

    def take_and_be_interrupted(fork: forks._Fork, lock: object) -> bool:
        taken = take(fork, lock)
        if lock is forks._registering and not nested:
            nested.append(False)
            # Call only the hooks: those of concurrent.futures are not reentrant, so a real fork here would never end.
            forks._before()
            nested.append(forks._forks[threading.get_ident()][-1].clean)
            forks._in_parent()
        return taken

    monkeypatch.setattr(forks._Fork, "take", take_and_be_interrupted)
    insert(file.database)
    assert in_child(lambda: f"inside: {forks._forked_inside_sqlite}") == "inside: False"
    assert nested == [False, True]
    assert forks._forks == {}
    rows: list[int] = []
    other = threading.Thread(target=lambda: rows.append(count(file.database)), daemon=True)
    other.start()
    other.join(SECONDS_MAX)
    assert rows == [1]
