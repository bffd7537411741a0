"""The outbox's SQLite file: one SQLite library per process, and no connection is used after a fork."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest

import tidebook
from tests.forked_child import in_child
from tidebook.core.errors import InvalidInput
from tidebook.outbox.message import Message, message
from tidebook.outbox.publish import DatabaseBackend
from tidebook.outbox.settings import OutboxSettings
from tidebook.outbox.sqlite import SqliteOutboxDatabase, SqliteOutboxStore

SECONDS_MAX = 30


@pytest.fixture
def database(tmp_path: Path) -> SqliteOutboxDatabase:
    return SqliteOutboxDatabase(tmp_path / "outbox.db", OutboxSettings())


@pytest.fixture
def store(database: SqliteOutboxDatabase) -> Iterator[SqliteOutboxStore]:
    store = database.connect()
    store.create_tables()
    yield store
    store.close()


def a_message() -> Message:
    return message(topic="t", payload=b"x")


def publish(connection: apsw.Connection) -> None:
    connection.execute("BEGIN IMMEDIATE")
    try:
        DatabaseBackend().publish(connection, [a_message()], ordered=False)
    finally:
        connection.execute("COMMIT")


def waiting(store: SqliteOutboxStore) -> int:
    return sum(status.waiting for status in store.status(count_max=100))


def test_apsw_is_refused_while_the_relay_has_the_file_open(store: SqliteOutboxStore, tmp_path: Path) -> None:
    connection = apsw.Connection(str(tmp_path / "outbox.db"))
    with pytest.raises(InvalidInput, match="sqlite3"):
        publish(connection)
    assert waiting(store) == 0
    store.close()
    publish(connection)
    connection.close()


def test_the_relay_is_refused_while_apsw_has_the_file_open(
    database: SqliteOutboxDatabase, store: SqliteOutboxStore, tmp_path: Path
) -> None:
    store.close()
    (tmp_path / "link.db").symlink_to(tmp_path / "outbox.db")
    connection = apsw.Connection(str(tmp_path / "link.db"))
    with pytest.raises(InvalidInput, match="apsw"):
        database.connect()
    connection.close()
    again = database.connect()
    assert waiting(again) == 0
    again.close()


async def test_the_outbox_of_a_book_is_refused_while_apsw_has_the_file_open(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path) as book:
        path = book.outbox.url.removeprefix("sqlite:///")
        connection = apsw.Connection(path)
        with pytest.raises(InvalidInput, match="apsw"):
            await book.outbox.status()
        connection.close()
        assert await book.outbox.status() == []


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_fork_waits_for_a_transaction_of_the_relay(database: SqliteOutboxDatabase, store: SqliteOutboxStore) -> None:
    begun, finish = threading.Event(), threading.Event()

    def relay() -> None:
        with store._transaction(durable=True):
            begun.set()
            assert finish.wait(SECONDS_MAX)

    relaying = threading.Thread(target=relay)
    relaying.start()
    assert begun.wait(SECONDS_MAX)
    threading.Timer(0.05, finish.set).start()  # the fork waits for this commit, however late it is

    def child() -> str:
        with pytest.raises(InvalidInput, match="fork"):
            store.topics_waiting()
        own = database.connect()
        own.publish([a_message()], ordered=False)  # an inherited copy of the parent's write lock would block it
        return f"{waiting(own)} waiting"

    assert in_child(child) == "1 waiting"
    relaying.join()
    assert waiting(store) == 1


def test_a_file_that_the_application_had_open_at_the_fork_is_refused(
    database: SqliteOutboxDatabase, store: SqliteOutboxStore, tmp_path: Path
) -> None:
    theirs = sqlite3.connect(tmp_path / "outbox.db")

    def child() -> str:
        with pytest.raises(InvalidInput, match="spawn"):
            database.connect()
        return "refused"

    assert in_child(child) == "refused"
    theirs.close()
