"""Publishers of the outbox, putters of the queue, relays and workers."""

from __future__ import annotations

import asyncio
import itertools
from datetime import datetime
from typing import Any

from sqlalchemy import create_engine

from faults.plan import MAIL, QUEUE
from faults.roles.context import WITHOUT_EFFECT, Context
from tidebook.core.errors import LeaseLost, TidebookError
from tidebook.queue.job import Job
from tidebook.queue.port import QueueSettings
from tidebook.queue.queue import Queue

KEYS = 4


def _queue(context: Context, book: Any) -> Queue:
    lease_ms = int(context.plan.lease_s * 1000)
    found: Queue = book.queue(QUEUE, settings=QueueSettings(lease_ms=lease_ms, max_timeouts=255))
    return found


class RolledBack(TidebookError):
    """The application has decided not to commit."""


async def produce(context: Context) -> None:
    """Publish in transactions and put entries, until stopped."""
    async with context.open_book() as book, asyncio.TaskGroup() as group:
        group.create_task(_publish(context, book))
        group.create_task(_put(context, _queue(context, book)))


async def _publish(context: Context, book: Any) -> None:
    engine = create_engine(book.outbox.url)
    while not context.stopping.is_set():
        key = f"m{context.chance.randrange(KEYS)}"
        messages = [[MAIL, key, context.value()] for _ in range(context.chance.choice((1, 1, 2)))]
        commits = context.chance.random() < 0.85

        def transact(messages: list[list[str]] = messages, commits: bool = commits) -> None:
            with engine.connect() as connection:
                for topic, key, value in messages:
                    book.outbox.publish(connection, topic=topic, key=key.encode(), payload=value.encode())
                if not commits:
                    connection.rollback()
                    raise RolledBack
                connection.commit()

        await context.record(
            "transaction",
            lambda transact=transact: asyncio.to_thread(transact),  # type: ignore[misc]
            failures=(RolledBack,),
            messages=messages,
        )
        await context.rest(0.1)
    engine.dispose()


async def _put(context: Context, queue: Queue) -> None:
    while not context.stopping.is_set():
        value = context.value()
        key = None if context.chance.random() < 0.4 else f"q{context.chance.randrange(KEYS)}"
        await context.record(
            "put",
            lambda value=value, key=key: queue.put(value, key=key),  # type: ignore[misc]
            lambda put: {"inserted": put.inserted, "merged": put.merged},
            value=value,
            key=key,
        )
        await context.rest(0.1)


async def relay(context: Context) -> None:
    """Relay the outbox until stopped."""
    async with context.open_book() as book, book.outbox.relaying():
        await context.stopping.wait()


async def work(context: Context) -> None:
    """Claim entries and finish most of them, some too late, until stopped."""
    async with context.open_book() as book:
        queue = _queue(context, book)
        holds = itertools.count(1)
        async with asyncio.TaskGroup() as group:
            while not context.stopping.is_set():
                for job, hold in await _claim(context, queue, holds):
                    group.create_task(_handle(context, queue, job, hold))
                await context.pause()


def _ms(date: datetime) -> int:
    return round(date.timestamp() * 1000)


async def _claim(context: Context, queue: Queue, holds: Any) -> list[tuple[Job, str]]:
    taken: list[tuple[Job, str]] = []

    def claimed(jobs: list[Job]) -> list[dict[str, Any]]:
        taken.extend((job, f"{context.name}/{next(holds)}") for job in jobs)
        return [
            {
                "hold": hold, "id": job.id, "key": job.key, "value": job.data,
                "started_ms": _ms(job.started_at), "lease_until_ms": _ms(job.lease_until),
            }
            for job, hold in taken
        ]  # fmt: skip

    await context.record(
        "claim", lambda: queue.claim(context.chance.choice((1, 3)), lease=context.plan.lease_s), claimed
    )
    return taken


async def _handle(context: Context, queue: Queue, job: Job, hold: str) -> None:
    fate = context.chance.random()
    if fate < 0.1:
        await asyncio.sleep(context.plan.lease_s * 0.6)
        await context.record(
            "heartbeat",
            lambda: queue.heartbeat(job, lease=context.plan.lease_s),
            lambda found: {"lease_until_ms": _ms(job.lease_until)},
            failures=(*WITHOUT_EFFECT, LeaseLost),
            hold=hold,
        )
        await asyncio.sleep(context.plan.lease_s * 0.6)
    elif fate < 0.15:
        await asyncio.sleep(context.plan.lease_s * 1.3)
    else:
        await asyncio.sleep(context.chance.random() * 0.02)
    failures = (*WITHOUT_EFFECT, LeaseLost)
    if context.chance.random() < 0.1:
        await context.record("give_back", lambda: queue.fail(job), failures=failures, hold=hold)
    else:
        await context.record("finish", lambda: queue.done(job), failures=failures, hold=hold)
