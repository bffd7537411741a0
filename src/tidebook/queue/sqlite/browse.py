"""Bounded listings of entries and dead letters in SQLite, and the removal of entries that wait."""

from __future__ import annotations

from collections.abc import Sequence

from tidebook.queue.browse import EntryPlace
from tidebook.queue.port import QueueRef
from tidebook.queue.sql_browser import BrowseStatements
from tidebook.queue.sqlite.dead_letters import LETTERS
from tidebook.queue.sqlite.reads import ENTRY_COLUMNS, NEXT_PRIORITY
from tidebook.sqlite.writer import WriteTransaction

_ENTRIES = f"SELECT {ENTRY_COLUMNS}, token FROM entry"
_RANGE = """INDEXED BY entry_order WHERE queue = :queue AND status = 'W' AND priority = :priority
    AND process_at BETWEEN :low AND :high AND (process_at, id) > (:date, :id) AND expires_at > :now"""
_LETTER_INDEX = "dead AS d INDEXED BY dead_by_queue WHERE d.queue = :queue"
_MATCHING = """d.id < :below AND d.id >= :floor AND (:key IS NULL OR d.key = :key) AND instr(d.reason, :reason)
    ORDER BY d.id DESC"""
_REMOVE = """DELETE FROM entry INDEXED BY entry_order
    WHERE queue = ? AND status = 'W' AND priority = ? AND process_at = ? AND id = ?"""

STATEMENTS = BrowseStatements(
    next_priority=NEXT_PRIORITY,
    range=f"{_ENTRIES} {_RANGE} ORDER BY process_at, id LIMIT :limit",
    range_count=f"SELECT count(*) FROM (SELECT 1 FROM entry {_RANGE} LIMIT :limit)",
    waiting_of_key=f"""{_ENTRIES} INDEXED BY entry_waiting
        WHERE queue = :queue AND status = 'W' AND key IS NOT NULL AND keyhash = unhex(:keyhash)
        AND expires_at > :now""",
    held=f"""{_ENTRIES} INDEXED BY entry_lease WHERE queue = :queue AND status = 'P'
        AND (lease_until, id) > (:date, :id) ORDER BY lease_until, id LIMIT :limit""",
    held_of_key=f"""{_ENTRIES} INDEXED BY entry_held
        WHERE queue = :queue AND status = 'P' AND key IS NOT NULL AND keyhash = unhex(:keyhash)""",
    held_count="""SELECT count(*) FROM (SELECT 1 FROM entry INDEXED BY entry_lease
        WHERE queue = :queue AND status = 'P' LIMIT :limit)""",
    claims="""SELECT token, count(*), min(started_at), min(lease_until) FROM (
            SELECT token, started_at, lease_until FROM entry INDEXED BY entry_lease
            WHERE queue = :queue AND status = 'P' AND token IS NOT NULL ORDER BY lease_until LIMIT :searched)
        GROUP BY token ORDER BY min(lease_until) LIMIT :limit""",
    workers="""SELECT id, name, concurrency, running, done, failed, started_at, reported_at, :now FROM worker
        WHERE queue = :queue ORDER BY reported_at DESC, id LIMIT :limit""",
    letters=f"{LETTERS} WHERE d.queue = :queue AND {_MATCHING} LIMIT :limit",
    letter_ids=f"SELECT d.id FROM {_LETTER_INDEX} AND {_MATCHING}",
    letter_floor=f"SELECT d.id FROM {_LETTER_INDEX} AND d.id < :below ORDER BY d.id DESC LIMIT 1 OFFSET :searched",
    letter=f"{LETTERS} WHERE d.queue = :queue AND d.id = :id",
    letter_count=f"SELECT count(*) FROM (SELECT 1 FROM {_LETTER_INDEX} LIMIT :limit)",
)


def remove(session: WriteTransaction, now_ms: int, queue: QueueRef, places: Sequence[EntryPlace]) -> int:
    removed = 0
    for place in places:
        session.connection.execute(_REMOVE, (queue.id, *place))
        removed += session.connection.changes()
    return removed
