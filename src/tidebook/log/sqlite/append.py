"""Append records: the operations that the writer thread executes for all records of a commit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tidebook.core.errors import NotFound, TidebookError, TooLarge
from tidebook.log.port import Acknowledged, OrderedBatch, Outgoing
from tidebook.log.sqlite.tables import first_row
from tidebook.runtime.clock import Clock
from tidebook.sqlite.multi_insert import insert_rows
from tidebook.sqlite.writer import WriteTransaction

_SELECT_END = """SELECT p.id, p.next_offset, p.time_ms, t.limit_bytes
    FROM topic t JOIN partition p ON p.topic = t.name WHERE t.name = ? AND p.number = ?"""
_SAVE = """UPDATE partition SET next_offset = v.column2, time_ms = v.column3
    FROM (VALUES {}) AS v WHERE partition.id = v.column1"""
#: The name under which the transaction's cache has the latest timestamp of the log.
_LATEST_MS = "latest time"

encode_headers = msgspec.msgpack.Encoder().encode

#: The outcome of a record of an ordered batch. None: it was not appended, because an earlier one of its chain was
#: rejected.
Outcome = Acknowledged | TooLarge | None


class PartitionEnd:
    """The end of a partition, where records are appended. The writer caches it between transactions."""

    __slots__ = ("first_row", "id", "limit_bytes", "next_offset", "time_ms")

    def __init__(self, id: int, next_offset: int, time_ms: int, limit_bytes: int | None) -> None:
        self.id = id
        self.first_row = first_row(id)
        self.next_offset = next_offset
        self.time_ms = time_ms
        self.limit_bytes = limit_bytes


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

    def append(self, transaction: WriteTransaction, records: Sequence[Outgoing]) -> list[Acknowledged | TidebookError]:
        """Append the records; return an acknowledgement or an error for each. An error does not affect the others."""
        memory, connection = transaction.memory, transaction.connection
        if _LATEST_MS not in memory:
            memory[_LATEST_MS] = connection.execute("SELECT ifnull(max(time_ms), 0) FROM partition").get
        memory[_LATEST_MS] = now_ms = max(self._clock.now_ms(), memory[_LATEST_MS])
        changed: dict[tuple[str, int], PartitionEnd] = {}
        outcomes: list[Acknowledged | TidebookError] = []
        rows: list[Any] = []
        for record in records:
            name = (record.topic, record.partition)
            end = changed.get(name)
            if end is None:
                end = memory.get(name)
                if end is None:
                    row: Any = connection.execute(_SELECT_END, name).fetchone()
                    if row is None:
                        outcomes.append(NotFound(f"the log has no partition {name[1]} of topic {name[0]!r}"))
                        continue
                    end = memory[name] = PartitionEnd(*row)
                changed[name] = end
                end.time_ms = max(end.time_ms, now_ms)
            value = record.value
            if end.limit_bytes is not None and len(value) > end.limit_bytes:
                outcomes.append(TooLarge("the record", size_bytes=len(value), limit_bytes=end.limit_bytes))
                continue
            headers = encode_headers(record.headers) if record.headers else None
            rows += (end.first_row + end.next_offset, end.time_ms, record.key, value, headers)
            outcomes.append(Acknowledged(name[1], end.next_offset, end.time_ms))
            end.next_offset += 1
        insert_rows(connection, "INSERT INTO record VALUES {}", 5, rows)
        ends = [each for end in changed.values() for each in (end.id, end.next_offset, end.time_ms)]
        insert_rows(connection, _SAVE, 3, ends)
        transaction.channels.update(channel_of(*name) for name in changed)
        return outcomes

    def append_ordered(self, transaction: WriteTransaction, batches: Sequence[OrderedBatch]) -> list[list[Outcome]]:
        """Append batches of one topic each, and return the outcomes of their records; if this raises, append nothing.

        A record over the topic's limit is rejected with TooLarge, and those after it in its chain with None.
        """
        return [self._append_batch(transaction, batch) for batch in batches]

    def _append_batch(self, transaction: WriteTransaction, batch: OrderedBatch) -> list[Outcome]:
        limit = transaction.connection.execute(
            "SELECT limit_bytes FROM topic WHERE name = ?", (batch.topic,)
        ).fetchone()
        if limit is None:
            raise NotFound(f"the log has no topic {batch.topic!r}")
        outcomes: list[Outcome] = [None] * len(batch.records)
        accepted: list[int] = []
        rejected_chains: set[bytes] = set()
        for index, (record, chain) in enumerate(zip(batch.records, batch.chains, strict=True)):
            size_bytes = len(record.value)
            if chain is not None and chain in rejected_chains:
                continue
            if limit[0] is None or size_bytes <= limit[0]:
                accepted.append(index)
                continue
            outcomes[index] = TooLarge("the message", size_bytes=size_bytes, limit_bytes=limit[0])
            if chain is not None:
                rejected_chains.add(chain)
        sent = self.append(transaction, [batch.records[index] for index in accepted])
        for index, result in zip(accepted, sent, strict=True):
            if not isinstance(result, Acknowledged):
                raise result
            outcomes[index] = result
        return outcomes
