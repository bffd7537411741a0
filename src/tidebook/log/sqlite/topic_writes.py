"""The writer's operations on topics: create, delete, truncate and sweep. All can be repeated after a rollback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tidebook.core.errors import NotFound
from tidebook.log.port import TopicState
from tidebook.log.sqlite.append import channel_of
from tidebook.log.sqlite.tables import first_row
from tidebook.sqlite.multi_insert import insert_rows
from tidebook.sqlite.writer import WriteTransaction

#: Maximum number of records that one transaction deletes.
SWEEP_MAX = 2_000


class NewTopic(NamedTuple):
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
            row = new[:3]
            execute("INSERT INTO topic VALUES (?, ?, ?, ?)", new)
            rows = [each for number in range(new.partitions) for each in (new.topic, number)]
            insert_rows(transaction.connection, "INSERT INTO partition (topic, number) VALUES {}", 2, rows)
        states.append(TopicState(*row))
    return states


def delete_topic(transaction: WriteTransaction, topics: Sequence[str]) -> list[None]:
    """Delete topics; `sweep` deletes their records later. Raise NotFound if there is none."""
    execute = transaction.connection.execute
    for topic in topics:
        sql = "UPDATE partition SET topic = NULL, start_offset = next_offset WHERE topic = ? RETURNING number"
        numbers: list[Any] = execute(sql, (topic,)).fetchall()
        if not numbers:
            raise NotFound(f"the log has no topic {topic!r}")
        execute("DELETE FROM topic WHERE name = ?", (topic,))
        transaction.memory.clear()
        transaction.channels.update(channel_of(topic, number) for (number,) in numbers)
    return [None] * len(topics)


def truncate(transaction: WriteTransaction, truncations: Sequence[tuple[str, int, int]]) -> list[None]:
    """Advance the start of partitions; `sweep` deletes the records below it later."""
    sql = """UPDATE partition SET start_offset = max(start_offset, min(?3, next_offset))
        WHERE topic = ?1 AND number = ?2 RETURNING id"""
    for truncation in truncations:
        if not transaction.connection.execute(sql, truncation).fetchall():
            raise NotFound(f"the log has no partition {truncation[1]} of topic {truncation[0]!r}")
    return [None] * len(truncations)


def sweep(transaction: WriteTransaction, arguments: Sequence[Any]) -> list[bool]:
    """Delete some records that are truncated or belong to deleted topics; return True while there may be more."""
    execute = transaction.connection.execute
    due: Any = execute(
        """SELECT id, start_offset, swept_to, topic
        FROM partition INDEXED BY partition_to_sweep WHERE swept_to < start_offset OR topic IS NULL LIMIT 1"""
    ).fetchone()
    if due is None:
        return [False] * len(arguments)
    id, start, swept_to, topic = due
    to = min(start, swept_to + SWEEP_MAX)
    execute("DELETE FROM record WHERE id >= ? AND id < ?", (first_row(id) + swept_to, first_row(id) + to))
    if topic is None and to == start:
        execute("DELETE FROM partition WHERE id = ?", (id,))
    else:
        execute("UPDATE partition SET swept_to = ? WHERE id = ?", (to, id))
    return [True] * len(arguments)
