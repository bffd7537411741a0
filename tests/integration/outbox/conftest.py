"""Fixtures: databases with the outbox's tables, clusters and books."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine

import tidebook
from tests.integration.outbox.databases import Database, mysql_database, postgres_database, sqlite_database
from tests.integration.outbox.owner import SHORT, Owner
from tests.integration.outbox.relaying import Cluster
from tidebook import outbox
from tidebook.outbox.settings import OutboxSettings
from tidebook.wiring.sync import SyncBook

EVERY_DATABASE = [
    pytest.param("postgresql", marks=pytest.mark.postgres),
    pytest.param("mysql", marks=pytest.mark.mariadb),
    pytest.param("sqlite"),
]


@pytest.fixture
def empty_database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """Return a database without tables; parametrized indirectly by its kind."""
    match request.param:
        case "postgresql":
            opened = postgres_database(request.getfixturevalue("postgres_url"))
        case "mysql":
            opened = mysql_database(request.getfixturevalue("mariadb_url"))
        case _:
            opened = sqlite_database(tmp_path)
    with opened as database:
        yield database


@pytest.fixture
def database(empty_database: Database) -> Database:
    """Return a database with the outbox's tables."""
    with empty_database.connect() as connection:
        outbox.create_tables(connection)
        connection.commit()
    return empty_database


@pytest.fixture
def postgres(postgres_url: str) -> Iterator[Database]:
    """Return a PostgreSQL database with the outbox's tables."""
    with postgres_database(postgres_url) as database:
        with database.connect() as connection:
            outbox.create_tables(connection)
            connection.commit()
        yield database


@pytest.fixture(scope="session")
def cluster(kafka_bootstrap: str) -> Cluster:
    """Return the real Kafka."""
    return Cluster(kafka_bootstrap)


@pytest.fixture
def owners(postgres: Database, cluster: Cluster) -> Iterator[Any]:
    made: list[Owner] = []

    def make(topic: str, settings: OutboxSettings = SHORT) -> Owner:
        made.append(Owner(postgres, cluster, topic, settings))
        return made[-1]

    yield make
    for owner in made:
        owner.store.close()


@pytest.fixture
def book(tmp_path: Path) -> Iterator[SyncBook]:
    """Open an embedded book."""
    with tidebook.open_sync(tmp_path / "book") as opened:
        yield opened


@pytest.fixture
def engine(book: SyncBook) -> Iterator[Engine]:
    """Return an engine for the database of the book's outbox."""
    made = create_engine(book.outbox.url)
    yield made
    made.dispose()
