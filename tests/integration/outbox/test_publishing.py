"""Publishing in the caller's transaction, on every database and with every kind of connection."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import apsw
import psycopg
import pytest
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Session, scoped_session, sessionmaker

from tests.integration.outbox.conftest import EVERY_DATABASE
from tests.integration.outbox.databases import Database
from tidebook import outbox
from tidebook.core.errors import InvalidInput
from tidebook.outbox import Message
from tidebook.outbox.message import unpack_headers

every_database = pytest.mark.parametrize("empty_database", EVERY_DATABASE, indirect=True)
every_async_database = pytest.mark.parametrize(
    "empty_database", [each for each in EVERY_DATABASE if each.values != ("mysql",)], indirect=True
)


def published(database: Database) -> list[tuple[Any, ...]]:
    key = "`key`" if database.kind == "mysql" else "key"
    columns = f"topic, {key}, partition_key, payload, headers"
    rows = database.query(f"SELECT {columns} FROM kafka_messages ORDER BY id")
    return [(*row[:4], unpack_headers(row[4])) for row in rows]


@every_database
def test_a_commit_publishes_the_messages_unchanged(database: Database) -> None:
    with database.engine() as engine, Session(engine) as session, session.begin():
        outbox.publish(
            session, topic="orders", key=b"1", partition_key=b"c", payload=b"\x00\xff", headers={"kind": b"paid"}
        )
    assert published(database) == [("orders", b"1", b"c", b"\x00\xff", (("kind", b"paid"),))]


@every_database
def test_a_rollback_publishes_nothing(database: Database) -> None:
    with database.engine() as engine, Session(engine) as session:
        outbox.publish(session, topic="orders", key=b"1", payload=b"x")
        session.rollback()
    with database.connect() as connection:
        outbox.publish_list(connection, [Message("orders", b"x")] * 300)
        connection.rollback()
    assert database.waiting() == 0


@every_database
def test_a_dbapi_connection_publishes(database: Database) -> None:
    with database.connect() as connection:
        outbox.publish(connection, topic="orders", payload=None)
        connection.commit()
    assert published(database) == [("orders", None, None, None, ())]


@every_database
def test_a_sqlalchemy_connection_publishes(database: Database) -> None:
    with database.engine() as engine, engine.begin() as connection:
        outbox.publish(connection, topic="orders", key="ö", payload=b"x")
    assert published(database)[0][1] == "ö".encode()


@every_database
@pytest.mark.parametrize("ordered", [False, True])
def test_a_long_list_is_published_in_order(database: Database, ordered: bool) -> None:
    messages = [Message(f"t{n % 3}", str(n).encode(), key=str(n % 7).encode()) for n in range(2500)]
    with database.engine() as engine, Session(engine) as session, session.begin():
        outbox.publish_list(session, messages, ordered=ordered)
    assert [row[3] for row in published(database)] == [m.payload for m in messages]


class Base(DeclarativeBase):
    """A model class: it also has a `registry`, but not a registry of sessions."""


class OwnSession(AsyncSession):
    """A subclass, as applications define them."""


@every_async_database
async def test_an_async_session_or_connection_is_awaited(database: Database) -> None:
    engine = create_async_engine(database.sqlalchemy_url(asynchronous=True))
    async with AsyncSession(engine) as session, session.begin():
        await outbox.publish(session, topic="orders", payload=b"session")
    async with OwnSession(engine) as own, own.begin():
        await outbox.publish(own, topic="orders", payload=b"a session of the application's own class")
    async with engine.begin() as connection:
        await outbox.publish_list(connection, [Message("orders", b"connection")])
    async with AsyncSession(engine) as session:
        await outbox.publish(session, topic="orders", payload=b"gone")
        await session.rollback()
    await engine.dispose()
    assert [row[3] for row in published(database)] == [
        b"session",
        b"a session of the application's own class",
        b"connection",
    ]


@pytest.mark.postgres
async def test_psycopgs_async_connection_is_awaited(postgres: Database) -> None:
    async with await psycopg.AsyncConnection.connect(postgres.url) as connection:
        await outbox.publish(connection, topic="orders", payload=b"x")
    assert postgres.waiting() == 1


@every_async_database
async def test_a_registry_of_sessions_publishes_in_the_session_of_the_task(database: Database) -> None:
    engine = create_async_engine(database.sqlalchemy_url(asynchronous=True))
    registry = async_scoped_session(async_sessionmaker(engine), scopefunc=asyncio.current_task)
    await outbox.publish(registry, topic="orders", payload=b"x")
    assert database.waiting() == 0
    await registry.commit()
    await registry.remove()
    await engine.dispose()
    with database.engine() as blocking:
        threads = scoped_session(sessionmaker(blocking))
        outbox.publish(threads, topic="orders", payload=b"y")
        threads.commit()
        threads.remove()
    assert [row[3] for row in published(database)] == [b"x", b"y"]


@pytest.mark.postgres
@pytest.mark.parametrize("factory", [psycopg.ClientCursor, psycopg.RawCursor])
def test_a_psycopg_connection_publishes_with_any_cursor_class(postgres: Database, factory: Any) -> None:
    with psycopg.connect(postgres.url, cursor_factory=factory) as connection:
        outbox.publish(connection, topic="orders", key="'%s$1", payload=b"\x00", headers={"a": b"1"}, ordered=True)
    assert published(postgres) == [("orders", b"'%s$1", None, b"\x00", (("a", b"1"),))]


@every_database
def test_an_object_that_is_no_connection_is_refused(database: Database) -> None:
    with database.engine() as engine, database.connect() as connection:
        for wrong in (engine, connection.cursor(), Base, database.url, None):
            with pytest.raises(InvalidInput, match="is not a session or connection"):
                outbox.publish(wrong, topic="orders", payload=b"x")


@every_database
@pytest.mark.parametrize("ordered", [False, True])
def test_an_empty_list_publishes_nothing(database: Database, ordered: bool) -> None:
    with database.connect() as connection:
        outbox.publish_list(connection, [], ordered=ordered)
        connection.commit()
    assert database.waiting() == 0


@pytest.mark.parametrize("empty_database", ["sqlite"], indirect=True)
def test_apsw_publishes_inside_its_transaction(database: Database) -> None:
    connection = apsw.Connection(database.url.removeprefix("sqlite:///"))
    with pytest.raises(InvalidInput, match="autocommit"):
        outbox.publish(connection, topic="orders", payload=b"x")
    with connection:
        outbox.publish(connection, topic="orders", payload=b"x")
    connection.close()
    assert database.waiting() == 1


@pytest.mark.postgres
def test_a_rolled_back_savepoint_publishes_nothing(postgres: Database) -> None:
    with postgres.engine() as engine, Session(engine) as session, session.begin():
        outbox.publish(session, topic="orders", payload=b"kept")
        nested = session.begin_nested()
        outbox.publish(session, topic="orders", payload=b"gone")
        nested.rollback()
    assert [row[3] for row in published(postgres)] == [b"kept"]


@every_database
def test_creating_the_tables_again_keeps_the_waiting_messages(database: Database) -> None:
    identity = database.query("SELECT uuid FROM kafka_outbox")
    with database.connect() as connection:
        outbox.publish(connection, topic="orders", payload=b"x")
        outbox.create_tables(connection)
        connection.commit()
    assert database.waiting() == 1
    assert database.query("SELECT uuid FROM kafka_outbox") == identity


@pytest.mark.parametrize(
    "empty_database", [each for each in EVERY_DATABASE if each.values != ("sqlite",)], indirect=True
)
def test_rule_34_ordered_makes_id_order_commit_order_for_a_key(database: Database) -> None:
    """T2's ordered publish for the same key waits until T1 ends; one for another key does not."""
    done = threading.Event()

    def second() -> None:
        with database.connect() as connection:
            outbox.publish(connection, topic="orders", key=b"k", payload=b"second", ordered=True)
            connection.commit()
        done.set()

    with database.connect() as first:
        outbox.publish(first, topic="orders", key=b"k", payload=b"first", ordered=True)
        waiter = threading.Thread(target=second)
        waiter.start()
        with database.connect() as other:
            outbox.publish(other, topic="orders", key=b"another", payload=b"other", ordered=True)
            other.commit()
        assert not done.is_set()
        outbox.publish(first, topic="orders", key=b"k", payload=b"first too", ordered=True)
        first.commit()
        waiter.join()
    assert [row[3] for row in published(database) if row[1] == b"k"] == [b"first", b"first too", b"second"]


@pytest.mark.postgres
def test_a_transaction_has_its_number_before_a_row_has_its_id(postgres: Database) -> None:
    """PostgreSQL evaluates defaults in column order, which the relay's scan floor depends on."""
    postgres.query(
        "CREATE TABLE probe (xid xid8 DEFAULT pg_current_xact_id(), "
        "assigned boolean DEFAULT (pg_current_xact_id_if_assigned() IS NOT NULL), n int)"
    )
    postgres.query("INSERT INTO probe (n) VALUES (1)")
    postgres.query("INSERT INTO probe (n) VALUES (2), (3)")
    postgres.query("INSERT INTO probe (n) SELECT * FROM unnest(ARRAY[4, 5])")
    assert postgres.query("SELECT DISTINCT assigned FROM probe") == [(True,)]
    columns = "SELECT column_name FROM information_schema.columns WHERE table_name = 'kafka_messages'"
    names = [name for (name,) in postgres.query(f"{columns} ORDER BY ordinal_position")]
    assert names.index("xid") < names.index("id")
