"""Whether a connection would commit a statement by itself, as each driver and framework reports it."""

from __future__ import annotations

import sqlite3
from types import SimpleNamespace
from typing import Any

import apsw
import pytest
import sqlalchemy

from tidebook.runtime.autocommit import commits_each_statement, driver_of


def of_module(name: str, **attributes: Any) -> Any:
    """Return an object whose class is in a driver's package."""
    return type("Connection", (SimpleNamespace,), {"__module__": f"{name}.connection"})(**attributes)


def test_a_sqlite3_connection_commits_each_statement_only_in_autocommit_and_outside_a_transaction() -> None:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    assert commits_each_statement(connection)
    connection.execute("BEGIN")
    assert not commits_each_statement(connection)
    assert not commits_each_statement(sqlite3.connect(":memory:"))


def test_an_apsw_connection_commits_each_statement_outside_a_transaction() -> None:
    connection = apsw.Connection(":memory:")
    assert commits_each_statement(connection)
    with connection:
        assert not commits_each_statement(connection)


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
@pytest.mark.parametrize(("autocommit", "status", "alone"), [(True, 0, True), (True, 2, False), (False, 0, False)])
def test_a_postgres_connection_is_judged_by_autocommit_and_status(
    driver: str, autocommit: bool, status: int, alone: bool
) -> None:
    connection = of_module(driver, autocommit=autocommit, info=SimpleNamespace(transaction_status=status))
    assert commits_each_statement(connection) is alone


@pytest.mark.parametrize(("state", "alone"), [({"in_transaction": True}, False), ({"server_status": 2}, True)])
def test_a_mysql_connection_is_judged_by_what_its_driver_reports(state: dict[str, Any], alone: bool) -> None:
    assert commits_each_statement(of_module("mysql", autocommit=True, **state)) is alone
    assert not commits_each_statement(of_module("mysql", autocommit=False, **state))


@pytest.mark.parametrize(
    ("atomic", "autocommit", "alone"), [(False, True, True), (True, True, False), (False, False, False)]
)
def test_a_django_connection_is_judged_by_its_atomic_block(atomic: bool, autocommit: bool, alone: bool) -> None:
    connection = of_module("django", in_atomic_block=atomic, get_autocommit=lambda: autocommit)
    assert commits_each_statement(connection) is alone


def test_a_sqlalchemy_connection_is_judged_by_its_drivers_connection() -> None:
    engine = sqlalchemy.create_engine("sqlite://")
    with engine.connect() as connection:
        assert not commits_each_statement(connection)
        inner = connection.connection.driver_connection
        assert isinstance(inner, sqlite3.Connection)
        inner.isolation_level = None
        assert commits_each_statement(connection)


def test_a_driver_that_only_sqlalchemy_knows_is_judged_by_its_dialect() -> None:
    def connection(detect: Any) -> Any:
        raw = SimpleNamespace(driver_connection=of_module("asyncpg"), dbapi_connection=object())
        dialect = SimpleNamespace(detect_autocommit_setting=detect)
        return of_module("sqlalchemy", exec_driver_sql=print, connection=raw, dialect=dialect)

    def unknown(_: object) -> bool:
        raise NotImplementedError

    assert commits_each_statement(connection(lambda _: True))
    assert not commits_each_statement(connection(lambda _: False))
    assert not commits_each_statement(connection(unknown))


def test_an_object_of_an_unknown_driver_is_not_judged() -> None:
    assert driver_of(object()) is None
    assert not commits_each_statement(object())
