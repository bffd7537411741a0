"""A backup of a book in use is the book as of one moment, and a restored book continues from there."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

import tidebook
from tidebook import Event
from tidebook.core.errors import Corrupt, InvalidInput, NotFound
from tidebook.wiring.backup import MANIFEST_FILE, back_up, restore

FILES = ["log.db", "store.db", "queue.db", "outbox.db", "server.db"]

#: Appends to two journals in turn, puts into a queue, and prints each number once it is acknowledged.
WRITER = """
import asyncio, sys, tidebook
from tidebook import Event

async def main():
    async with tidebook.open(sys.argv[1], replicate=True) as book:
        for n in range(1, 100_000):
            await book.journal("orders").append("a", [Event(n)])
            await book.journal("orders").append("b", [Event(n)])
            await book.queue("mail").put(n, key=str(n))
            print(n, flush=True)

asyncio.run(main())
"""


def nothing(name: str, copied: int, pages: int) -> None:
    """Show no progress."""


async def append(folder: Path, *numbers: int) -> None:
    async with tidebook.open(folder) as book:
        for n in numbers:
            await book.journal("orders").append("a", [Event(n)])


async def read(folder: Path, id: str = "a") -> list[object]:
    async with tidebook.open(folder) as book:
        return [event.payload async for event in book.journal("orders").read(id)]


def test_a_backup_under_load_has_all_that_was_acknowledged_before_and_is_consistent(tmp_path: Path) -> None:
    book, backup, restored = tmp_path / "book", tmp_path / "backup", tmp_path / "restored"
    with subprocess.Popen([sys.executable, "-c", WRITER, str(book)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        try:
            acknowledged = 0
            while acknowledged < 50:
                acknowledged = int(writer.stdout.readline())
            back_up(book, FILES, backup, nothing)
            after = int(writer.stdout.readline())
        finally:
            writer.kill()
    restore(backup, restored, nothing)
    numbers = asyncio.run(read(restored))
    assert numbers == [*range(1, len(numbers) + 1)]
    assert acknowledged <= len(numbers)
    assert len(asyncio.run(read(restored, "b"))) in (len(numbers), len(numbers) - 1)
    assert after > acknowledged

    async def settled() -> tuple[list[object], int]:
        async with tidebook.open(restored, replicate=True) as opened:
            await opened.journal("orders").append("a", [Event("later", tags={"late"})])
            await opened.settle()
            tagged = [event.payload async for event in opened.tags.read("late")]
            return tagged, len(await opened.queue("mail").claim(limit=10_000))

    tagged, entries = asyncio.run(settled())
    assert tagged == ["later"]
    assert entries in range(acknowledged, len(numbers) + 1)


def test_a_restored_book_continues_from_the_moment_of_the_backup(tmp_path: Path) -> None:
    book, backup, restored = tmp_path / "book", tmp_path / "backup", tmp_path / "restored"
    asyncio.run(append(book, 1, 2))
    back_up(book, FILES, backup, nothing)
    asyncio.run(append(book, 3))
    restore(backup, restored, nothing)
    asyncio.run(append(restored, 4))
    assert asyncio.run(read(restored)) == [1, 2, 4]
    assert asyncio.run(read(book)) == [1, 2, 3]


def test_the_outbox_is_part_of_a_backup(tmp_path: Path) -> None:
    book, backup, restored = tmp_path / "book", tmp_path / "backup", tmp_path / "restored"
    book.mkdir()
    with closing(sqlite3.connect(book / "outbox.db")) as outbox:
        outbox.execute("CREATE TABLE message (id INTEGER)")
        outbox.execute("INSERT INTO message VALUES (7)")
        outbox.commit()
    assert back_up(book, FILES, backup, nothing).files.keys() == {"outbox.db"}
    restore(backup, restored, nothing)
    with closing(sqlite3.connect(restored / "outbox.db")) as outbox:
        assert outbox.execute("SELECT id FROM message").fetchall() == [(7,)]


def test_a_missing_book_is_not_backed_up_and_nothing_is_created(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no files of a book"):
        back_up(tmp_path / "nope", FILES, tmp_path / "backup", nothing)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_files_is_neither_backed_up_to_nor_restored_over(tmp_path: Path) -> None:
    book, backup = tmp_path / "book", tmp_path / "backup"
    asyncio.run(append(book, 1))
    with pytest.raises(InvalidInput, match="not empty"):
        back_up(book, FILES, book, nothing)
    back_up(book, FILES, backup, nothing)
    with pytest.raises(InvalidInput, match="not empty"):
        restore(backup, book, nothing)
    assert asyncio.run(read(book)) == [1]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2 + 100] ^= 1
    path.write_bytes(data)


def test_a_damaged_backup_is_not_restored(tmp_path: Path) -> None:
    book, backup, restored = tmp_path / "book", tmp_path / "backup", tmp_path / "restored"
    asyncio.run(append(book, *range(200)))
    back_up(book, FILES, backup, nothing)
    flip(backup / "log.db")
    with pytest.raises(Corrupt, match="cannot be restored"):
        restore(backup, restored, nothing)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["backup", "book"]


def test_a_damaged_book_is_not_backed_up_and_no_file_is_left(tmp_path: Path) -> None:
    book, backup = tmp_path / "book", tmp_path / "backup"
    asyncio.run(append(book, *range(200)))
    flip(book / "log.db")
    with pytest.raises(Corrupt, match="checksum"):
        back_up(book, FILES, backup, nothing)
    assert not backup.exists()


def test_an_incomplete_backup_is_not_restored(tmp_path: Path) -> None:
    book, backup = tmp_path / "book", tmp_path / "backup"
    asyncio.run(append(book, 1))
    back_up(book, FILES, backup, nothing)
    (backup / MANIFEST_FILE).unlink()
    with pytest.raises(NotFound, match="not a complete backup"):
        restore(backup, tmp_path / "restored", nothing)
    assert not (tmp_path / "restored").exists()


def test_a_backup_without_one_of_its_files_is_not_restored(tmp_path: Path) -> None:
    book, backup = tmp_path / "book", tmp_path / "backup"
    asyncio.run(append(book, 1))
    back_up(book, FILES, backup, nothing)
    (backup / "store.db").unlink()
    with pytest.raises(Corrupt, match="missing"):
        restore(backup, tmp_path / "restored", nothing)
    assert not (tmp_path / "restored").exists()
