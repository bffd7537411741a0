"""A remote book passes the conformance suites of journals and tags, through a real server."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

import tidebook
from tests.integration.server.running import not_remote, served_book, served_by_command
from tidebook import Event, Fenced, InvalidInput, LeaseLost, TooLarge, Unavailable
from tidebook.journal.journal import Journal
from tidebook.log.port import Log
from tidebook.queue.entry import Entry
from tidebook.queue.queue import Queue
from tidebook.remote.connection import Connection
from tidebook.remote.journal import RemoteJournal
from tidebook.remote.queue import RemoteQueue
from tidebook.remote.tags import RemoteTags
from tidebook.remote.wal import RemoteRegion, RemoteWal
from tidebook.store.port import StoreWriter
from tidebook.tags.tags import Tags
from tidebook.testing.conformance.journal import BookFactory, JournalContract
from tidebook.testing.conformance.tags import TagsContract
from tidebook.wal.region import Region
from tidebook.wal.wal import Wal
from tidebook.wiring.book import Book
from tidebook.wiring.remote_book import RemoteBook
from tidebook.wiring.settings import Section, Settings


@tidebook.event_type("deposited", version=1)
class Deposited(msgspec.Struct):
    """A typed event."""

    amount: int


class ReplicatedRemoteBook(RemoteBook):
    """A remote book with the log and the store of the served book, with which the suites replicate."""

    def __init__(self, url: str, local: Book) -> None:
        super().__init__(url)
        self._local = local

    @property
    def log(self) -> Log:
        return self._local.log

    @property
    def store(self) -> StoreWriter:
        return self._local.store


def remote_books(folder: Path, sections: Mapping[str, Section] | None = None) -> BookFactory:
    """Return a factory of remote books whose server has a book with these sections open."""

    @asynccontextmanager
    async def open_book(**journal: Any) -> AsyncIterator[Book]:
        async with (
            Book(Settings(folder, {**(sections or {}), "journal": Section(None, dict(journal))})) as local,
            served_book(local) as url,
            ReplicatedRemoteBook(url, local) as book,
        ):
            yield book

    def factory(**journal: Any) -> AbstractAsyncContextManager[Book]:
        return open_book(**journal)

    return factory


class TestRemoteJournal(JournalContract):
    @pytest.fixture
    def book_factory(self, tmp_path: Path) -> BookFactory:
        return remote_books(tmp_path)

    # The server's book has the topic's configuration, and purges expired journals.
    test_a_record_over_the_limit_is_refused_with_size_and_limit = not_remote("a remote book has no configuration")
    test_a_snapshot_over_the_limit_is_refused = not_remote("a remote book has no configuration")
    test_a_topic_keeps_the_configuration_it_was_created_with = not_remote("a remote book has no configuration")
    test_an_expiry_purges_the_journal_that_was_found_expired = not_remote("the server purges expired journals")
    test_a_fresh_append_wins_over_an_expiry = not_remote("the server purges expired journals")
    test_a_new_incarnation_of_the_same_size_wins_over_the_expiry_of_the_old = not_remote("the server purges")

    async def test_an_append_over_the_limit_of_the_topic_is_refused(self, tmp_path: Path) -> None:
        async with remote_books(tmp_path)(limit_bytes=20_000) as book:
            journal = book.journal("orders")
            with pytest.raises(TooLarge) as caught:
                await journal.append("a", [Event(b"x" * 20_000)])
            assert caught.value.limit_bytes == 20_000
            assert await journal.pointer("a") is None

    async def test_typed_events_are_appended_and_read(self, tmp_path: Path) -> None:
        async with remote_books(tmp_path)() as book:
            journal = book.journal("accounts", events=[Deposited])
            await journal.append("a", [Deposited(5), Event(Deposited(7), tags={"large"})])
            assert [event.data async for event in journal.read("a")] == [Deposited(5), Deposited(7)]


class TestRemoteTags(TagsContract):
    @pytest.fixture
    def book_factory(self, tmp_path: Path) -> BookFactory:
        return remote_books(tmp_path)

    # Groups, bucket sizes and delayed streams are only read in a process that has opened the store.
    test_a_group_shares_the_journals = not_remote("groups share the store")
    test_a_stream_with_delay_consistency_is_the_same_stream = not_remote("it compares rows of the store")
    test_lost_rows_are_found_with_delay_consistency_however_old_they_are = not_remote("it compares rows of the store")
    test_a_process_that_missed_a_change_of_the_bucket_size_writes_and_reads_as_the_others_do = not_remote(
        "bucket sizes are set where the store is open"
    )
    test_a_stream_crosses_a_change_of_the_bucket_size_and_a_year_without_events = not_remote(
        "bucket sizes are set where the store is open"
    )
    test_a_damaged_tag_is_rebuilt_from_the_journals = not_remote("it counts the journals of a rebuild")
    test_a_rebuild_keeps_deleted_events_if_the_settings_keep_them = not_remote("it compares rows of the store")
    test_an_event_with_more_than_ten_tags_is_in_all_their_streams_and_logs_a_warning = not_remote(
        "the server warns too"
    )

    async def test_a_tag_is_rebuilt_by_the_server(self, book: Book, topic: str, tag: str) -> None:
        await book.journal(topic).append("a", [Event(n, tags={tag}) for n in range(3)])
        await self.settle(book, topic)
        done = await book.tags.rebuild(tag, topics=[topic])
        assert (done.tag, done.written, done.removed) == (tag, 3, 0)


#: Names that only a process with the log, the store or the database has; a remote book refuses them by name.
LOCAL = {"exists", "pinned", "reopen", "replay_pages"}
#: Methods that call only other public methods.
DERIVED = {"read", "tail", "put", "put_in", "list", "worker", "running", "queue", "journal"}
#: Methods that refuse at their first use, because they read `book.log`, `book.store`, a head, or the outbox.
REFUSED_LATER = {"decider", "process", "projection", "relay"}


@pytest.mark.parametrize(
    ("remote", "local"),
    [
        (RemoteJournal, Journal), (RemoteTags, Tags), (RemoteQueue, Queue), (RemoteWal, Wal), (RemoteRegion, Region),
        (RemoteBook, Book),
    ],
)  # fmt: skip
def test_every_public_method_is_a_request_or_is_built_on_one(remote: type, local: type) -> None:
    public = {name for name, value in vars(local).items() if not name.startswith("_") and callable(value)}
    allowed = DERIVED | (LOCAL if remote is RemoteRegion else REFUSED_LATER if remote is RemoteBook else set())
    assert public - set(vars(remote)) <= allowed


async def test_features_of_the_server_alone_are_refused_by_name(tmp_path: Path) -> None:
    async with Book(Settings(tmp_path)) as local, served_book(local) as url, RemoteBook(url) as book:
        orders = book.journal("orders")
        for refused in (
            lambda: orders.head("o-1"), lambda: orders.snapshots("o-1", None),  # type: ignore[arg-type]
            lambda: orders.adopt(), lambda: book.health(), lambda: book.settle(), lambda: book.relay().run(),
            lambda: book.queues.browser("mail"), lambda: book.tags.buckets(),
        ):  # fmt: skip
            with pytest.raises(InvalidInput):
                await refused()


async def test_a_queue_works_through_a_server(tmp_path: Path) -> None:
    async with remote_books(tmp_path)() as book:
        queue = book.queue("mail")
        assert (await queue.status()).waiting == 0
        put = await queue.put_many([Entry(data={"to": n}, key=f"k-{n}", priority=10 + n) for n in range(5)])
        assert (put.inserted, put.merged) == (5, 0)
        assert (await queue.put({"to": 9}, key="k-0")).merged == 1
        assert [view.key for view in await queue.entries()] == [f"k-{n}" for n in range(5)]
        first, *rest = await queue.claim(limit=5, lease=60)
        assert (first.key, first.data, first.priority) == ("k-0", {"to": 9}, 10)
        await queue.heartbeat(first, lease=120)
        assert first.lease_until > rest[0].lease_until
        await queue.done(first)
        with pytest.raises(LeaseLost):
            await queue.done(first)
        assert await queue.fail(rest[0], delay=0, reason="no") == ["waiting"]
        await queue.done(rest[1:])
        async with aclosing(queue.listen()) as due:
            await anext(due)
        [again] = await queue.claim(limit=5)
        assert (again.key, again.timeouts) == ("k-1", 1)
        await queue.done([again])
        assert await book.queues.names() == ["mail"]


async def test_parked_messages_are_retried_and_dropped_through_a_server(tmp_path: Path) -> None:
    async with Book(Settings(tmp_path)) as local, served_book(local) as url, RemoteBook(url) as book:
        await local.journal("orders").append("o-1", [Event("there")])
        engine = create_async_engine(local.outbox.url.replace("sqlite:", "sqlite+aiosqlite:"))
        async with AsyncSession(engine) as session, session.begin():
            await local.outbox.append(session, "orders", "o-1", [Event("refused")], expected=0)
        await engine.dispose()
        assert await local.outbox.relay(once=True) == 0
        [parked] = await book.outbox.parked()
        assert (parked.state, parked.topic) == ("parked", "journal:orders")
        [status] = await book.outbox.status()
        assert (status.topic, status.parked) == ("journal:orders", 1)
        await asyncio.to_thread(_check_blocking_outbox, url, parked.id)
        assert await local.outbox.relay(once=True) == 0
        [parked] = await book.outbox.parked()  # the message was refused again
        assert await book.outbox.parked_drop(parked.topic, parked.id) == 1
        assert await book.outbox.parked() == []


def _check_blocking_outbox(url: str, parked: int) -> None:
    """See the parked message in the blocking book and on the command line, and retry it there."""
    with tidebook.open_sync(url) as book:
        assert [(each.topic, each.parked) for each in book.outbox.status()] == [("journal:orders", 1)]
        assert [each.id for each in book.outbox.parked("journal:orders")] == [parked]
        with pytest.raises(InvalidInput, match="needs the application's database"):
            book.outbox.relay(once=True)
    command = [sys.executable, "-m", "tidebook.cli", "outbox"]
    for arguments, shown in (
        (["status"], {"topic": "journal:orders", "parked": 1}),
        (["parked", "list"], {"id": parked, "state": "parked"}),
        (["parked", "retry", "journal:orders", "--all"], {"retried": 1}),
    ):
        words = [*command, *arguments, "--json", "--book", url]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        assert shown.items() <= json.loads(done.stdout).items()


async def test_a_write_ahead_log_works_through_a_server(tmp_path: Path) -> None:
    async with remote_books(tmp_path)() as book:
        wal = book.wal("metrics")
        region = await wal.open_region(7, create=True)
        assert (await region.write(1, [b"a", b"b"])).last == 2
        await region.write_many([(1, [b"c"]), (2, ["text", {"n": 1}])])
        assert [(x.table, x.seq, x.payload) async for x in region.read()] == [
            (1, 1, b"a"), (1, 2, b"b"), (1, 3, b"c"), (2, 1, "text"), (2, 2, {"n": 1}),
        ]  # fmt: skip
        await region.mark_deleted(1, 3)
        assert [x.seq async for x in region.read_table(1)] == [3]
        await region.refresh()
        assert region.meta.tables[1].next_seq_num == 4
        seen: list[tuple[int, int]] = []
        entries: list[int] = []
        replayed = await region.replay(
            {1: lambda entry: entries.append(entry.seq)}, progress=lambda *at: seen.append(at)
        )
        assert (replayed, entries) == ({1: 1}, [3])
        assert seen[-1][0] == seen[-1][1] > 0
        with pytest.raises(InvalidInput, match="has no pinned"):
            region.pinned()
        other = await wal.open_region(7)
        with pytest.raises(Fenced):
            await region.write(1, [b"late"])
        assert (await other.write(1, [b"d"])).first == 4
        assert await wal.regions() == [7]


async def test_the_client_continues_when_the_server_restarts(tmp_path: Path) -> None:
    async with Book(Settings(tmp_path)) as local, AsyncExitStack() as stack:
        async with served_book(local) as url:
            book = await stack.enter_async_context(RemoteBook(url))
            assert await book.topics() == []
        port = int(url.rpartition(":")[2])
        appending = asyncio.create_task(book.journal("orders").append("o-1", [Event(1)]))
        reading = asyncio.create_task(book.topics())
        async with served_book(local, port=port):
            assert (await appending).first == 1
            await reading
            assert [event.payload async for event in book.journal("orders").read("o-1")] == [1]


async def test_a_book_with_an_open_region_is_closed_without_its_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(Connection.__init__.__kwdefaults__, "retry_s", 0.2)  # type: ignore[arg-type]
    async with Book(Settings(tmp_path)) as local, AsyncExitStack() as stack:
        async with served_book(local) as url:
            book = await stack.enter_async_context(RemoteBook(url))
            for number in range(2):
                await book.wal("metrics").open_region(number, create=True)
        await stack.aclose()
        with pytest.raises(InvalidInput, match="not open"):
            await book.topics()


async def test_a_missing_server_is_unavailable(tmp_path: Path) -> None:
    async with Book(Settings(tmp_path)) as local, served_book(local) as url:
        pass
    async with RemoteBook(url) as book:
        with pytest.raises(Unavailable, match="does not answer"):
            await book.topics()


def test_a_remote_book_works_without_await_and_on_the_command_line(tmp_path: Path) -> None:
    with served_by_command("--book", str(tmp_path / "book")) as (url, _):
        with tidebook.open_sync(url) as book:
            book.journal("orders").append("o-1", [Event({"total": 3})])
            assert [event.payload for event in book.journal("orders").read("o-1")] == [{"total": 3}]
        command = [sys.executable, "-m", "tidebook.cli", "journal", "read", "orders", "o-1", "--json", "--book", url]
        found = subprocess.run(command, capture_output=True, text=True, check=True)
        assert json.loads(found.stdout)["payload"] == {"total": 3}
