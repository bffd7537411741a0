"""Steady state: how long an append takes to reach the store while the job runs, and whether readers notice."""

from __future__ import annotations

import asyncio
import time

from bench.timing import percentile
from tidebook.core.event import Event
from tidebook.core.key import partition_of
from tidebook.wiring.book import Book

PAYLOAD = b"x" * 200
POLL_S = 0.05
TICK_S = 0.05
READ_EVERY_S = 0.1
SETTLE_S = 30


async def steady(book: Book, topic: str, *, per_s: int, seconds: float, warm_up_s: float) -> dict[str, float]:
    """Append at a rate; returns percentiles of the time until the pointer has passed, and of reads meanwhile.

    What is appended and read in the first `warm_up_s` is not counted: the JVMs of Spark and Cassandra compile then.
    """
    config = await book.journal(topic).create()
    sent: list[dict[int, float]] = [{} for _ in range(config.partitions)]
    began = time.monotonic()
    delays: list[float] = []
    reads: list[float] = []
    over = asyncio.Event()
    watching = asyncio.create_task(_watch(book, topic, sent, delays, over, since=began + warm_up_s))
    reading = asyncio.create_task(_read(book, topic, reads, over, since=began + warm_up_s))
    number = 0
    while time.monotonic() - began < warm_up_s + seconds:
        due = int((time.monotonic() - began) * per_s)
        items = [(f"j-{n % 1000}", [Event(PAYLOAD)]) for n in range(number, due)]
        number = due
        at = time.monotonic()
        for (id, _), done in zip(items, await book.journal(topic).append_many(items, confirm=False), strict=True):
            if isinstance(done, Exception):
                raise done
            sent[partition_of(id, config.partitions)][done.offset] = at
        await asyncio.sleep(TICK_S)
    for _ in range(int(SETTLE_S / POLL_S)):
        if not any(sent):
            break
        await asyncio.sleep(POLL_S)
    over.set()
    await asyncio.gather(watching, reading)
    return {
        "steady_warm_up_s": warm_up_s,
        "steady_appends_per_s": number / (warm_up_s + seconds),
        "steady_p50_s": percentile(delays, 0.5),
        "steady_p99_s": percentile(delays, 0.99),
        "steady_read_p50_ms": percentile(reads, 0.5) * 1000,
        "steady_read_p99_ms": percentile(reads, 0.99) * 1000,
    }


async def _watch(
    book: Book, topic: str, sent: list[dict[int, float]], delays: list[float], over: asyncio.Event, *, since: float
) -> None:
    while not over.is_set():
        pointers = await book.store.pointers(topic)
        now = time.monotonic()
        for partition, pointer in pointers.items():
            waiting = sent[partition]
            for offset in [each for each in waiting if each <= pointer.position.offset]:
                at = waiting.pop(offset)
                if at >= since:
                    delays.append(now - at)
        await asyncio.sleep(POLL_S)


async def _read(book: Book, topic: str, reads: list[float], over: asyncio.Event, *, since: float) -> None:
    n = 0
    while not over.is_set():
        began = time.monotonic()
        async for _ in book.journal(topic).read(f"j-{n % 1000}", barrier="offset"):
            pass
        if began >= since:
            reads.append(time.monotonic() - began)
        n += 7
        await asyncio.sleep(READ_EVERY_S)
