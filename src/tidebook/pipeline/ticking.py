"""What a replication does for streams by tag: ticks, so that what it has replicated comes below the horizon."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tidebook.core.errors import Fenced, TidebookError, UnknownVersion
from tidebook.core.portal import Portal
from tidebook.pipeline.slice import next_offset, replicate_slice
from tidebook.pipeline.status import topic_facts
from tidebook.tags.settings import TagSettings
from tidebook.tags.ticks import LOOK_EVERY_S, Ticker, has_tags, tick
from tidebook.wiring.book import Book
from tidebook.wiring.settings import Settings, options_as

PAGE_RECORDS = 5_000


def clears_tags(settings: Settings) -> bool:
    """Whether deletes and purges reach the tag view."""
    found: TagSettings = options_as(settings.section("tags"), "tags", TagSettings)
    return found.deletes == "follow"


async def settle(book: Book, topics: Sequence[str] = ()) -> int:
    """Tick, and replicate through the ticks: all that was in the store before is below the horizon now.

    A book without tags is left as it is. Returns how many records were replicated.
    """
    if not await has_tags(book.store):
        return 0
    facts = await topic_facts(book, tuple(topics))
    await tick(book.log, book.store, list(facts))
    records, clear_tags = 0, clears_tags(book.settings)
    for topic, known in facts.items():
        for partition in range(known.partitions):
            end = await book.log.end(topic, partition)
            while (start := next_offset(await book.store.pointer(topic, partition), topic, partition, known)) < end:
                page = await book.log.read(topic, partition, start=start, stop=end, limit=PAGE_RECORDS)
                try:
                    await replicate_slice(
                        book.store, topic, partition, page.records, known,
                        start=start, stop=page.next_offset, clear_tags=clear_tags,
                    )  # fmt: skip
                except Fenced:
                    continue  # another replicator was quicker
                except UnknownVersion:
                    break  # it stops there, and the replication has told so
                records += len(page.records)
    return records


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
            except TidebookError:
                book.metrics.count("tags_tick_failures")  # the replication meets the same and tells it
                wait_s = LOOK_EVERY_S

    thread = threading.Thread(target=run, name="tidebook-ticks", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
