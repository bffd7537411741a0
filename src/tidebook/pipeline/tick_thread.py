"""Send ticks while a replication runs, so that the horizon passes the replicated events and tag streams see them."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from tidebook.core.errors import Fenced, TidebookError, UnknownVersion
from tidebook.core.topic_config import TopicConfig
from tidebook.pipeline.status import topic_configs
from tidebook.replication.slice import first_unreplicated_offset, replicate_slice
from tidebook.replication.ticks import FOLLOWED_EVERY_S, LOOK_EVERY_S, Ticker, has_tags, share_shown, tick
from tidebook.runtime.blocking_portal import BlockingPortal
from tidebook.tags.horizon import NEVER_MS, read_horizon
from tidebook.tags.settings import TagSettings
from tidebook.wiring.book import Book
from tidebook.wiring.settings import Settings, options_as

PAGE_RECORDS = 5_000
#: If there are more ticks than this, the job's tasks replicate them in parallel.
ADJACENT_TICKS_MAX = 64
LOGGER = logging.getLogger("tidebook.pipeline")


def clears_tags(settings: Settings) -> bool:
    """Return whether deletes and purges are applied to the tag view."""
    found: TagSettings = options_as(settings.section("tags"), "tags", TagSettings)
    return found.deletes == "follow"


#: The offset of the last tick, by topic and partition.
Ticks = Mapping[tuple[str, int], int]


async def replicate_ticks(book: Book, topics: Sequence[str] = ()) -> int:
    """Send ticks and replicate up to them, so that everything stored before is below the horizon.

    Return how many records were replicated; a book without tags gets no ticks.
    """
    ticks = await send_ticks(book, topics)
    return sum([records async for records in replicate_through(book, ticks)])


async def send_ticks(book: Book, topics: Sequence[str] = ()) -> Ticks:
    """Send a tick to every partition and return their offsets; a book without tags gets none."""
    if not await has_tags(book.store):
        return {}
    seen_ms = NEVER_MS
    if topics:  # other pipelines replicate the other topics, and all share one horizon
        seen_ms = await share_shown(book.store, (await read_horizon(book.store)).most_ms)
    return await tick(book.log, book.store, list(await topic_configs(book, tuple(topics))), seen_ms=seen_ms)


async def records_before(book: Book, ticks: Ticks) -> int:
    """Return how many unreplicated records there are up to and including these ticks."""
    configs = await topic_configs(book, tuple({topic for topic, _ in ticks}))
    total = 0
    for (topic, partition), offset in ticks.items():
        start = first_unreplicated_offset(await book.store.pointer(topic, partition), topic, partition, configs[topic])
        total += max(0, offset + 1 - start)
    return total


async def replicate_through(book: Book, ticks: Ticks) -> AsyncIterator[int]:
    """Replicate in this process up to and including these ticks; yield the number of records of each page."""
    configs = await topic_configs(book, tuple({topic for topic, _ in ticks}))
    clear_tags = clears_tags(book.settings)
    for (topic, partition), offset in ticks.items():
        config = configs[topic]
        while (
            start := first_unreplicated_offset(await book.store.pointer(topic, partition), topic, partition, config)
        ) <= offset:
            page = await book.log.read(topic, partition, start=start, stop=offset + 1, limit=PAGE_RECORDS)
            if page.next_offset <= start:
                break  # the log was replaced by a shorter one, which the next run reports
            try:
                await replicate_slice(
                    book.store, topic, partition, page.records, config,
                    start=start, stop=page.next_offset, clear_tags=clear_tags,
                )  # fmt: skip
            except Fenced:
                continue  # another replicator has moved the pointer
            except UnknownVersion:
                break  # the partition is stopped there, which the replication has reported
            yield len(page.records)


async def replicate_adjacent_ticks(book: Book, ticks: Ticks) -> None:
    """Replicate in this process the ticks that are the first unreplicated record of their partition.

    They need not wait for a micro-batch then; the job skips records that are already replicated.
    """
    if not 0 < len(ticks) <= ADJACENT_TICKS_MAX:
        return
    configs = await topic_configs(book, tuple({topic for topic, _ in ticks}))
    adjacent = ((topic, partition, offset) for (topic, partition), offset in ticks.items() if topic in configs)
    await asyncio.gather(*(_replicate_tick(book, *each, configs[each[0]]) for each in adjacent))


async def _replicate_tick(book: Book, topic: str, partition: int, offset: int, config: TopicConfig) -> None:
    with suppress(Fenced):  # another replicator has moved the pointer
        if first_unreplicated_offset(await book.store.pointer(topic, partition), topic, partition, config) != offset:
            return
        page = await book.log.read(topic, partition, start=offset, stop=offset + 1, limit=1)
        await replicate_slice(
            book.store, topic, partition, page.records, config, start=offset, stop=page.next_offset
        )  # fmt: skip


@contextmanager
def tick_thread(book: Book, portal: BlockingPortal, topics: Sequence[str] = ()) -> Iterator[None]:
    """Send ticks from a background thread: often while a tag stream is followed, else rarely."""
    stop = threading.Event()
    ticker = Ticker(book.log, book.store, topics)

    def run() -> None:
        wait_s = LOOK_EVERY_S
        while not stop.wait(wait_s):
            try:
                wait_s = portal.run(ticker.step())
                if wait_s <= FOLLOWED_EVERY_S:
                    portal.run(replicate_adjacent_ticks(book, ticker.alone))
                    portal.run(ticker.rest(wait_s))
                    wait_s = 0.0
            except TidebookError:
                book.metrics.count("tags_tick_failures")  # the replication fails likewise and reports it
                wait_s = LOOK_EVERY_S
            except Exception:  # if this thread ended, the horizon would never advance again
                book.metrics.count("tags_tick_failures")
                LOGGER.exception("a tick failed; it is retried")
                wait_s = LOOK_EVERY_S

    thread = threading.Thread(target=run, name="tidebook-ticks", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
