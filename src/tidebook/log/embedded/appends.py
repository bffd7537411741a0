"""Appending: what the writer does with records that were sent together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tidebook.core.clock import Clock
from tidebook.core.errors import NotFound, TidebookError, TooLarge
from tidebook.folder.inbox import Session
from tidebook.folder.rows import put_rows
from tidebook.log.embedded.chunks import CHUNK_BYTES_MAX, base, pack
from tidebook.log.embedded.key_runs import RUN, index_up_to
from tidebook.log.port import Outgoing, Sent

_PLACE = """SELECT p.id, p.next_offset, p.time_ms, p.indexed_to, t.limit_bytes
    FROM topic t JOIN partition p USING (topic_id) WHERE t.name = ? AND p.number = ?"""
_INSERT = "INSERT INTO chunk VALUES {}"
_MOVE = """UPDATE partition SET next_offset = v.column2, time_ms = v.column3, indexed_to = v.column4
    FROM (VALUES {}) AS v WHERE partition.id = v.column1"""


class Place:
    """Where the next record of a partition goes, as the writer knows it between its transactions."""

    __slots__ = ("chunk", "chunk_bytes", "id", "indexed_to", "limit_bytes", "next_offset", "time_ms")

    def __init__(self, id: int, next_offset: int, time_ms: int, indexed_to: int, limit_bytes: int | None) -> None:
        self.id = id
        self.next_offset = next_offset
        self.time_ms = time_ms
        self.indexed_to = indexed_to
        self.limit_bytes = limit_bytes
        #: The records of this transaction that are not written yet.
        self.chunk: list[tuple[Any, ...]] = []
        self.chunk_bytes = 0

    def take_chunk(self) -> tuple[int, int, int, bytes]:
        """The row of the records that are not written yet."""
        chunk, self.chunk, self.chunk_bytes = self.chunk, [], 0
        return base(self.id) + self.next_offset - len(chunk), len(chunk), self.time_ms, pack(chunk)


def channel_of(topic: str, partition: int) -> str:
    """The wake-up channel of a partition."""
    return f"log/{topic}/{partition}"


class Appends:
    """Numbers and stamps records in the order they were sent; times of a partition never go back."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def run(self, session: Session, records: Sequence[Outgoing]) -> list[Sent | TidebookError]:
        """Insert all records; one that is refused leaves the others alone."""
        now_ms = self._clock.now_ms()
        memory = session.memory
        rows: list[Any] = []
        moved: dict[tuple[str, int], Place] = {}
        outcomes: list[Sent | TidebookError] = []
        for record in records:
            at = (record.topic, record.partition)
            place = moved.get(at)
            if place is None:
                place = memory.get(at) or _find(session, at)
                if place is None:
                    outcomes.append(NotFound(f"the log has no partition {at[1]} of topic {at[0]!r}"))
                    continue
                memory[at] = moved[at] = place
                if place.time_ms < now_ms:
                    place.time_ms = now_ms
            value = record.value
            if place.limit_bytes is not None and len(value) > place.limit_bytes:
                outcomes.append(TooLarge("the record", size_bytes=len(value), limit_bytes=place.limit_bytes))
                continue
            place.chunk.append((record.key, value, record.headers) if record.headers else (record.key, value))
            outcomes.append(Sent(at[1], place.next_offset, place.time_ms))
            place.next_offset += 1
            place.chunk_bytes += len(value)
            if place.chunk_bytes >= CHUNK_BYTES_MAX:
                rows += place.take_chunk()
        self._write(session, rows, moved)
        return outcomes

    def _write(self, session: Session, rows: list[Any], moved: dict[tuple[str, int], Place]) -> None:
        for place in moved.values():
            if place.chunk:
                rows += place.take_chunk()
        put_rows(session.connection, _INSERT, 4, rows)
        ends: list[int] = []
        for at, place in moved.items():
            if place.next_offset - place.indexed_to >= RUN:
                place.indexed_to = index_up_to(session.connection, place.id, place.indexed_to, place.next_offset)
            ends += (place.id, place.next_offset, place.time_ms, place.indexed_to)
            session.channels.add(channel_of(*at))
        put_rows(session.connection, _MOVE, 4, ends)


def _find(session: Session, at: tuple[str, int]) -> Place | None:
    row = session.connection.execute(_PLACE, at).fetchone()
    if row is None:
        return None
    id, next_offset, time_ms, indexed_to, limit_bytes = row
    return Place(id, next_offset, time_ms, indexed_to, limit_bytes)
