"""Appending: what the writer does with records that were sent together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tidebook.core.clock import Clock
from tidebook.core.errors import NotFound, TidebookError, TooLarge
from tidebook.folder.inbox import Session
from tidebook.folder.rows import put_rows
from tidebook.log.embedded.chunks import CHUNK_BYTES_MAX, Bounds, base, pack
from tidebook.log.embedded.directory import LISTED, Listing, decode_listing, encode_listing
from tidebook.log.embedded.key_runs import RUN, index_up_to
from tidebook.log.port import Outgoing, Sent

_PLACE = """SELECT p.id, p.start_offset, p.next_offset, p.time_ms, p.indexed_to, p.recent, t.limit_bytes
    FROM topic t JOIN partition p USING (topic_id) WHERE t.name = ? AND p.number = ?"""
_INSERT = "INSERT INTO chunk VALUES {}"
_LIST = "INSERT INTO directory VALUES {}"
_MOVE = """UPDATE partition SET next_offset = v.column2, time_ms = v.column3, indexed_to = v.column4, recent = v.column5
    FROM (VALUES {}) AS v WHERE partition.id = v.column1"""


#: Under this name the writer remembers the last chunk's id.
_LAST_ID = "last chunk"


class Place:
    """Where the next record of a partition goes, as the writer knows it between its transactions."""

    __slots__ = (
        "chunk", "chunk_bytes", "id", "indexed_to", "limit_bytes", "next_offset", "recent", "start", "time_ms",
    )  # fmt: skip

    def __init__(
        self, id: int, start: int, next_offset: int, time_ms: int, indexed_to: int, recent: bytes, limit: int | None
    ) -> None:
        self.id = id
        self.start = start
        self.next_offset = next_offset
        self.time_ms = time_ms
        self.indexed_to = indexed_to
        self.recent = decode_listing(recent)
        self.limit_bytes = limit
        #: The records of this transaction that are not in a chunk yet.
        self.chunk: list[tuple[Any, ...]] = []
        self.chunk_bytes = 0


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
        memory, writing = session.memory, _Writing(session)
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
                writing.end_chunk(place)
        writing.finish(moved)
        return outcomes


class _Writing:
    """The rows of one run of appends."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._chunks: list[Any] = []
        self._lists: list[Any] = []

    def end_chunk(self, place: Place) -> None:
        """Make a chunk of the records that are in none yet, and list it."""
        id = self._session.memory[_LAST_ID] = self._last_id() + 1
        first = place.next_offset - len(place.chunk)
        self._chunks += (id, base(place.id) + first, place.time_ms, pack(place.chunk))
        place.chunk, place.chunk_bytes = [], 0
        firsts, ids = place.recent
        firsts.append(first)
        ids.append(id)
        if len(ids) == LISTED:
            self._lists += (base(place.id) + firsts[0], encode_listing(firsts, ids))
            place.recent = Listing([], [])

    def finish(self, moved: dict[tuple[str, int], Place]) -> None:
        """Write all of it, and where the partitions stand now."""
        connection, ends = self._session.connection, list[Any]()
        for place in moved.values():
            if place.chunk:
                self.end_chunk(place)
        put_rows(connection, _INSERT, 4, self._chunks)
        put_rows(connection, _LIST, 2, self._lists)
        for at, place in moved.items():
            recent = encode_listing(*place.recent)
            if place.next_offset - place.indexed_to >= RUN:
                bounds = Bounds(place.id, place.start, place.next_offset, place.indexed_to, recent)
                place.indexed_to = index_up_to(connection, bounds)
            ends += (place.id, place.next_offset, place.time_ms, place.indexed_to, recent)
            self._session.channels.add(channel_of(*at))
        put_rows(connection, _MOVE, 5, ends)

    def _last_id(self) -> int:
        last: int | None = self._session.memory.get(_LAST_ID)
        if last is None:
            last = self._session.connection.execute("SELECT ifnull(max(id), 0) FROM chunk").get
        return last


def _find(session: Session, at: tuple[str, int]) -> Place | None:
    row = session.connection.execute(_PLACE, at).fetchone()
    if row is None:
        return None
    id, start, next_offset, time_ms, indexed_to, recent, limit_bytes = row
    return Place(id, start, next_offset, time_ms, indexed_to, recent, limit_bytes)
