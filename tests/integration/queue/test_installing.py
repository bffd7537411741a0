"""The first process creates the tables; a user without the right to create any can still use them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

import tidebook
from tidebook.queue.port import QueueSettings
from tidebook.queue.postgres.store import PostgresQueues

pytestmark = pytest.mark.postgres


async def test_processes_that_open_concurrently_find_the_same_queues(postgres_url: str, schema: str) -> None:
    stores = await asyncio.gather(*(PostgresQueues.open(postgres_url, schema=schema) for _ in range(6)))
    settings = QueueSettings(own_table=True)
    refs = await asyncio.gather(*(store.queue("mail") for store in stores))
    owns = await asyncio.gather(*(store.queue("own", settings) for store in stores))
    assert len({ref.id for ref in refs}) == len({own.table for own in owns}) == 1
    for store in stores:
        await store.close()


@pytest.fixture
def limited_user(postgres_url: str, schema: str) -> Iterator[str]:
    """Return the URL of a user that may read and write tables but not create any."""
    name = f"clerk_{schema}"
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {name} LOGIN")
        yield postgres_url.replace("//tidebook@", f"//{name}@")
        connection.execute(f"DROP OWNED BY {name}")
        connection.execute(f"DROP ROLE {name}")


async def test_a_user_who_may_not_create_tables_can_put_claim_and_finish(
    settings_file: Path, postgres_url: str, schema: str, limited_user: str
) -> None:
    async with tidebook.open(settings_file) as book:
        await book.queue("mail").open()
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        name = f"clerk_{schema}"
        connection.execute(f"GRANT USAGE ON SCHEMA {schema} TO {name}")
        connection.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO {name}")
        connection.execute(f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA {schema} TO {name}")
    settings_file.write_text(settings_file.read_text().replace(postgres_url, limited_user))
    async with tidebook.open(settings_file) as book:
        queue = book.queue("mail")
        await queue.put("x", key="k")
        (job,) = await queue.claim()
        await queue.fail(job)
        (job,) = await queue.claim()
        await queue.done(job)
        assert (await queue.status()).waiting == 0


async def test_a_user_without_rights_gets_an_error(
    settings_file: Path, postgres_url: str, schema: str, limited_user: str
) -> None:
    settings_file.write_text(settings_file.read_text().replace(postgres_url, limited_user))
    async with tidebook.open(settings_file) as book:
        with pytest.raises(tidebook.InvalidInput, match="rights"):
            await book.queue("mail").put("x")
