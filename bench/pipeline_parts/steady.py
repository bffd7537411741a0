"""Steady state: how long an append takes to reach the store and a tag follower, and the effect on readers."""

from __future__ import annotations

import asyncio
import time

from bench.timing import percentile
from tidebook.core.event import Event
from tidebook.core.key import partition_of
from tidebook.wiring.book import Book

PAYLOAD = b"x" * 200
POLL_S = 0.01
TICK_S = 0.05
READ_EVERY_S = 0.1
SETTLE_S = 30
#: The interval, in appends, at which one is tagged and followed.
TAGGED_EVERY = 20


class Measured:
    """The measurements so far."""

    def __init__(self) -> None:
        self.stored: list[float] = []
        self.delivered: list[float] = []
        self.reads: list[float] = []
        self.over = asyncio.Event()


async def steady(book: Book, topic: str, *, per_s: int, seconds: float, warm_up_s: float) -> dict[str, float]:
    """Append at a rate; return percentiles of the time until the pointer has passed an append, and of concurrent reads.

    The first `warm_up_s` are not counted, because the JVMs of Spark and Cassandra still compile.
    """
    config = await book.journal(topic).create()
    sent: list[dict[int, float]] = [{} for _ in range(config.partitions)]
    began = time.monotonic()
    found, since = Measured(), began + warm_up_s
    watching = asyncio.create_task(_watch(book, topic, sent, found, since=since))
    reading = asyncio.create_task(_read(book, topic, found, since=since))
    following = asyncio.create_task(_follow(book, topic, found, since=since))
    number = 0
    while time.monotonic() - began < warm_up_s + seconds:
        due = int((time.monotonic() - began) * per_s)
        at = time.monotonic()
        items = [(f"j-{n % 1000}", [_event(n, topic, at)]) for n in range(number, due)]
        number = due
        for (id, _), done in zip(items, await book.journal(topic).append_many(items, confirm=False), strict=True):
            if isinstance(done, Exception):
                raise done
            sent[partition_of(id, config.partitions)][done.offset] = at
        await asyncio.sleep(TICK_S)
    for _ in range(int(SETTLE_S / POLL_S)):
        if not any(sent):
            break
        await asyncio.sleep(POLL_S)
    found.over.set()
    following.cancel()
    await asyncio.gather(watching, reading, following, return_exceptions=True)
    return {
        "steady_warm_up_s": warm_up_s,
        "steady_appends_per_s": number / (warm_up_s + seconds),
        "steady_p50_s": percentile(found.stored, 0.5),
        "steady_p99_s": percentile(found.stored, 0.99),
        "steady_max_s": max(found.stored),
        "steady_follower_p50_s": percentile(found.delivered, 0.5),
        "steady_follower_p99_s": percentile(found.delivered, 0.99),
        "steady_read_p50_ms": percentile(found.reads, 0.5) * 1000,
        "steady_read_p99_ms": percentile(found.reads, 0.99) * 1000,
    }


def _event(number: int, tag: str, at: float) -> Event:
    if number % TAGGED_EVERY:
        return Event(PAYLOAD)
    return Event(at, tags={tag})


async def _watch(book: Book, topic: str, sent: list[dict[int, float]], found: Measured, *, since: float) -> None:
    while not found.over.is_set():
        pointers = await book.store.pointers(topic)
        now = time.monotonic()
        for partition, pointer in pointers.items():
            waiting = sent[partition]
            for offset in [each for each in waiting if each <= pointer.position.offset]:
                at = waiting.pop(offset)
                if at >= since:
                    found.stored.append(now - at)
        await asyncio.sleep(POLL_S)


async def _follow(book: Book, topic: str, found: Measured, *, since: float) -> None:
    async for event in book.tags.read(topic, follow=True, topics=[topic]):
        at = event.payload
        assert isinstance(at, float)
        if at >= since:
            found.delivered.append(time.monotonic() - at)


async def _read(book: Book, topic: str, found: Measured, *, since: float) -> None:
    n = 0
    while not found.over.is_set():
        began = time.monotonic()
        async for _ in book.journal(topic).read(f"j-{n % 1000}", barrier="offset"):
            pass
        if began >= since:
            found.reads.append(time.monotonic() - began)
        n += 7
        await asyncio.sleep(READ_EVERY_S)
