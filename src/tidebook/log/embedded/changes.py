"""What else the writer does in `log.db`: topics made and deleted, records removed. Each may be run again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tidebook.core.errors import NotFound
from tidebook.folder.inbox import Session
from tidebook.folder.rows import put_rows
from tidebook.log.embedded.appends import channel_of
from tidebook.log.embedded.chunks import Bounds, base
from tidebook.log.embedded.directory import listings
from tidebook.log.port import TopicState

#: Records that are removed within one transaction.
SWEEP_MAX = 2_000


class NewTopic(msgspec.Struct, frozen=True, gc=False):
    """A topic to be made."""

    topic: str
    topic_id: str
    partitions: int
    limit_bytes: int | None


def create_topic(session: Session, wanted: Sequence[NewTopic]) -> list[TopicState]:
    """Make topics, or find them as they are."""
    execute = session.connection.execute
    states = []
    for new in wanted:
        found = execute("SELECT name, topic_id, partitions FROM topic WHERE name = ?", (new.topic,)).fetchone()
        if found is None:
            found = (new.topic, new.topic_id, new.partitions)
            execute("INSERT INTO topic VALUES (?, ?, ?, ?)", (new.topic_id, new.topic, new.partitions, new.limit_bytes))
            numbers = [each for number in range(new.partitions) for each in (new.topic_id, number)]
            put_rows(session.connection, "INSERT INTO partition (topic_id, number) VALUES {}", 2, numbers)
        states.append(TopicState(*found))
    return states


def delete_topic(session: Session, topics: Sequence[str]) -> list[None]:
    """Take topics away at once; their records are swept later."""
    execute = session.connection.execute
    for topic in topics:
        found = execute("SELECT topic_id, partitions FROM topic WHERE name = ?", (topic,)).fetchone()
        if found is None:
            raise NotFound(f"the log has no topic {topic!r}")
        execute("UPDATE partition SET topic_id = NULL, start_offset = next_offset WHERE topic_id = ?", found[:1])
        execute("DELETE FROM topic WHERE topic_id = ?", found[:1])
        session.memory.clear()
        session.channels.update(channel_of(topic, number) for number in range(found[1]))
    return [None] * len(topics)


def truncate(session: Session, cuts: Sequence[tuple[str, int, int]]) -> list[None]:
    """Move the start of partitions on; their records are swept later."""
    execute = session.connection.execute
    for topic, number, before in cuts:
        found = execute(
            """UPDATE partition SET start_offset = max(start_offset, min(?, next_offset))
            WHERE number = ? AND topic_id = (SELECT topic_id FROM topic WHERE name = ?) RETURNING id""",
            (before, number, topic),
        ).fetchall()
        if not found:
            raise NotFound(f"the log has no partition {number} of topic {topic!r}")
    return [None] * len(cuts)


def sweep(session: Session, asked: Sequence[Any]) -> list[bool]:
    """Remove a part of what lies below the starts; True while there is more."""
    execute = session.connection.execute
    due = execute(
        """SELECT id, start_offset, next_offset, indexed_to, recent, swept_to, topic_id
        FROM partition INDEXED BY partition_to_sweep WHERE swept_to < start_offset OR topic_id IS NULL LIMIT 1"""
    ).fetchone()
    if due is None:
        return [False] * len(asked)
    at, swept_to, topic_id = Bounds._make(due[:5]), due[5], due[6]
    to = min(at.start, swept_to + SWEEP_MAX)
    put_rows(session.connection, "DELETE FROM chunk WHERE id IN (VALUES {})", 1, _swept(session, at, swept_to, to))
    low = base(at.id)
    execute("DELETE FROM key_run WHERE id >= ? AND id < ? AND id + count <= ?", (low, low + to, low + to))
    if topic_id is None and to == at.start:
        execute("DELETE FROM directory WHERE id >= ? AND id < ?", (low, base(at.id + 1)))
        execute("DELETE FROM partition WHERE id = ?", (at.id,))
    else:
        execute(
            """DELETE FROM directory WHERE id >= ?1 AND id <
            (SELECT max(id) FROM directory WHERE id BETWEEN ?1 AND ?1 + ?2)""",
            (low, to),
        )
        execute("UPDATE partition SET swept_to = ? WHERE id = ?", (to, at.id))
    # The writer may know a place whose start has moved.
    session.memory.clear()
    return [True] * len(asked)


def _swept(session: Session, at: Bounds, swept_to: int, to: int) -> list[int]:
    """The chunks that end above `swept_to` and at or below `to`; a chunk ends where the next one begins."""
    firsts: list[int] = []
    ids: list[int] = []
    for listing in listings(session.connection, at, swept_to, to + 1):
        firsts += listing.firsts
        ids += listing.ids
    return [id for id, end in zip(ids, [*firsts[1:], at.end], strict=False) if swept_to < end <= to]
