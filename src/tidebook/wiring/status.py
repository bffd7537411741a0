"""Report the status of a book: its journal topics, their replication lag, and damage of its files."""

from __future__ import annotations

from typing import Any

import msgspec

from tidebook.replication.slice import first_unreplicated_offset
from tidebook.wiring.book import Book


class JournalTopicStatus(msgspec.Struct, frozen=True):
    """The size and the replication lag of one journal topic."""

    topic: str
    epoch: int
    partitions: int
    #: The number of records in the log.
    records: int
    #: How many of them are not replicated yet.
    lag: int

    def as_row(self) -> dict[str, Any]:
        """Return the status as a JSON object."""
        return msgspec.structs.asdict(self)


def file_damage(book: Book) -> dict[str, list[str]]:
    """Return the errors of SQLite's integrity check by file name, for the embedded files of a book."""
    from tidebook.wiring.lazy_folder import LazyLog, LazyStore

    parts = [part for part in (book.log, book.store) if isinstance(part, LazyLog | LazyStore)]
    return {part.path.name: part.damage() for part in parts if part.open_existing() is not None}


async def topic_statuses(book: Book) -> list[JournalTopicStatus]:
    """Return the status of every journal topic, sorted by name."""
    return [await topic_status(book, topic) for topic in await book.topics()]


async def topic_status(book: Book, topic: str) -> JournalTopicStatus:
    """Return the current status of one journal topic."""
    pointers = await book.store.pointers(topic)  # before the configuration, whose epoch is then not older
    opened = await book.journal(topic).topic_config()
    config = await book.store.topic_config(topic) or opened  # another process may have adopted the topic since
    records = lag = 0
    for partition in range(config.partitions):
        start, end = await book.log.start(topic, partition), await book.log.end(topic, partition)
        replicated = first_unreplicated_offset(pointers.get(partition), topic, partition, config)
        records += end - start
        lag += max(0, end - max(replicated, start))
    return JournalTopicStatus(topic, config.epoch, config.partitions, records, lag)
