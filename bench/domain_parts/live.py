"""Measure the time from the call of `append` to the row of a projection of the whole topic.

An embedded book is replicated by this process, and the projection is in SQLite. On Kafka and Cassandra the pipeline's
job replicates, and the projection is in PostgreSQL.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from sqlalchemy import Column, Integer, MetaData, String, Table, create_engine

import tidebook
from bench.domain_parts.accounts import Account, Deposit
from bench.servers import database, running
from bench.tag_live import job
from bench.timing import percentile, timed
from tidebook.wiring.book import Book

EVENTS, WARM_UP, EVERY_S = 200, 20, 0.02
#: The warm-up on servers, until the JVM has compiled the code of the job.
SERVER_EVENTS, WARM_UP_S, START_S = 60, 25.0, 120.0
TARGETS = {"live_embedded_p50_ms": 30.0}
SERVER_TARGETS = {"live_servers_p50_ms": 300.0}


def measure(quick: bool) -> tuple[dict[str, float], dict[str, Any]]:
    """Return percentiles of the milliseconds with an embedded book."""
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(_embedded(Path(folder), EVENTS // 4 if quick else EVENTS))
    return {"live_embedded_p50_ms": percentile(found, 0.5)}, {"live_embedded_p95_ms": percentile(found, 0.95)}


async def _embedded(folder: Path, events: int) -> list[float]:
    async with tidebook.open(folder / "book", replicate=True) as book:
        return await _live(book, f"sqlite:///{folder / 'read.db'}", "accounts", events, EVERY_S, warm_up_s=0.0)


def measure_servers(quick: bool) -> tuple[dict[str, float], dict[str, Any]]:
    """Return percentiles of the milliseconds on Kafka, Cassandra and PostgreSQL."""
    servers = running()
    topic = f"live-{uuid.uuid4().hex[:8]}"
    with tempfile.TemporaryDirectory() as folder, database(servers["postgres"]["url"], "live") as url:
        where = Path(folder) / "tidebook.toml"
        where.write_text(
            f'folder = "book"\n[log]\nurl = "kafka://{servers["kafka"]["address"]}"\n'
            f'[store]\nurl = "cassandra://{servers["cassandra"]["address"]}/bench_domain"\n'
        )
        into = url.replace("postgresql://", "postgresql+psycopg://", 1)
        found = asyncio.run(_on_servers(where, into, topic, SERVER_EVENTS // 4 if quick else SERVER_EVENTS))
    return {"live_servers_p50_ms": percentile(found, 0.5)}, {"live_servers_p95_ms": percentile(found, 0.95)}


async def _on_servers(where: Path, into: str, topic: str, events: int) -> list[float]:
    async with tidebook.open(where) as book:
        await book.journal(topic).create()
        async with job(where, topic):
            return await _live(book, into, topic, events, 0.3, warm_up_s=WARM_UP_S)


async def _live(book: Book, into: str, topic: str, events: int, every_s: float, *, warm_up_s: float) -> list[float]:
    """Append events one after another; return the milliseconds of each that follows the warm-up."""
    rows = Table("live_rows", MetaData(), Column("id", String(100), primary_key=True), Column("balance", Integer))
    engine = create_engine(into)
    accounts = book.decider(topic, Account)
    projection = book.projection(topic, topics=[topic], into=engine, tables=[rows])

    @projection
    def apply(tx: Any, event: Any) -> None:
        if not tx.execute(rows.update().where(rows.c.id == event.id).values(balance=event.seq_nr)).rowcount:
            tx.execute(rows.insert().values(id=event.id, balance=event.seq_nr))

    found: list[float] = []
    async with book.running(projection):
        warm_s, number = time.perf_counter() + warm_up_s, 0
        with timed(f"{events} events, each visible before the next"):
            while len(found) < events:
                began_s = time.perf_counter()
                done = await accounts.execute(f"a-{number % 50}", Deposit(1))
                await projection.wait_for(done, timeout_s=START_S)
                number += 1
                if number > WARM_UP and began_s > warm_s:
                    found.append((time.perf_counter() - began_s) * 1000)
                await asyncio.sleep(every_s)
    engine.dispose()
    return found
