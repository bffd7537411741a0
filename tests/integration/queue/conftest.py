"""Fixtures: a PostgreSQL schema for each test, and books on either backend."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psycopg
import pytest
import pytest_asyncio

import tidebook
from tests.integration.queue.backends import where as where
from tidebook.queue.postgres.store import PostgresQueues
from tidebook.testing.conformance.queue_base import QueueTester, new_queue


@pytest.fixture
def schema(postgres_url: str) -> Iterator[str]:
    """Return the name of a schema, which is dropped after the test."""
    name = f"queue_{uuid.uuid4().hex[:12]}"
    yield name
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(f"DROP SCHEMA IF EXISTS {name} CASCADE")


@pytest_asyncio.fixture
async def store(postgres_url: str, schema: str) -> AsyncIterator[PostgresQueues]:
    store = await PostgresQueues.open(postgres_url, schema=schema)
    yield store
    await store.close()


@pytest_asyncio.fixture
async def tester(store: PostgresQueues) -> QueueTester:
    return QueueTester(store, await new_queue(store))


@pytest.fixture
def settings_file(tmp_path: Path, postgres_url: str, schema: str) -> Path:
    """Write the settings of a book whose queues are on PostgreSQL."""
    file = tmp_path / "tidebook.toml"
    file.write_text(f'folder = "data"\n[sql]\nurl = "{postgres_url}"\n[queue]\nschema = "{schema}"\n')
    return file


@pytest_asyncio.fixture
async def book(where: Path) -> AsyncIterator[tidebook.Book]:
    async with tidebook.open(where) as book:
        yield book
