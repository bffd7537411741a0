"""An embedded queue needs only one table: it reuses the pages of finished entries, even under a held snapshot."""

from __future__ import annotations

from pathlib import Path

import apsw

import tidebook
from tidebook.queue.queue import Queue
from tidebook.sqlite.checksums import connect

ROUNDS = 6
ENTRIES = 1_000


async def churn(queue: Queue) -> None:
    await queue.put_many(list(range(ENTRIES)))
    while jobs := await queue.claim(250):
        await queue.done(jobs)


def pages(folder: Path) -> tuple[int, int]:
    """Return how many pages the queue uses, and how many of them are free."""
    connection = connect(folder / "queue.db", flags=apsw.SQLITE_OPEN_READONLY)
    try:
        taken: int = connection.execute("PRAGMA page_count").get
        free: int = connection.execute("PRAGMA freelist_count").get
        return taken, free
    finally:
        connection.close()


async def test_a_held_snapshot_does_not_enlarge_a_queue(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path) as book:
        queue = book.queue("mail")
        await churn(queue)
        first, _ = pages(tmp_path)
        holder = connect(tmp_path / "queue.db")
        holder.execute("BEGIN")
        holder.execute("SELECT count(*) FROM entry").fetchall()
        for _ in range(ROUNDS):
            await churn(queue)
        taken, free = pages(tmp_path)
        holder.close()
        assert taken <= first * 1.2
        assert free >= taken * 0.5, "pages of a drained queue are not free for the next entries"
