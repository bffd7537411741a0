"""`tidebook import deimos` on tables as Deimos creates them, in a real PostgreSQL."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
import pytest

import tidebook
from tests.integration.importing.command import run_command
from tests.integration.outbox.databases import Database
from tidebook.core.errors import Fenced, InvalidInput, Unavailable
from tidebook.importing.deimos_tables import open_deimos_tables
from tidebook.importing.message_import import MessageImport, TopicResult
from tidebook.importing.message_target import OutboxTarget, QueueTarget
from tidebook.wiring.book import Book
from tidebook.wiring.server_checks import check_servers
from tidebook.wiring.settings import read_settings

pytestmark = pytest.mark.postgres


def insert(database: Database, topic: str, *messages: tuple[bytes | None, bytes | None, str | None]) -> None:
    with psycopg.connect(database.url) as connection, connection.cursor() as cursor:
        cursor.executemany(
            "INSERT INTO kafka_messages (topic, message, key, partition_key) VALUES (%s, %s, %s, %s)",
            [(topic, *message) for message in messages],
        )


async def copy(database: Database, book: Book, queue: str | None = None, **options: Any) -> list[TopicResult]:
    target = OutboxTarget(book.outbox.blocking) if queue is None else QueueTarget(book.queue(queue))
    try:
        async with open_deimos_tables(database.url) as tables:
            return await MessageImport(tables, target, **options).run(lambda topic, copied: None)
    finally:
        await target.close()


async def relayed(book: Book, topic: str) -> list[tuple[bytes | None, bytes | None]]:
    await book.outbox.relay(once=True)
    return sorted([(each.key, each.payload) async for each in book.log_topic(topic).read()], key=repr)


async def test_waiting_messages_reach_the_log_through_the_outbox(deimos: Database, tmp_path: Path) -> None:
    insert(deimos, "orders", (b"one", b"k", "k"), (b"\x00\xff", b"k", "p"), (None, b"k", None), (b"four", None, None))
    insert(deimos, "mails", (b"hello", None, None))
    async with tidebook.open(tmp_path / "book") as book:
        results = await copy(deimos, book)
        assert [(each.topic, each.messages, each.copied, each.problem) for each in results] == [
            ("mails", 1, 1, None),
            ("orders", 4, 4, None),
        ]
        assert await relayed(book, "orders") == sorted(
            [(b"k", b"one"), (b"k", b"\x00\xff"), (b"k", None), (None, b"four")], key=repr
        )
    assert deimos.waiting() == 5  # the source is only read


@pytest.mark.parametrize("queue", [None, "mail"])
async def test_a_repeated_import_copies_only_new_messages(deimos: Database, tmp_path: Path, queue: str | None) -> None:
    insert(deimos, "orders", *[(b"%d" % number, None, None) for number in range(1_200)])
    async with tidebook.open(tmp_path / "book") as book:
        first, again = await copy(deimos, book, queue), await copy(deimos, book, queue)
        insert(deimos, "orders", (b"new", None, None))
        more = await copy(deimos, book, queue)
    assert [result.copied for results in (first, again, more) for result in results] == [1_200, 0, 1]


async def test_a_queue_gets_each_message_as_an_entry(deimos: Database, tmp_path: Path) -> None:
    insert(deimos, "mails", (b'{"to": "x"}', b"k", None), (b"\xff", None, "p"))
    async with tidebook.open(tmp_path / "book") as book:
        await copy(deimos, book, "mail")
        jobs = await book.queue("mail").claim(limit=10, lease=timedelta(minutes=1))
    assert sorted((job.data for job in jobs), key=repr) == sorted(
        [
            {"topic": "mails", "key": "k", "payload": '{"to": "x"}', "partition_key": None},
            {"topic": "mails", "key": None, "payload": {"base64": "/w=="}, "partition_key": "p"},
        ],
        key=repr,
    )


@pytest.mark.parametrize("queue", [None, "mail"])
async def test_one_of_two_concurrent_imports_is_fenced(deimos: Database, tmp_path: Path, queue: str | None) -> None:
    insert(deimos, "orders", *[(b"%d" % number, None, None) for number in range(50)])
    async with tidebook.open(tmp_path / "book") as book:
        target = OutboxTarget(book.outbox.blocking) if queue is None else QueueTarget(book.queue(queue))
        async with open_deimos_tables(deimos.url) as tables:
            mark = await target.mark(tables.source, "orders")
            messages = await tables.messages("orders", 0)
            after = await target.take(tables.source, "orders", mark, messages)
            with pytest.raises(Fenced):
                await target.take(tables.source, "orders", mark, messages)
            assert await target.mark(tables.source, "orders") == after
            insert(deimos, "orders", (b"new", None, None))
            newer = await tables.messages("orders", after.last_id)
            await target.take(tables.source, "orders", after, newer)
            with pytest.raises(Fenced):
                await target.take(tables.source, "orders", after, newer)
        await target.close()


async def test_a_running_executor_stops_the_import(deimos: Database, tmp_path: Path) -> None:
    insert(deimos, "orders", (b"one", None, None))
    deimos.query(
        "INSERT INTO kafka_topic_info (topic, locked_by, locked_at) "
        "VALUES ('orders', 'executor-1', now() AT TIME ZONE 'UTC')"
    )
    async with tidebook.open(tmp_path / "book") as book:
        with pytest.raises(Unavailable, match="executor-1"):
            await copy(deimos, book)
        deimos.query("UPDATE kafka_topic_info SET locked_at = now() AT TIME ZONE 'UTC' - interval '2 minutes'")
        [result] = await copy(deimos, book)
    assert result.copied == 1


async def test_messages_that_vanish_or_commit_late_are_reported(deimos: Database, tmp_path: Path) -> None:
    insert(deimos, "orders", (b"one", None, None), (b"two", None, None))
    async with tidebook.open(tmp_path / "book") as book:
        await copy(deimos, book)
        deimos.query("DELETE FROM kafka_messages WHERE message = 'one'")
        [result] = await copy(deimos, book)
    assert result.problem is not None
    assert "2 messages up to id 2 were copied and the table has 1" in result.problem


async def test_tables_of_the_same_names_in_one_schema_are_refused(deimos: Database, tmp_path: Path) -> None:
    insert(deimos, "orders", (b"one", None, None))
    settings = tmp_path / "tidebook.toml"
    settings.write_text(f'[sql]\nurl = "{deimos.url}"\n')
    async with tidebook.open(settings) as book:
        with pytest.raises(InvalidInput, match="search_path"):
            await copy(deimos, book)
    settings.write_text(f'[sql]\nurl = "{deimos.url}?options={quote("-csearch_path=apart")}"\n')
    async with tidebook.open(settings) as book:
        with pytest.raises(InvalidInput, match="create the schema"):
            await copy(deimos, book)
    deimos.query("CREATE SCHEMA apart")  # not the user's name, which would always be in the search path
    async with tidebook.open(settings) as book:
        [result] = await copy(deimos, book)
        assert result.copied == 1
        assert await relayed(book, "orders") == [(None, b"one")]
    [tables] = deimos.query("SELECT count(*) FROM pg_tables WHERE schemaname = 'apart' AND tablename ~ '^kafka_'")[0]
    assert tables > 1
    checks = {each.check: each.detail async for each in check_servers(read_settings(settings))}
    assert checks["sql permissions"] == "the outbox's tables exist in schema apart"


def lines(text: str) -> Sequence[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


async def test_a_dry_run_of_the_command_only_counts(deimos: Database, tmp_path: Path) -> None:
    insert(deimos, "orders", (b"one", None, None))
    insert(deimos, "not a topic", (b"one", None, None))
    line = ["import", "deimos", "--postgres", deimos.url, "--book", str(tmp_path / "book")]
    dry = await asyncio.to_thread(run_command, *line, "--dry-run")
    assert dry.code == 1
    assert not (tmp_path / "book").exists()
    assert lines(dry.out)[-1] == {"topics": 2, "messages": 2, "copied": 0, "problems": 1, "dry_run": True}
    done = await asyncio.to_thread(run_command, *line, "--topic", "orders")
    assert done.code == 0, done.err
    assert lines(done.out)[-1] == {"topics": 1, "messages": 1, "copied": 1, "problems": 0, "dry_run": False}


async def test_a_database_without_the_tables_is_not_found(postgres_url: str, tmp_path: Path) -> None:
    line = ["import", "deimos", "--postgres", postgres_url, "--book", str(tmp_path / "book")]
    done = await asyncio.to_thread(run_command, *line)
    assert done.code in {2, 4}  # another test may have created Tidebook's own tables there
    assert "kafka_messages" in done.err


async def test_an_import_through_a_server_is_refused(postgres_url: str) -> None:
    line = ["import", "deimos", "--postgres", postgres_url, "--book", "http://127.0.0.1:1"]
    done = await asyncio.to_thread(run_command, *line)
    assert done.code == 2
    assert "not through a server" in done.err


async def test_the_commands_of_the_how_to_page_run(
    deimos: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    insert(deimos, "orders", (b"one", None, None))
    deimos.query("CREATE SCHEMA tidebook")
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[3] / "docs" / "howto" / "moving-from-deimos.md").read_text()
    [settings] = [block for block in page.split("```") if block.startswith("toml\n")]
    address = "postgresql://app@db/app"
    (tmp_path / "tidebook.toml").write_text(settings.removeprefix("toml\n").replace(address, deimos.url))
    copied = []
    for line in page.splitlines():
        if line.strip().startswith("tidebook import"):
            done = await asyncio.to_thread(run_command, *line.replace(address, deimos.url).split()[1:])
            assert done.code == 0, done.err
            copied.append(lines(done.out)[-1]["copied"])
    assert copied == [0, 1]
