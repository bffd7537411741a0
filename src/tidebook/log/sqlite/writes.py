"""The operations of the writer thread on `log.db`: append records; create, delete, truncate and sweep topics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tidebook.core.errors import NotFound, TidebookError, TooLarge
from tidebook.log.port import Acknowledged, OrderedBatch, Outgoing, TopicState
from tidebook.log.sqlite.tables import first_row
from tidebook.runtime.clock import Clock
from tidebook.sqlite.multi_insert import insert_rows
from tidebook.sqlite.writer import WriteTransaction, one_by_one

_SELECT_END = """SELECT p.id, p.next_offset, p.time_ms, t.limit_bytes
    FROM topic t JOIN partition p ON p.topic = t.name WHERE t.name = ? AND p.number = ?"""
_SAVE = """UPDATE partition SET next_offset = v.column2, time_ms = v.column3
    FROM (VALUES {}) AS v WHERE partition.id = v.column1"""
#: The maximum number of records that one transaction deletes.
SWEEP_MAX = 2_000
#: The key under which the writer caches the log's latest timestamp.
_LATEST_MS = "latest time"

_encode_headers = msgspec.msgpack.Encoder().encode

#: The outcome of a record of an ordered batch; None if it was not appended because an earlier record of its chain was
#: rejected.
Outcome = Acknowledged | TooLarge | None


class PartitionEnd(msgspec.Struct):
    """The end of a partition, where records are appended. The writer caches it between transactions."""

    id: int
    next_offset: int
    time_ms: int
    limit_bytes: int | None


def channel_of(topic: str, partition: int) -> str:
    """Return the wake-up channel of a partition."""
    return f"log/{topic}/{partition}"


class Appender:
    """Assigns offsets and timestamps to records in the order in which they were sent.

    Timestamps never decrease over the whole log. Therefore a tick, which copies the time of one partition to another,
    is never far ahead of the clock.
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
            headers = _encode_headers(record.headers) if record.headers else None
            rows += (first_row(end.id) + end.next_offset, end.time_ms, record.key, value, headers)
            outcomes.append(Acknowledged(name[1], end.next_offset, end.time_ms))
            end.next_offset += 1
        insert_rows(connection, "INSERT INTO record VALUES {}", 5, rows)
        ends = [each for end in changed.values() for each in (end.id, end.next_offset, end.time_ms)]
        insert_rows(connection, _SAVE, 3, ends)
        transaction.channels.update(channel_of(*name) for name in changed)
        return outcomes

    def append_ordered(self, transaction: WriteTransaction, batches: Sequence[OrderedBatch]) -> list[list[Outcome]]:
        """Append batches of one topic each, and return the outcomes of their records; if this raises, append nothing.

        A record over the topic's limit is rejected with TooLarge; later records of its chain have the outcome None.
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


@one_by_one
def create_topic(transaction: WriteTransaction, new: tuple[str, str, int, int | None]) -> TopicState:
    """Create a topic (name, topic_id, partitions, limit_bytes), or return the existing one unchanged."""
    topic, _, partitions, _ = new
    execute = transaction.connection.execute
    row: Any = execute("SELECT name, topic_id, partitions FROM topic WHERE name = ?", (topic,)).fetchone()
    if row is None:
        execute("INSERT INTO topic VALUES (?, ?, ?, ?)", new)
        rows = [each for number in range(partitions) for each in (topic, number)]
        insert_rows(transaction.connection, "INSERT INTO partition (topic, number) VALUES {}", 2, rows)
    return TopicState(*(row or new[:3]))


@one_by_one
def delete_topic(transaction: WriteTransaction, topic: str) -> None:
    """Delete a topic; `sweep` deletes its records later. Raise NotFound if there is no such topic."""
    execute = transaction.connection.execute
    sql = "UPDATE partition SET topic = NULL, start_offset = next_offset WHERE topic = ? RETURNING number"
    numbers: list[Any] = execute(sql, (topic,)).fetchall()
    if not numbers:
        raise NotFound(f"the log has no topic {topic!r}")
    execute("DELETE FROM topic WHERE name = ?", (topic,))
    transaction.memory.clear()
    transaction.channels.update(channel_of(topic, number) for (number,) in numbers)


@one_by_one
def truncate(transaction: WriteTransaction, truncation: tuple[str, int, int]) -> None:
    """Advance the start of a partition; `sweep` deletes the records below it later."""
    sql = """UPDATE partition SET start_offset = max(start_offset, min(?3, next_offset))
        WHERE topic = ?1 AND number = ?2 RETURNING id"""
    if not transaction.connection.execute(sql, truncation).fetchall():
        raise NotFound(f"the log has no partition {truncation[1]} of topic {truncation[0]!r}")


@one_by_one
def sweep(transaction: WriteTransaction, argument: None) -> bool:
    """Delete some records that are truncated or belong to deleted topics; return True while there may be more."""
    execute = transaction.connection.execute
    swept_partition: Any = execute(
        """SELECT id, start_offset, swept_to, topic
        FROM partition INDEXED BY partition_to_sweep WHERE swept_to < start_offset OR topic IS NULL LIMIT 1"""
    ).fetchone()
    if swept_partition is None:
        return False
    id, start, swept_to, topic = swept_partition
    to = min(start, swept_to + SWEEP_MAX)
    execute("DELETE FROM record WHERE id >= ? AND id < ?", (first_row(id) + swept_to, first_row(id) + to))
    if topic is None and to == start:
        execute("DELETE FROM partition WHERE id = ?", (id,))
    else:
        execute("UPDATE partition SET swept_to = ? WHERE id = ?", (to, id))
    return True
