"""Append records: the operation that the writer thread executes for all records of a commit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tidebook.core.errors import NotFound, TidebookError, TooLarge
from tidebook.log.port import Acknowledged, Outgoing
from tidebook.log.sqlite.chunk_directory import CHUNKS_PER_LISTING, Listing, decode_listing, encode_listing
from tidebook.log.sqlite.chunks import CHUNK_BYTES_MAX, PartitionBounds, pack, partition_base
from tidebook.log.sqlite.key_runs import RUN_RECORDS, index_up_to
from tidebook.runtime.clock import Clock
from tidebook.sqlite.multi_insert import insert_rows
from tidebook.sqlite.write_queue import WriteTransaction

_SELECT_END = """SELECT p.id, p.start_offset, p.next_offset, p.time_ms, p.indexed_to, p.recent, t.limit_bytes
    FROM topic t JOIN partition p USING (topic_id) WHERE t.name = ? AND p.number = ?"""
_INSERT_CHUNKS = "INSERT INTO chunk VALUES {}"
_INSERT_DIRECTORY = "INSERT INTO directory VALUES {}"
_SAVE = """UPDATE partition SET next_offset = v.column2, time_ms = v.column3, indexed_to = v.column4, recent = v.column5
    FROM (VALUES {}) AS v WHERE partition.id = v.column1"""


#: Names under which the transaction's cache has the last chunk's id and the latest timestamp of the log.
_LAST_ID = "last chunk"
_LATEST_MS = "latest time"


class PartitionEnd:
    """The end of a partition, where records are appended. The writer caches it between transactions."""

    __slots__ = (
        "id", "indexed_to", "limit_bytes", "next_offset", "pending", "pending_bytes", "recent", "start", "time_ms",
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
        #: Records of this transaction that are not in a chunk yet, and the size of their values.
        self.pending: list[tuple[Any, ...]] = []
        self.pending_bytes = 0


def channel_of(topic: str, partition: int) -> str:
    """Return the wake-up channel of a partition."""
    return f"log/{topic}/{partition}"


class Appender:
    """Assigns offsets and timestamps to records in the order in which they were sent.

    Timestamps never decrease over the whole log: so a tick, which carries the time of one partition to another, is
    never far ahead of the clock.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def run(self, transaction: WriteTransaction, records: Sequence[Outgoing]) -> list[Acknowledged | TidebookError]:
        """Append the records; return an acknowledgement or an error for each. An error does not affect the others."""
        memory, rows = transaction.memory, _AppendedRows(transaction)
        if _LATEST_MS not in memory:
            memory[_LATEST_MS] = transaction.connection.execute("SELECT ifnull(max(time_ms), 0) FROM partition").get
        memory[_LATEST_MS] = now_ms = max(self._clock.now_ms(), memory[_LATEST_MS])
        changed: dict[tuple[str, int], PartitionEnd] = {}
        outcomes: list[Acknowledged | TidebookError] = []
        for record in records:
            name = (record.topic, record.partition)
            end = changed.get(name)
            if end is None:
                end = memory.get(name) or _load_end(transaction, name)
                if end is None:
                    outcomes.append(NotFound(f"the log has no partition {name[1]} of topic {name[0]!r}"))
                    continue
                memory[name] = changed[name] = end
                if end.time_ms < now_ms:
                    end.time_ms = now_ms
            value = record.value
            if end.limit_bytes is not None and len(value) > end.limit_bytes:
                outcomes.append(TooLarge("the record", size_bytes=len(value), limit_bytes=end.limit_bytes))
                continue
            end.pending.append((record.key, value, record.headers) if record.headers else (record.key, value))
            outcomes.append(Acknowledged(name[1], end.next_offset, end.time_ms))
            end.next_offset += 1
            end.pending_bytes += len(value)
            if end.pending_bytes >= CHUNK_BYTES_MAX:
                rows.end_chunk(end)
        rows.insert(changed)
        return outcomes


class _AppendedRows:
    """Collects the rows of one append operation, to insert them with few statements."""

    def __init__(self, transaction: WriteTransaction) -> None:
        self._transaction = transaction
        self._chunk_rows: list[Any] = []
        self._directory_rows: list[Any] = []

    def end_chunk(self, end: PartitionEnd) -> None:
        """Make a chunk of the partition's pending records, and list it."""
        id = self._transaction.memory[_LAST_ID] = self._last_id() + 1
        first = end.next_offset - len(end.pending)
        self._chunk_rows += (id, partition_base(end.id) + first, end.time_ms, pack(end.pending))
        end.pending, end.pending_bytes = [], 0
        firsts, ids = end.recent
        firsts.append(first)
        ids.append(id)
        if len(ids) == CHUNKS_PER_LISTING:
            self._directory_rows += (partition_base(end.id) + firsts[0], encode_listing(firsts, ids))
            end.recent = Listing([], [])

    def insert(self, changed: dict[tuple[str, int], PartitionEnd]) -> None:
        """Insert all rows, index the keys of complete runs, and update the partitions."""
        connection, end_rows = self._transaction.connection, list[Any]()
        for end in changed.values():
            if end.pending:
                self.end_chunk(end)
        insert_rows(connection, _INSERT_CHUNKS, 4, self._chunk_rows)
        insert_rows(connection, _INSERT_DIRECTORY, 2, self._directory_rows)
        for name, end in changed.items():
            recent = encode_listing(*end.recent)
            if end.next_offset - end.indexed_to >= RUN_RECORDS:
                bounds = PartitionBounds(end.id, end.start, end.next_offset, end.indexed_to, recent)
                end.indexed_to = index_up_to(connection, bounds)
            end_rows += (end.id, end.next_offset, end.time_ms, end.indexed_to, recent)
            self._transaction.channels.add(channel_of(*name))
        insert_rows(connection, _SAVE, 5, end_rows)

    def _last_id(self) -> int:
        last: int | None = self._transaction.memory.get(_LAST_ID)
        if last is None:
            last = self._transaction.connection.execute("SELECT ifnull(max(id), 0) FROM chunk").get
        return last


def _load_end(transaction: WriteTransaction, name: tuple[str, int]) -> PartitionEnd | None:
    row = transaction.connection.execute(_SELECT_END, name).fetchone()
    if row is None:
        return None
    id, start, next_offset, time_ms, indexed_to, recent, limit_bytes = row
    return PartitionEnd(id, start, next_offset, time_ms, indexed_to, recent, limit_bytes)
