"""How a book stands: its topics, their logs, and how far replication is behind."""

from __future__ import annotations

from typing import Any

import msgspec

from tidebook.wiring.book import Book


class TopicStatus(msgspec.Struct, frozen=True):
    """One topic."""

    topic: str
    epoch: int
    partitions: int
    #: Records that the log holds, and those of them that the store does not have yet.
    records: int
    lag: int

    def as_row(self) -> dict[str, Any]:
        return msgspec.structs.asdict(self)


def file_damage(book: Book) -> dict[str, list[str]]:
    """What SQLite finds wrong in the files of the book's folder when it reads all of them, by file."""
    from tidebook.log.embedded.log import EmbeddedLog
    from tidebook.store.embedded.store import EmbeddedStore

    parts = [part for part in (book.log, book.store) if isinstance(part, EmbeddedLog | EmbeddedStore)]
    return {part.path.name: part.damage() for part in parts}


async def topic_statuses(book: Book) -> list[TopicStatus]:
    """Every topic of the book, by name."""
    return [await topic_status(book, topic) for topic in await book.topics()]


async def topic_status(book: Book, topic: str) -> TopicStatus:
    """One topic as it stands now."""
    facts = await book.journal(topic).facts()
    records = lag = 0
    for partition in range(facts.partitions):
        start, end = await book.log.start(topic, partition), await book.log.end(topic, partition)
        pointer = await book.store.pointer(topic, partition)
        replicated = pointer.position.offset + 1 if pointer and pointer.position.epoch == facts.epoch else 0
        records += end - start
        lag += max(0, end - max(replicated, start))
    return TopicStatus(topic, facts.epoch, facts.partitions, records, lag)
