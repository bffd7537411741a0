"""Projections of whole topics on a real Kafka and Cassandra, after the log has lost events not applied yet."""

from __future__ import annotations

import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Column, Engine, MetaData, String, Table, select

from tests.unit.domain.bank import EVENTS, Account, Deposit
from tests.unit.domain.projecting import (
    BALANCES,
    add,
    balances,
    replicate_and_tick,
    replicating,
    running,
    sqlite_engine,
)
from tidebook.domain import projection_runner
from tidebook.domain.event_source import decode_position
from tidebook.domain.topic_scan import in_scan
from tidebook.wiring.book import Book
from tidebook.wiring.settings import Section, Settings

pytestmark = [pytest.mark.kafka, pytest.mark.cassandra]

SEEN = Table("seen", MetaData(), Column("event", String(200), primary_key=True))


def add_once(tx: Any, event: Any) -> None:
    """Apply an event; a second application violates the key, and stops the slice."""
    tx.execute(tx.table(SEEN).insert().values(event=f"{event.id}/{event.seq_nr}"))
    add(tx, event)


def seen(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.execute(select(SEEN.c.event)).scalars())


@pytest.fixture
def open_book(tmp_path: Path, kafka_bootstrap: str, cassandra_address: str) -> Any:
    sections = {
        "log": Section(f"kafka://{kafka_bootstrap}"),
        "store": Section(f"cassandra://{cassandra_address}/domain_tests"),
    }
    return lambda: Book(Settings(tmp_path, sections))


async def test_after_retention_projections_scan_the_store_and_then_follow_the_log(
    open_book: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(projection_runner, "REBALANCE_S", 0.2)
    topic, old, new = f"accounts-{uuid.uuid4().hex[:8]}", tmp_path / "old", tmp_path / "new"
    old.mkdir()
    new.mkdir()
    engine, other = sqlite_engine(old), sqlite_engine(new)
    expected: Counter[str] = Counter()
    async with open_book() as book:
        accounts = book.decider(topic, Account, events=EVENTS)

        async def deposit(count: int) -> Any:
            done = None
            for n in range(count):
                expected[f"a-{n % 12}"] += n
                done = await accounts.execute(f"a-{n % 12}", Deposit(n))
            return done

        def projection(into: Engine) -> Any:
            return book.projection("p", topics=[topic], into=into, tables=[BALANCES, SEEN], slices=4)(add_once)

        await deposit(40)
        await replicate_and_tick(book, topic)
        first = projection(engine)
        async with running(first):
            await first.settle()
        assert balances(engine) == expected
        await deposit(60)
        await replicate_and_tick(book, topic)
        for partition, pointer in (await book.store.pointers(topic)).items():  # as retention does
            await book.log.truncate(topic, partition, before=pointer.position.offset + 1)
        await deposit(20)
        late, fresh, beside = projection(engine), projection(other), projection(other)
        async with replicating(book, topic), running(late, fresh, beside):
            done = await deposit(20)
            await late.wait_for(done)
            await fresh.wait_for(done)
            await replicate_and_tick(book, topic)
            for each in (late, fresh):
                await each.settle()
        for each in (engine, other):
            assert balances(each) == expected
            assert len(seen(each)) == 140
        slices = await late._engine.run(lambda connection: late._rows.slices(connection, 1))
        assert not any(in_scan(decode_position(each.position).at) for each in slices)
        # From here on the projection follows the log.
        async with replicating(book, topic), running(late):
            await late.wait_for(await deposit(5))
            await replicate_and_tick(book, topic)
            await late.settle()
        assert balances(engine) == expected
    engine.dispose()
    other.dispose()
