"""The tables that kafka-journal keeps in Cassandra, for reading only."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from tidebook.core.errors import InvalidInput, NotFound
from tidebook.importing.source_journal import EVENT_COLUMNS, HEAD_COLUMNS, OPTIONAL_COLUMNS, SourceHead

HEADS_PAGE = 1_000
EVENTS_PAGE = 500
JOURNAL, METAJOURNAL = "journal", "metajournal"
#: The current table of pointers, and that of older versions.
POINTERS = ("pointer2", "pointer")


class PagedSession(Protocol):
    """The part of a Cassandra session that an import uses."""

    def pages(self, cql: str, values: Sequence[Any], *, page_size: int) -> AsyncIterator[Any]: ...
    async def close(self) -> None: ...


class SourcePointer(msgspec.Struct, frozen=True):
    """A partition of a Kafka topic, and the offset of its last record that kafka-journal has replicated."""

    topic: str
    partition: int
    offset: int


class KafkaJournalTables:
    """Reads heads, events and pointers of one keyspace."""

    def __init__(self, session: PagedSession, keyspace: str, columns: Mapping[str, Collection[str]]) -> None:
        self._session = session
        heads = [name for name in HEAD_COLUMNS if name in columns[METAJOURNAL]]
        self._heads = f"SELECT {', '.join(heads)} FROM {keyspace}.{METAJOURNAL}"
        events = [name for name in EVENT_COLUMNS if name in columns[JOURNAL]]
        self._events = (
            f"SELECT {', '.join(events)} FROM {keyspace}.{JOURNAL} "
            "WHERE id = ? AND topic = ? AND segment = ? AND seq_nr > ?"
        )
        found = [name for name in POINTERS if name in columns]
        self._pointers = f"SELECT topic, partition, offset FROM {keyspace}.{found[0]}" if found else None

    @classmethod
    async def find(cls, session: PagedSession, keyspace: str) -> KafkaJournalTables:
        """Return the tables of a keyspace; raise NotFound if one is missing, InvalidInput if one is foreign."""
        cql = "SELECT table_name, column_name FROM system_schema.columns WHERE keyspace_name = ?"
        columns: dict[str, set[str]] = {}
        async for row in _rows(session, cql, [keyspace], HEADS_PAGE):
            columns.setdefault(row["table_name"], set()).add(row["column_name"])
        for table, expected in ((METAJOURNAL, HEAD_COLUMNS), (JOURNAL, EVENT_COLUMNS)):
            if table not in columns:
                raise NotFound(f"keyspace {keyspace} has no table {table}: is it the keyspace of kafka-journal?")
            if missing := {*expected} - columns[table] - OPTIONAL_COLUMNS:
                raise InvalidInput(
                    f"{keyspace}.{table} is not a table of kafka-journal: it lacks {', '.join(sorted(missing))}"
                )
        return cls(session, keyspace, columns)

    async def heads(self) -> AsyncIterator[Mapping[str, Any]]:
        """Yield the rows of `metajournal`, in the order of Cassandra's tokens."""
        async for row in _rows(self._session, self._heads, [], HEADS_PAGE):
            yield row

    async def events(self, head: SourceHead) -> AsyncIterator[Mapping[str, Any]]:
        """Yield the rows of a journal that are not deleted, in the order of their numbers, segment by segment.

        Every segment up to the head is read: a gap in the numbers that ends a segment does not end the journal.
        """
        for segment in head.segments():
            async for row in _rows(
                self._session, self._events, [head.id, head.topic, segment, head.delete_to], EVENTS_PAGE
            ):
                yield row

    async def pointers(self) -> list[SourcePointer]:
        """Return how far kafka-journal has replicated each partition, sorted; nothing if it has no such table."""
        if self._pointers is None:
            return []
        rows = [row async for row in _rows(self._session, self._pointers, [], HEADS_PAGE)]
        return sorted(
            (SourcePointer(row["topic"], row["partition"], row["offset"]) for row in rows if row["offset"] is not None),
            key=lambda each: (each.topic, each.partition),
        )

    async def close(self) -> None:
        """Close the session."""
        await self._session.close()


async def _rows(
    session: PagedSession, cql: str, values: Sequence[Any], page_size: int
) -> AsyncIterator[Mapping[str, Any]]:
    async for page in session.pages(cql, values, page_size=page_size):
        for row in page:
            yield row.as_dict()
