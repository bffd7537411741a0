"""Measure the latency of a stream by tag whose events the pipeline's job replicates, in a separate process."""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import tidebook
from bench.timing import percentile, timed
from tidebook.core.event import Event
from tidebook.wiring.book import Book

PARTITIONS, EVENTS, EVERY_S = 8, 60, 0.3
#: The warm-up, until the JVM has compiled the code of a micro-batch.
WARM_UP_S = 25.0
START_S = 120.0
POLL_S = 0.002


def job_live(folder: Path, store: str | None) -> dict[str, float]:
    """Return the milliseconds from the replication of an event's record, and from its append, to its delivery."""
    folder.mkdir()
    where = folder / "tidebook.toml"
    stored = "" if store is None else f'[store]\nurl = "{store}"\n'
    where.write_text(f'folder = "book"\n[journal]\npartitions = {PARTITIONS}\n{stored}')
    return asyncio.run(_measure(where))


async def _measure(where: Path) -> dict[str, float]:
    topic = f"live-{uuid.uuid4().hex[:8]}"
    after_replicated: list[float] = []
    after_appended: list[float] = []
    async with tidebook.open(where) as book:
        await book.journal(topic).append("begin", [Event(0, tags={topic})])
        async with job(where, topic), followed(book, topic, [topic]) as arrived:
            async with asyncio.timeout(START_S):
                await arrived.get()
            warm = time.perf_counter() + WARM_UP_S
            with timed(f"{EVENTS} live events after the job, over {PARTITIONS} partitions"):
                while len(after_replicated) < EVENTS:
                    began = time.perf_counter()
                    done = await book.journal(topic).append(f"j-{uuid.uuid4().hex[:4]}", [Event(1, tags={topic})])
                    replicated = await _replicated(book, topic, done.partition, done.offset)
                    at = await arrived.get()
                    if began > warm:
                        after_replicated.append(max(0.0, at - replicated) * 1000)
                        after_appended.append((at - began) * 1000)
                    await asyncio.sleep(EVERY_S)
    return {
        "job_live_p50_ms": percentile(after_replicated, 0.5),
        "job_live_p99_ms": percentile(after_replicated, 0.99),
        "job_appended_to_delivered_p50_ms": percentile(after_appended, 0.5),
    }


async def _replicated(book: Book, topic: str, partition: int, offset: int) -> float:
    while True:
        pointer = await book.store.pointer(topic, partition)
        if pointer is not None and pointer.position.offset >= offset:
            return time.perf_counter()
        await asyncio.sleep(POLL_S)


@asynccontextmanager
async def job(where: Path, topic: str) -> AsyncIterator[None]:
    """Run `tidebook pipeline replicate` for one topic."""
    code = "from tidebook.cli.app import main; main()"
    command = [sys.executable, "-c", code, "pipeline", "replicate", "--engine", "spark"]
    command += ["--book", str(where), "--topic", topic]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        yield
    finally:
        process.terminate()
        await process.wait()


@asynccontextmanager
async def followed(book: Book, tag: str, topics: list[str]) -> AsyncIterator[asyncio.Queue[float]]:
    """Follow a tag; yield the queue of the times at which its events arrive."""
    arrived: asyncio.Queue[float] = asyncio.Queue()

    async def follow() -> None:
        async for _ in book.tags.read(tag, follow=True, topics=topics):
            arrived.put_nowait(time.perf_counter())

    task = asyncio.create_task(follow())
    try:
        yield arrived
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
