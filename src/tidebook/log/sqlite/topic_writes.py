"""The writer's operations on topics: create, delete, truncate and sweep. All can be repeated after a rollback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tidebook.core.errors import NotFound
from tidebook.log.port import TopicState
from tidebook.log.sqlite.append import channel_of
from tidebook.log.sqlite.chunk_directory import listings
from tidebook.log.sqlite.chunks import PartitionBounds, partition_base
from tidebook.sqlite.multi_insert import insert_rows
from tidebook.sqlite.write_queue import WriteTransaction

#: Maximum number of records that one transaction deletes.
SWEEP_MAX = 2_000


class NewTopic(msgspec.Struct, frozen=True, gc=False):
    """A topic to create."""

    topic: str
    topic_id: str
    partitions: int
    limit_bytes: int | None


def create_topic(transaction: WriteTransaction, new_topics: Sequence[NewTopic]) -> list[TopicState]:
    """Create topics; return those that exist unchanged."""
    execute = transaction.connection.execute
    states = []
    for new in new_topics:
        row = execute("SELECT name, topic_id, partitions FROM topic WHERE name = ?", (new.topic,)).fetchone()
        if row is None:
            row = (new.topic, new.topic_id, new.partitions)
            execute("INSERT INTO topic VALUES (?, ?, ?, ?)", (new.topic_id, new.topic, new.partitions, new.limit_bytes))
            rows = [each for number in range(new.partitions) for each in (new.topic_id, number)]
            insert_rows(transaction.connection, "INSERT INTO partition (topic_id, number) VALUES {}", 2, rows)
        states.append(TopicState(*row))
    return states


def delete_topic(transaction: WriteTransaction, topics: Sequence[str]) -> list[None]:
    """Delete topics; `sweep` deletes their records later. Raise NotFound if there is none."""
    execute = transaction.connection.execute
    for topic in topics:
        row = execute("SELECT topic_id, partitions FROM topic WHERE name = ?", (topic,)).fetchone()
        if row is None:
            raise NotFound(f"the log has no topic {topic!r}")
        execute("UPDATE partition SET topic_id = NULL, start_offset = next_offset WHERE topic_id = ?", row[:1])
        execute("DELETE FROM topic WHERE topic_id = ?", row[:1])
        transaction.memory.clear()
        transaction.channels.update(channel_of(topic, number) for number in range(row[1]))
    return [None] * len(topics)


def truncate(transaction: WriteTransaction, truncations: Sequence[tuple[str, int, int]]) -> list[None]:
    """Advance the start of partitions; `sweep` deletes the records below it later."""
    execute = transaction.connection.execute
    for topic, number, before in truncations:
        row = execute(
            """UPDATE partition SET start_offset = max(start_offset, min(?, next_offset))
            WHERE number = ? AND topic_id = (SELECT topic_id FROM topic WHERE name = ?) RETURNING id""",
            (before, number, topic),
        ).fetchall()
        if not row:
            raise NotFound(f"the log has no partition {number} of topic {topic!r}")
    return [None] * len(truncations)


def sweep(transaction: WriteTransaction, arguments: Sequence[Any]) -> list[bool]:
    """Delete some records that are truncated or belong to deleted topics; return True while there may be more."""
    execute = transaction.connection.execute
    due = execute(
        """SELECT id, start_offset, next_offset, indexed_to, recent, swept_to, topic_id
        FROM partition INDEXED BY partition_to_sweep WHERE swept_to < start_offset OR topic_id IS NULL LIMIT 1"""
    ).fetchone()
    if due is None:
        return [False] * len(arguments)
    bounds, swept_to, topic_id = PartitionBounds._make(due[:5]), due[5], due[6]
    to = min(bounds.start, swept_to + SWEEP_MAX)
    swept = _chunk_ids_between(transaction, bounds, swept_to, to)
    insert_rows(transaction.connection, "DELETE FROM chunk WHERE id IN (VALUES {})", 1, swept)
    low = partition_base(bounds.id)
    execute("DELETE FROM key_run WHERE id >= ? AND id < ? AND id + count <= ?", (low, low + to, low + to))
    if topic_id is None and to == bounds.start:
        execute("DELETE FROM directory WHERE id >= ? AND id < ?", (low, partition_base(bounds.id + 1)))
        execute("DELETE FROM partition WHERE id = ?", (bounds.id,))
    else:
        execute(
            """DELETE FROM directory WHERE id >= ?1 AND id <
            (SELECT max(id) FROM directory WHERE id BETWEEN ?1 AND ?1 + ?2)""",
            (low, to),
        )
        execute("UPDATE partition SET swept_to = ? WHERE id = ?", (to, bounds.id))
    # The cache may have the end of a partition whose start has changed.
    transaction.memory.clear()
    return [True] * len(arguments)


def _chunk_ids_between(transaction: WriteTransaction, bounds: PartitionBounds, swept_to: int, to: int) -> list[int]:
    """Return the ids of the chunks that end after `swept_to` and at or before `to`."""
    firsts: list[int] = []
    ids: list[int] = []
    for listing in listings(transaction.connection, bounds, swept_to, to + 1):
        firsts += listing.firsts
        ids += listing.ids
    # A chunk ends where the next one starts.
    return [id for id, end in zip(ids, [*firsts[1:], bounds.end], strict=False) if swept_to < end <= to]
