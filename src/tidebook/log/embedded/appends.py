"""Appending: what the writer does with records that were sent together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tidebook.core.clock import Clock
from tidebook.core.errors import NotFound, TidebookError, TooLarge
from tidebook.folder.rows import put_rows
from tidebook.folder.writer import Session
from tidebook.log.port import Outgoing, Sent

_PLACE = """SELECT p.id, p.next_offset, p.time_ms, t.limit_bytes FROM topic t JOIN partition p USING (topic_id)
    WHERE t.name = ? AND p.number = ?"""
_INSERT = "INSERT INTO record VALUES {}"
_MOVE = """UPDATE partition SET next_offset = v.column2, time_ms = v.column3
    FROM (VALUES {}) AS v WHERE partition.id = v.column1"""

_encode = msgspec.msgpack.Encoder().encode


class Place:
    """Where the next record of a partition goes, as the writer knows it between its transactions."""

    __slots__ = ("channel", "id", "limit_bytes", "next_offset", "time_ms")

    def __init__(self, id: int, next_offset: int, time_ms: int, limit_bytes: int | None, channel: str) -> None:
        self.id = id
        self.next_offset = next_offset
        self.time_ms = time_ms
        self.limit_bytes = limit_bytes
        self.channel = channel


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
        values: list[Any] = []
        moved: dict[int, Place] = {}
        outcomes: list[Sent | TidebookError] = []
        for record in records:
            number, value = record.partition, record.value
            place = memory.get((record.topic, number))
            if place is None:
                place = _find(session, record.topic, number)
                if place is None:
                    outcomes.append(NotFound(f"the log has no partition {number} of topic {record.topic!r}"))
                    continue
                memory[record.topic, number] = place
            if place.limit_bytes is not None and len(value) > place.limit_bytes:
                outcomes.append(TooLarge("the record", size_bytes=len(value), limit_bytes=place.limit_bytes))
                continue
            offset = place.next_offset
            place.next_offset = offset + 1
            if place.time_ms < now_ms:
                place.time_ms = now_ms
            moved[place.id] = place
            headers = _encode(record.headers) if record.headers else None
            values += (place.id, offset, place.time_ms, record.key, value, headers)
            outcomes.append(Sent(number, offset, place.time_ms))
        if moved:
            put_rows(session.connection, _INSERT, 6, values)
            ends = [each for place in moved.values() for each in (place.id, place.next_offset, place.time_ms)]
            put_rows(session.connection, _MOVE, 3, ends)
            session.channels.update(place.channel for place in moved.values())
        return outcomes


def _find(session: Session, topic: str, number: int) -> Place | None:
    found = session.connection.execute(_PLACE, (topic, number)).fetchone()
    if found is None:
        return None
    id, next_offset, time_ms, limit_bytes = found
    return Place(id, next_offset, time_ms, limit_bytes, channel_of(topic, number))
