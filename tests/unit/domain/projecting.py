"""Helpers for tests of projections: engines, a table of balances, and replication on request."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

from sqlalchemy import Column, Engine, Integer, MetaData, String, Table, create_engine, insert, select, update
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from tests.unit.domain.bank import Deposited, Opened
from tidebook.core.errors import Fenced
from tidebook.replication.ticks import tick
from tidebook.testing.replicating import replicate
from tidebook.wiring.book import Book

METADATA = MetaData()
BALANCES = Table("balances", METADATA, Column("id", String(100), primary_key=True), Column("amount", Integer))


def sqlite_engine(folder: Path) -> Engine:
    file = folder / "read.db"
    with closing(
        sqlite3.connect(file, timeout=20)
    ) as connection:  # only once, because a file in use cannot change its mode
        connection.execute("PRAGMA journal_mode=WAL")
    return create_engine(f"sqlite:///{file}", connect_args={"timeout": 20})


def async_sqlite_engine(folder: Path) -> AsyncEngine:
    return create_async_engine(f"sqlite+aiosqlite:///{folder / 'read.db'}")


async def replicate_and_tick(book: Book, *topics: str) -> None:
    """Replicate everything, then replicate ticks that advance the horizon past it."""
    for _ in range(3):
        try:
            for topic in topics:
                await replicate(book.log, book.store, topic)
            await tick(book.log, book.store, topics)
            for topic in topics:
                await replicate(book.log, book.store, topic)
            return
        except Fenced:
            continue


@asynccontextmanager
async def replicating(book: Book, *topics: str) -> AsyncIterator[None]:
    """Replicate in the background."""

    async def run() -> None:
        while True:
            await replicate_and_tick(book, *topics)
            await asyncio.sleep(0.005)

    task = asyncio.create_task(run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def running(*parts: Any) -> AsyncIterator[None]:
    """Run projections in the background; raise their errors at the end."""
    tasks = [asyncio.create_task(part.run()) for part in parts]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result


def signed(data: Any) -> int:
    if isinstance(data, Opened):
        return 0
    return int(data.amount) if isinstance(data, Deposited) else -int(data.amount)


def add(tx: Any, event: Any) -> None:
    """Apply an event with a sync transaction: read, then write, so that applying it twice is visible."""
    table = tx.table(BALANCES)
    done = tx.execute(update(table).where(table.c.id == event.id).values(amount=table.c.amount + signed(event.data)))
    if not done.rowcount:
        tx.execute(insert(table).values(id=event.id, amount=signed(event.data)))


async def add_async(tx: Any, event: Any) -> None:
    """Apply an event with an async transaction."""
    table = tx.table(BALANCES)
    done = await tx.execute(
        update(table).where(table.c.id == event.id).values(amount=table.c.amount + signed(event.data))
    )
    if not done.rowcount:
        await tx.execute(insert(table).values(id=event.id, amount=signed(event.data)))


def balances(engine: Engine) -> dict[str, int]:
    with engine.connect() as connection:
        return {row.id: row.amount for row in connection.execute(select(BALANCES))}
