"""Consumers of journals: followers of tags, members of a group, a projection, and a process manager."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing
from typing import Any, Literal

import msgspec
import psycopg
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.event import listen
from sqlalchemy.exc import DBAPIError

from faults.plan import GROUP, GROUP_TAG, TAGS, TOPIC
from faults.roles import deciders
from faults.roles.context import Context
from tidebook.core.errors import Fenced, TidebookError
from tidebook.domain.projection import Projection
from tidebook.tags.event import TaggedEvent
from tidebook.tags.sql_offsets import TABLE, SqlOffsets
from tidebook.testing.histories.line import read_lines

EFFECTS = """CREATE TABLE IF NOT EXISTS effects (
    id {}, consumer TEXT NOT NULL, key TEXT NOT NULL, value TEXT NOT NULL)"""
PROJECTION = "rows"
#: The probability that a member of the group delays the handling of an event, and the longest delay.
SLOW, SLOW_S = 0.2, 0.3
#: The interval and the duration of stalls, in leases. They are like those of a long garbage collection: a member stalls
#: before its transaction, and a projection when it takes a connection. Fences must prevent late effects of both.
STALL_EVERY_LEASES, STALL_LEASES = (6.0, 12.0), 1.5
#: The share of events that are committed to the store too, by compare-and-set; the offsets in the database decide.
SERVER_COMMITS = 0.01


def connect(context: Context) -> Any:
    """Open the database of the application: PostgreSQL if the book uses servers, else a file."""
    if context.plan.sql_url is not None:
        return psycopg.connect(context.plan.sql_url, connect_timeout=5)
    return sqlite3.connect(context.plan.effects, timeout=30, check_same_thread=False)


def create_effects(context: Context) -> None:
    """Create the tables of the application; call it once, because the journal mode of a file in use cannot change."""
    with closing(connect(context)) as connection:
        serial = "INTEGER PRIMARY KEY AUTOINCREMENT"
        if context.plan.sql_url is None:
            connection.execute("PRAGMA journal_mode=WAL")
        else:
            serial = "BIGSERIAL PRIMARY KEY"
        connection.execute(EFFECTS.format(serial))
        connection.execute(TABLE)
        connection.commit()


async def consume(context: Context) -> None:
    """Follow each tag, be a member of the group, and run the projection, until stopped."""
    async with context.open_book() as book:
        parts: dict[str, Callable[[], Awaitable[None]]] = {
            f"follow {tag}": lambda tag=tag: follow(context, book, tag)  # type: ignore[misc]
            for tag in TAGS
        }
        parts |= {
            "join": lambda: join(context, book),
            "project": lambda: project(context, book),
            "cause": lambda: cause(context, book),
        }
        await _until_stopped(context, parts)


async def _until_stopped(context: Context, parts: Mapping[str, Callable[[], Awaitable[None]]]) -> None:
    """Run the parts until the role stops, and restart each after an error."""

    async def run(name: str, part: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await part()
            except (TidebookError, sqlite3.OperationalError, psycopg.OperationalError, DBAPIError) as error:
                seconds = (time.monotonic_ns() - context.plan.began_ns) / 1e9
                # Printed to the log of the process, because a part that fails repeatedly would look like one that
                # waits.
                print(f"{seconds:.1f} s: {name}: {type(error).__name__}: {error}", flush=True)
                context.report_restart(name, error)
                await context.pause(0.5)

    tasks = [asyncio.create_task(run(name, part)) for name, part in parts.items()]
    stopping = asyncio.create_task(context.stopping.wait())
    ended, _ = await asyncio.wait([stopping, *tasks], return_when=asyncio.FIRST_COMPLETED)
    for task in ended:
        task.result()  # a part ends only with an error that no application expects, which ends the process
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


def _stream(context: Context) -> str:
    """Return the name of the stream, which later processes continue: `consumer-1` of process `consumer-1.3`."""
    return context.name.split(".")[0]


def last_offset(context: Context, tag: str) -> str | None:
    """Return the offset of the last event that this stream has recorded, in this process or an earlier one."""
    files = sorted(context.plan.histories.glob(f"{_stream(context)}.*.ndjson"), key=lambda file: file.stat().st_mtime)
    delivered = [line for line in read_lines(files) if line.op == "deliver" and line.args["tag"] == tag]
    return max(delivered, key=lambda line: line.ns).result["offset"] if delivered else None


async def follow(context: Context, book: Any, tag: str) -> None:
    """Record every event of a tag, from the stream's last offset on."""
    async for event in book.tags.read(tag, after=last_offset(context, tag), follow=True):
        place = event.place
        context.history.observe(
            "deliver",
            {
                "key": f"{event.topic}/{event.id}",
                "seq_nr": event.seq_nr,
                "value": event.payload,
                "position": [place.time_ms, place.topic, place.partition, place.offset, place.index],
                "offset": event.tag_offset,
            },
            stream=_stream(context),
            tag=tag,
        )


class Stalls:
    """Stops the calling thread occasionally, for longer than a lease."""

    def __init__(self, context: Context) -> None:
        self._plan = context.plan
        self._chance = context.chance
        self._lease_s = context.plan.lease_s
        self._due_s = self._next_s()

    def _next_s(self) -> float:
        return time.monotonic() + self._chance.uniform(*STALL_EVERY_LEASES) * self._lease_s

    def stall_if_due(self) -> None:
        """Sleep if a stall is due."""
        if time.monotonic() >= self._due_s and not self._plan.is_quiet:
            time.sleep(STALL_LEASES * self._lease_s)
            self._due_s = self._next_s()


async def join(context: Context, book: Any) -> None:
    """Handle the group's events, each in one transaction with its offset."""
    style: Literal["qmark", "format"] = "qmark" if context.plan.sql_url is None else "format"
    offsets = SqlOffsets(GROUP_TAG, GROUP, lambda: connect(context), paramstyle=style)
    stalls = Stalls(context)
    async with book.tags.subscribe(GROUP_TAG, GROUP, offsets=offsets, lease_s=context.plan.lease_s) as events:
        with closing(connect(context)) as connection:
            async for event in events:
                # Its lease may end before the event is handled.
                if context.chance.random() < SLOW and not context.plan.is_quiet:
                    await context.pause(SLOW_S)
                stalls.stall_if_due()  # blocks the event loop, so that nothing renews the lease
                handled = await asyncio.to_thread(_handle, context, connection, offsets, event)
                if handled and (context.plan.sql_url is None or context.chance.random() < SERVER_COMMITS):
                    await events.commit(event)


def _handle(context: Context, connection: Any, offsets: SqlOffsets, event: TaggedEvent) -> bool:
    try:
        if offsets.advance(connection, event):
            values = (GROUP, f"{event.topic}/{event.id}", event.payload)
            marks = "?, ?, ?" if context.plan.sql_url is None else "%s, %s, %s"
            connection.execute(f"INSERT INTO effects (consumer, key, value) VALUES ({marks})", values)
        connection.commit()
    except (Fenced, sqlite3.IntegrityError, psycopg.IntegrityError):
        connection.rollback()
        return False
    return True


def _engine(context: Context) -> Engine:
    if context.plan.sql_url is None:
        engine = create_engine(f"sqlite:///{context.plan.effects}", connect_args={"timeout": 30})
    else:
        url = context.plan.sql_url.replace("postgresql://", "postgresql+psycopg://")
        engine = create_engine(url, pool_pre_ping=True, connect_args={"connect_timeout": 5})
    stalls = Stalls(context)
    listen(engine, "checkout", lambda *connection: stalls.stall_if_due())
    return engine


def with_short_lease(context: Context, projection: Projection) -> Projection:
    """Set the lease of a projection to that of the run; with its fixed default, slices would rarely change owners."""
    projection._settings = msgspec.structs.replace(projection._settings, lease_s=context.plan.lease_s)
    return projection


async def cause(context: Context, book: Any) -> None:
    """Run the process manager, with its offsets in the application's database."""
    engine = _engine(context)
    try:
        await with_short_lease(context, deciders.mirror(book, engine)).run()
    finally:
        engine.dispose()


async def project(context: Context, book: Any) -> None:
    """Run a projection of the topic into the application's database."""
    engine = _engine(context)
    projection = book.projection(PROJECTION, topics=[TOPIC], into=engine)

    @projection  # type: ignore[untyped-decorator]
    def add(tx: Any, event: Any) -> None:
        row = {"consumer": PROJECTION, "key": f"{event.topic}/{event.id}", "value": event.data}
        tx.execute(text("INSERT INTO effects (consumer, key, value) VALUES (:consumer, :key, :value)"), row)

    try:
        await with_short_lease(context, projection).run()
    finally:
        engine.dispose()
