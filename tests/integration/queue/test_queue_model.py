"""Both stores behave like the model under any sequence of operations."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.integration.queue.model import QueueMachine
from tests.open_adapters import queue_schema
from tidebook.queue.port import QueueStore
from tidebook.queue.postgres.store import PostgresQueues
from tidebook.queue.sqlite.store import SqliteQueues
from tidebook.testing.clock import ManualClock
from tidebook.testing.conformance.queue_base import START_MS


class SqliteMachine(QueueMachine):
    async def open(self, stack: AsyncExitStack) -> tuple[QueueStore, int, Callable[[int], Any]]:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        clock = ManualClock(START_MS)
        store = SqliteQueues(folder, clock=clock)
        stack.push_async_callback(store.close)

        async def advance(by_ms: int) -> None:
            clock.advance(by_ms)

        return store, START_MS, advance


def settings_for(long_form: bool) -> settings:
    return settings(
        max_examples=400 if long_form else 30,
        stateful_step_count=60 if long_form else 30,
        deadline=None,
        phases=tuple(Phase) if long_form else (Phase.explicit, Phase.reuse, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )


@pytest.mark.timeout(600)
def test_sqlite_follows_the_rules(long_form: bool) -> None:
    run_state_machine_as_test(SqliteMachine, settings=settings_for(long_form))


@pytest.fixture
def schema(postgres_url: str) -> Iterator[str]:
    with queue_schema(postgres_url) as name:
        yield name


@pytest.mark.postgres
@pytest.mark.timeout(900)
@pytest.mark.parametrize("rotating", [False, True], ids=["one table", "rotating tables"])
def test_postgres_follows_the_rules(postgres_url: str, schema: str, long_form: bool, rotating: bool) -> None:
    class PostgresMachine(QueueMachine):
        sweeps_as_time_passes = rotating

        async def open(self, stack: AsyncExitStack) -> tuple[QueueStore, int, Callable[[int], Any]]:
            connection = await psycopg.AsyncConnection.connect(postgres_url, autocommit=True)
            stack.push_async_callback(connection.close)
            await connection.execute(f"UPDATE {schema}.clock SET now_ms = {START_MS}")
            now = f"(SELECT c.now_ms FROM {schema}.clock c)"
            store = await PostgresQueues.open(postgres_url, schema=f"{schema}_q", now=now, connections_max=2)
            stack.push_async_callback(store.close)

            async def advance(by_ms: int) -> None:
                await connection.execute(f"UPDATE {schema}.clock SET now_ms = now_ms + {by_ms}")
                if rotating:  # the next sweep finds that the period has ended, and rotates to another table
                    await connection.execute(f"UPDATE {schema}_q.period SET finished = 1000000")
                    await store.sweep(self.tester.ref)

            return store, START_MS, advance

    try:
        run_state_machine_as_test(PostgresMachine, settings=settings_for(long_form))
    finally:
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            connection.execute(f"DROP SCHEMA IF EXISTS {schema}_q CASCADE")
