"""Record, remove and list the heartbeats of queue workers in SQLite."""

from __future__ import annotations

from typing import Any

import apsw

from tidebook.queue.port import WORKER_FORGOTTEN_MS, QueueRef, WorkerReport, WorkerRow
from tidebook.sqlite.writer import WriteTransaction

_FORGET = "DELETE FROM worker WHERE queue = ? AND reported_at < ?"
_REPORT = """INSERT INTO worker (queue, id, name, concurrency, running, done, failed, started_at, reported_at)
    VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?8) ON CONFLICT DO UPDATE SET name = excluded.name,
    concurrency = excluded.concurrency, running = excluded.running, done = excluded.done, failed = excluded.failed,
    reported_at = excluded.reported_at"""
_WORKERS = """SELECT id, name, concurrency, running, done, failed, started_at, reported_at, ? FROM worker
    WHERE queue = ? ORDER BY reported_at DESC, id LIMIT ?"""


def report(session: WriteTransaction, now_ms: int, queue: QueueRef, given: WorkerReport) -> None:
    """Record that a worker is alive; forget those that have been silent for a long time."""
    session.connection.execute(_FORGET, (queue.id, now_ms - WORKER_FORGOTTEN_MS))
    numbers = (given.concurrency, given.running, given.done, given.failed)
    session.connection.execute(_REPORT, (queue.id, given.id, given.name, *numbers, now_ms))


def remove(session: WriteTransaction, now_ms: int, queue: QueueRef, id: bytes) -> None:
    """Forget a worker that has ended."""
    session.connection.execute("DELETE FROM worker WHERE queue = ? AND id = ?", (queue.id, id))


def workers(connection: apsw.Connection, queue: QueueRef, now_ms: int, limit: int) -> list[WorkerRow]:
    """Return the workers of a queue, the latest report first."""
    found: Any = connection.execute(_WORKERS, (now_ms, queue.id, limit))
    return [WorkerRow(*row) for row in found]
