"""Declared fields are checked on put, and a changed declaration begins a new table."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest

import tidebook
from tidebook.core.errors import InvalidInput


@dataclass
class Mail:
    to: str


@dataclass
class Letter:
    to: str
    stamps: int


@pytest.mark.postgres
async def test_data_is_checked_on_put_and_comes_back_as_declared(book: tidebook.Book) -> None:
    queue = book.queue("mail", fields=Mail)
    await queue.put(Mail("x"))
    await queue.put({"to": "y"})
    with pytest.raises(InvalidInput, match="declared"):
        await queue.put({"to": 3})
    assert [job.data for job in await queue.claim(5)] == [Mail("x"), Mail("y")]


@pytest.mark.postgres
async def test_entries_of_an_older_declaration_keep_their_format(where: Path) -> None:
    async with tidebook.open(where) as book:
        await book.queue("mail", fields=Mail).put(Mail("old"))
    async with tidebook.open(where) as book:
        queue = book.queue("mail", fields=Letter)
        await queue.put(Letter("new", 2))
        assert [job.data for job in await queue.claim(5)] == [{"to": "old"}, Letter("new", 2)]


@pytest.mark.postgres
async def test_a_changed_declaration_begins_a_new_table(settings_file: Path, postgres_url: str, schema: str) -> None:
    async with tidebook.open(settings_file) as book:
        await book.queue("mail", fields=Mail).put(Mail("old"))
    for declared in (Letter, Letter):
        async with tidebook.open(settings_file) as book:
            await book.queue("mail", fields=declared).put(Letter("new", 2))
    with psycopg.connect(postgres_url) as connection:
        rows = connection.execute(
            f"SELECT slot, format, count(*) FROM {schema}.entry GROUP BY 1, 2 ORDER BY 1"
        ).fetchall()
    assert rows == [(0, 1, 1), (1, 2, 2)]
