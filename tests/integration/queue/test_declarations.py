"""Declared fields are checked on put, and a changed declaration begins a new partition."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest

import tidebook
import tidebook.queue
from tidebook.cli.app import main
from tidebook.core.errors import InvalidInput, Unavailable
from tidebook.queue import Entry
from tidebook.queue.postgres.partitions import Partitions
from tidebook.queue.postgres.store import PostgresQueues
from tidebook.queue.queue import Queue
from tidebook.testing.conformance.queue_base import QueueTester, new_queue


@dataclass
class Mail:
    to: str


@dataclass
class Letter:
    to: str
    stamps: int


class Parcel(msgspec.Struct):
    to: str


XML = '<table name="mail" type="journal"><column name="to" type="text"/></table>'
TOML = '[fields]\nto = "text"\n'
#: Nine lines whose expansion would take gigabytes.
BOMB = (
    "<!DOCTYPE t [<!ENTITY a0 'ha'>"
    + "".join(f"<!ENTITY a{n} '{f'&a{n - 1};' * 10}'>" for n in range(1, 10))
    + "]><table><column name='&a9;'/></table>"
)


@pytest.fixture(params=["dataclass", "struct", "toml", "xml", "mapping"])
def declared(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Return one declaration in each of its forms."""
    (tmp_path / "fields.toml").write_text(TOML)
    (tmp_path / "fields.xml").write_text(XML)
    files = {"toml": tmp_path / "fields.toml", "xml": str(tmp_path / "fields.xml")}
    return {"dataclass": Mail, "struct": Parcel, "mapping": {"to": "text"}, **files}[request.param]


@pytest.mark.postgres
async def test_every_form_of_put_checks_the_declaration(book: tidebook.Book, declared: Any) -> None:
    queue = book.queue("mail", fields=declared)
    for wrong in ({"to": 3}, {}, "x", None):
        with pytest.raises(InvalidInput, match="declared"):
            await queue.put(wrong)
        with pytest.raises(InvalidInput, match="declared"):
            await queue.put_many([{"to": "right"}, Entry(data=wrong)])
        with pytest.raises(InvalidInput, match="declared"):
            await queue.put_once([wrong], source="s", steps=[])
    assert (await queue.status()).waiting == 0
    await queue.put({"to": "x"})
    (job,) = await queue.claim()
    assert msgspec.to_builtins(job.data) == {"to": "x"}


@pytest.mark.postgres
async def test_an_edited_dead_letter_is_checked(book: tidebook.Book) -> None:
    queue: Queue[Any] = book.queue("mail", fields=Mail, settings=tidebook.queue.QueueSettings(max_timeouts=0))
    await queue.put(Mail("x"))
    await queue.fail(await queue.claim())
    (letter,) = await queue.dead_letters()
    with pytest.raises(InvalidInput, match="declared"):
        await queue.edit(letter.id, {"to": 3})
    await queue.edit(letter.id, {"to": "y"})
    await queue.retry(letter.id)
    assert [job.data for job in await queue.claim()] == [Mail("y")]


def test_an_entity_bomb_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "bomb.xml").write_text(BOMB)
    with tidebook.open_sync(tmp_path / "data") as book, pytest.raises(InvalidInput, match="must not contain"):
        book.queue("mail", fields=tmp_path / "bomb.xml")


def test_fields_may_be_declared_in_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tidebook.toml"
    file.write_text('[queue.mail]\nmax_timeouts = 3\n[queue.mail.fields]\nto = "text"\nretries = "integer?"\n')
    monkeypatch.setattr(sys, "argv", ["tidebook", "queue", "put", "mail", '{"to": 3}', "--book", str(file)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "declared" in capsys.readouterr().err


@pytest.mark.postgres
async def test_a_return_to_an_earlier_declaration_begins_no_partition(where: Path) -> None:
    """In a rolling upgrade old and new processes start in any order."""
    for declared in (Mail, Letter, Mail, Letter, Mail):
        async with tidebook.open(where) as book:
            queue = await book.queue("mail", fields=declared).open()
            await queue.put({"to": "x", "stamps": 1} if declared is Letter else {"to": "x"})
            assert (await queue.status()).tables <= 2


@pytest.mark.postgres
async def test_entries_of_two_declarations_are_claimed_in_one_order(where: Path) -> None:
    async with tidebook.open(where) as book:
        queue = book.queue("mail", fields=Mail)
        for priority in (30, 10):
            await queue.put(Mail(f"old {priority}"), priority=priority)
    async with tidebook.open(where) as book:
        letters = book.queue("mail", fields=Letter)
        for priority in (40, 20):
            await letters.put(Letter(f"new {priority}", 1), priority=priority)
        jobs = await letters.claim(10)
        assert [job.priority for job in jobs] == [10, 20, 30, 40]
        await letters.done(jobs)


@pytest.mark.postgres
async def test_data_is_checked_on_put_and_returned_as_declared(book: tidebook.Book) -> None:
    queue: Queue[Any] = book.queue("mail", fields=Mail)
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
async def test_a_changed_declaration_begins_a_new_partition(
    settings_file: Path, postgres_url: str, schema: str
) -> None:
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


@pytest.mark.postgres
async def test_a_declaration_that_failed_to_begin_its_partition_begins_it_when_repeated(
    store: PostgresQueues, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = await store.declare(await new_queue(store), b"old")
    await QueueTester(store, ref).put("a")

    async def busy(*_: object) -> None:
        raise Unavailable("open transactions keep its table busy")

    with monkeypatch.context() as patch:
        patch.setattr(Partitions, "begin", busy)
        with pytest.raises(Unavailable):
            await store.declare(ref, b"new")
    changed = await store.declare(ref, b"new")
    assert (changed.format, (await store.counts(ref)).tables) == (2, 2)
