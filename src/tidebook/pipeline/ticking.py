"""What a replication does for streams by tag: ticks, so that what it has replicated comes below the horizon."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from tidebook.core.errors import Fenced, TidebookError, UnknownVersion
from tidebook.core.portal import Portal
from tidebook.core.topic import TopicFacts
from tidebook.pipeline.slice import next_offset, replicate_slice
from tidebook.pipeline.status import topic_facts
from tidebook.tags.horizon import NEVER_MS, read_horizon
from tidebook.tags.settings import TagSettings
from tidebook.tags.ticks import FOLLOWED_EVERY_S, LOOK_EVERY_S, Ticker, has_tags, share_shown, tick
from tidebook.wiring.book import Book
from tidebook.wiring.settings import Settings, options_as

PAGE_RECORDS = 5_000
#: More ticks than this are left to the job, whose tasks share them out.
ALONE_MAX = 64
LOGGER = logging.getLogger("tidebook.pipeline")


def clears_tags(settings: Settings) -> bool:
    """Whether deletes and purges reach the tag view."""
    found: TagSettings = options_as(settings.section("tags"), "tags", TagSettings)
    return found.deletes == "follow"


#: Where the last tick of each partition lies, by topic and partition.
Ticks = Mapping[tuple[str, int], int]


async def settle(book: Book, topics: Sequence[str] = ()) -> int:
    """Tick, and replicate through the ticks: all that was in the store before is below the horizon now.

    A book without tags is left as it is. Returns how many records were replicated.
    """
    ticks = await send_ticks(book, topics)
    return sum([records async for records in replicate_through(book, ticks)])


async def send_ticks(book: Book, topics: Sequence[str] = ()) -> Ticks:
    """Tick; returns where the ticks lie. A book without tags is left as it is."""
    if not await has_tags(book.store):
        return {}
    seen_ms = NEVER_MS
    if topics:  # other pipelines replicate the rest: their topics wait for these, and these for theirs
        seen_ms = await share_shown(book.store, (await read_horizon(book.store)).most_ms)
    return await tick(book.log, book.store, list(await topic_facts(book, tuple(topics))), seen_ms=seen_ms)


async def records_before(book: Book, ticks: Ticks) -> int:
    """How many records are to be replicated up to these ticks, and with them."""
    facts = await topic_facts(book, tuple({topic for topic, _ in ticks}))
    total = 0
    for (topic, partition), offset in ticks.items():
        start = next_offset(await book.store.pointer(topic, partition), topic, partition, facts[topic])
        total += max(0, offset + 1 - start)
    return total


async def replicate_through(book: Book, ticks: Ticks) -> AsyncIterator[int]:
    """Replicate, in this process, up to these ticks and no further; yields how many records each page had."""
    facts = await topic_facts(book, tuple({topic for topic, _ in ticks}))
    clear_tags = clears_tags(book.settings)
    for (topic, partition), offset in ticks.items():
        known = facts[topic]
        while (start := next_offset(await book.store.pointer(topic, partition), topic, partition, known)) <= offset:
            page = await book.log.read(topic, partition, start=start, stop=offset + 1, limit=PAGE_RECORDS)
            if page.next_offset <= start:
                break  # the log is another one by now, and shorter: the next run says so
            try:
                await replicate_slice(
                    book.store, topic, partition, page.records, known,
                    start=start, stop=page.next_offset, clear_tags=clear_tags,
                )  # fmt: skip
            except Fenced:
                continue  # another replicator was quicker
            except UnknownVersion:
                break  # it stops there, and the replication has told so
            yield len(page.records)


async def replicate_alone(book: Book, ticks: Ticks) -> None:
    """Replicate, in this process, ticks that lie right behind what is replicated, so that they wait for no micro-batch.

    The job brings them too, and leaves out what it finds done.
    """
    if not 0 < len(ticks) <= ALONE_MAX:
        return
    facts = await topic_facts(book, tuple({topic for topic, _ in ticks}))
    alone = ((topic, partition, offset) for (topic, partition), offset in ticks.items() if topic in facts)
    await asyncio.gather(*(_replicate_tick(book, *each, facts[each[0]]) for each in alone))


async def _replicate_tick(book: Book, topic: str, partition: int, offset: int, facts: TopicFacts) -> None:
    with suppress(Fenced):  # another replicator was quicker
        if next_offset(await book.store.pointer(topic, partition), topic, partition, facts) != offset:
            return
        page = await book.log.read(topic, partition, start=offset, stop=offset + 1, limit=1)
        await replicate_slice(
            book.store, topic, partition, page.records, facts, start=offset, stop=page.next_offset
        )  # fmt: skip


@contextmanager
def ticking(book: Book, portal: Portal, topics: Sequence[str] = ()) -> Iterator[None]:
    """Tick in the background: often while somebody follows a tag, else now and then."""
    over = threading.Event()
    ticker = Ticker(book.log, book.store, topics)

    def run() -> None:
        wait_s = LOOK_EVERY_S
        while not over.wait(wait_s):
            try:
                wait_s = portal.run(ticker.step())
                if wait_s <= FOLLOWED_EVERY_S:
                    portal.run(replicate_alone(book, ticker.alone))
                    portal.run(ticker.rest(wait_s))
                    wait_s = 0.0
            except TidebookError:
                book.metrics.count("tags_tick_failures")  # the replication meets the same and tells it
                wait_s = LOOK_EVERY_S
            except Exception:  # a thread that ends here would let the horizon stand still for ever
                book.metrics.count("tags_tick_failures")
                LOGGER.exception("a tick failed; the next one is tried")
                wait_s = LOOK_EVERY_S

    thread = threading.Thread(target=run, name="tidebook-ticks", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
