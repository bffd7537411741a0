"""Publishing into a database without the outbox's tables raises NotFound, with the remedy."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

from tests.integration.outbox.conftest import EVERY_DATABASE
from tests.integration.outbox.databases import Database
from tidebook import outbox
from tidebook.cli.outbox import open_outbox
from tidebook.core.errors import NotFound, Unavailable


@pytest.mark.parametrize("empty_database", EVERY_DATABASE, indirect=True)
def test_missing_tables_are_reported_through_a_driver(empty_database: Database) -> None:
    with empty_database.connect() as connection:
        for ordered in (False, True):
            with pytest.raises(NotFound, match="tidebook outbox migrate"):
                outbox.publish(connection, topic="orders", payload=b"x", key=b"k", ordered=ordered)
            connection.rollback()


@pytest.mark.parametrize("empty_database", EVERY_DATABASE, indirect=True)
def test_missing_tables_are_reported_without_the_statement(empty_database: Database, tmp_path: Path) -> None:
    settings = tmp_path / "tidebook.toml"
    settings.write_text(f'[sql]\nurl = "{empty_database.url}"\n[outbox]\ncreate_tables = false\n')
    with open_outbox(str(settings), reading=True) as opened, pytest.raises(Unavailable) as caught:
        opened.status()
    assert "kafka_topic_info" in str(caught.value)
    assert str(caught.value).endswith("run 'tidebook outbox migrate'")
    assert "SELECT" not in str(caught.value)


def test_missing_tables_are_reported_through_sqlalchemy(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'app.db'}")
    with Session(engine) as session, pytest.raises(NotFound, match="create_tables"):
        outbox.publish(session, topic="orders", payload=b"x")
    engine.dispose()


async def test_missing_tables_are_reported_through_async_sessions(tmp_path: Path) -> None:
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'app.db'}")
    async with engine.begin() as connection:
        with pytest.raises(NotFound):
            await outbox.publish(connection, topic="orders", payload=b"x")
    await engine.dispose()


def test_the_error_of_another_missing_table_is_unchanged(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "app.db")) as connection:
        outbox.create_tables(connection)
        connection.execute("CREATE TRIGGER t BEFORE INSERT ON kafka_messages BEGIN INSERT INTO audit VALUES (1); END")
        connection.commit()
        connection.execute("BEGIN")
        with pytest.raises(sqlite3.OperationalError):
            outbox.publish(connection, topic="orders", payload=b"x")
