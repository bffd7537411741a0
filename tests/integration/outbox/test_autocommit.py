"""A connection in autocommit and outside a transaction is refused, for every driver."""

from __future__ import annotations

from typing import Any

import psycopg
import pymysql
import pytest
import sqlalchemy
from sqlalchemy.ext.asyncio import create_async_engine

from tests.integration.outbox.databases import Database, mysql_parameters
from tidebook import outbox
from tidebook.core.errors import InvalidInput

on_mysql = pytest.mark.parametrize("empty_database", [pytest.param("mysql", marks=pytest.mark.mariadb)], indirect=True)
on_sqlite = pytest.mark.parametrize("empty_database", ["sqlite"], indirect=True)


class Shaped:
    """Wraps a real connection and exposes only the attributes that another driver's connection has."""

    def __init__(self, inner: pymysql.Connection[Any]) -> None:
        self.inner = inner

    def cursor(self) -> Any:
        return self.inner.cursor()


class Mysqlclient(Shaped):
    """Reports autocommit by a method, and does not report whether it is in a transaction."""

    def get_autocommit(self) -> bool:
        return bool(self.inner.get_autocommit())

    def autocommit(self, on: bool) -> None:
        raise AssertionError("autocommit must be read, not set")


class MysqlConnector(Shaped):
    """Reports both by properties."""

    @property
    def autocommit(self) -> bool:
        return bool(self.inner.get_autocommit())

    @property
    def in_transaction(self) -> bool:
        return bool(self.inner.server_status & 1)

    def cursor(self) -> Any:
        return _Unread(self.inner.cursor())


class Mariadb(Shaped):
    """Reports autocommit by a property and the transaction by the server's flags; its parameters are question marks."""

    @property
    def autocommit(self) -> bool:
        return bool(self.inner.get_autocommit())

    @property
    def server_status(self) -> int:
        return int(self.inner.server_status)

    def cursor(self) -> Any:
        return _QuestionMarks(self.inner.cursor())


class _Unread:
    """A cursor that can be closed only after all its rows have been read."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.execute, self.fetchall = inner.execute, inner.fetchall

    @property
    def description(self) -> Any:
        return self._inner.description

    def close(self) -> None:
        assert self._inner.fetchone() is None, "Unread result found"
        self._inner.close()


class _QuestionMarks:
    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.close, self.fetchall = inner.close, inner.fetchall

    @property
    def description(self) -> Any:
        return self._inner.description

    def execute(self, sql: str, parameters: Any = None) -> None:
        self._inner.execute(sql.replace("?", "%s"), parameters)


Mysqlclient.__module__ = "MySQLdb.connections"
MysqlConnector.__module__ = "mysql.connector.connection"
Mariadb.__module__ = "mariadb.connections"


@pytest.mark.postgres
def test_a_connection_in_autocommit_is_refused_unless_it_is_in_a_transaction(postgres: Database) -> None:
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        with pytest.raises(InvalidInput, match="begin a transaction"):
            outbox.publish(connection, topic="orders", payload=b"x")
        with connection.transaction():
            outbox.publish(connection, topic="orders", payload=b"x")
    assert postgres.waiting() == 1


@on_mysql
@pytest.mark.parametrize("shape", [lambda inner: inner, Mysqlclient, MysqlConnector, Mariadb])
def test_every_mysql_driver_in_autocommit_is_refused_unless_it_is_in_a_transaction(
    database: Database, shape: Any
) -> None:
    inner = pymysql.connect(**mysql_parameters(database.url), autocommit=True)
    connection = shape(inner)
    with pytest.raises(InvalidInput, match="begin a transaction"):
        outbox.publish(connection, topic="orders", payload=b"x")
    inner.begin()
    outbox.publish(connection, topic="orders", payload=b"x", key="k", ordered=True)
    assert database.waiting() == 0
    inner.commit()
    assert database.waiting() == 1
    inner.autocommit(False)
    outbox.publish(connection, topic="orders", payload=b"y")
    inner.rollback()
    inner.close()
    assert database.waiting() == 1


@pytest.mark.postgres
async def test_a_driver_that_only_sqlalchemy_knows_is_refused_in_autocommit(postgres: Database) -> None:
    engine = create_async_engine(postgres.url.replace("postgresql", "postgresql+asyncpg"))
    async with engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
        with pytest.raises(InvalidInput, match="begin a transaction"):
            await outbox.publish(connection, topic="orders", payload=b"x")
    async with engine.begin() as connection:
        await outbox.publish(connection, topic="orders", payload=b"x")
    await engine.dispose()
    assert postgres.waiting() == 1


@on_sqlite
async def test_aiosqlite_may_leave_the_begin_to_sqlalchemys_events(database: Database) -> None:
    engine = create_async_engine(database.sqlalchemy_url(asynchronous=True))

    @sqlalchemy.event.listens_for(engine.sync_engine, "connect")
    def _by_hand(connection: Any, record: object) -> None:
        connection.isolation_level = None

    async with engine.connect() as connection:
        with pytest.raises(InvalidInput, match="begin a transaction"):
            await outbox.publish(connection, topic="orders", payload=b"x")
    sqlalchemy.event.listen(engine.sync_engine, "begin", lambda begun: begun.exec_driver_sql("BEGIN"))
    async with engine.begin() as connection:
        await outbox.publish(connection, topic="orders", payload=b"x")
    await engine.dispose()
    assert database.waiting() == 1


async def test_an_unknown_async_connection_is_refused() -> None:
    class Connection:
        async def cursor(self) -> None: ...

    Connection.__module__ = "mysql.connector.aio.connection"
    with pytest.raises(InvalidInput, match="async connection of mysql"):
        outbox.publish(Connection(), topic="orders", payload=b"x")
