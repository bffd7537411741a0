"""When a request reaches its deadline, its work is cancelled, its client gets the outcome, and no state is left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tidebook
from tests.integration.server.running import client, lines, served_book
from tidebook import Book, Event, OutcomeUnknown
from tidebook.journal.journal import Journal
from tidebook.server import deadlines
from tidebook.server.state import ServerState

PATH = "/v1/journals/orders/o-1/events"
APPEND = {"events": [{"payload": 2}]}
#: Enough for a request without a delay, even on a loaded machine; the delayed ones wait for ever.
SHORT = {"request-timeout": "0.5"}


class HeldLog:
    """A log that holds all records until it is released, like one whose disk does not respond."""

    def __init__(self, book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
        self._send = book.log.send
        self._held: list[tuple[Any, ...]] = []
        monkeypatch.setattr(book.log, "send", self._hold)

    def _hold(self, *arguments: Any) -> None:
        self._held.append(arguments)

    def release(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Send the held records, and do not hold later ones."""
        monkeypatch.undo()
        for arguments in self._held:
            self._send(*arguments)


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> list[ServerState]:
    """Collect the states of the servers that a test starts."""
    found: list[ServerState] = []
    monkeypatch.setattr("tidebook.server.serve.ServerState", _recorded(found))
    return found


def _recorded(found: list[ServerState]) -> Callable[..., ServerState]:
    def create(*arguments: Any, **options: Any) -> ServerState:
        found.append(ServerState(*arguments, **options))
        return found[-1]

    return create


def pending_outcomes(book: Book) -> int:
    """Return how many appends of topic `orders` the book still waits for."""
    topic = book.journal("orders")._open
    assert topic is not None
    return sum(len(partition.cache.pending_outcomes) for partition in topic.partitions)


@pytest.mark.parametrize("scanned", [False, True], ids=["by a timer", "by the scan"])
async def test_an_append_that_the_log_does_not_acknowledge_ends_as_unknown(
    tmp_path: Path, states: list[ServerState], scanned: bool
) -> None:
    async with tidebook.open(tmp_path, create=True) as book, served_book(book) as url, client(url) as http:
        await book.journal("orders").append("o-1", [Event(1)])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(deadlines, "SCANNED_S_MIN", 0.1 if scanned else 10.0)
            log = HeldLog(book, patch)
            unknown = await http.post(PATH, json=APPEND, headers=SHORT)
            assert (unknown.status_code, unknown.json()["type"]) == (504, "urn:tidebook:error:outcome-unknown")
            assert "may have happened" in unknown.json()["detail"]
            assert not states[0].deadlines.scanned
            log.release(patch)
        # The append did happen; the client can read the journal to find out.
        assert (await http.post(PATH, json={"events": [{"payload": 3}]})).json()["first"] == 3
        assert [event.payload async for event in book.journal("orders").read("o-1")] == [1, 2, 3]
        assert pending_outcomes(book) == 0


async def test_an_append_that_waits_for_the_head_is_cancelled_and_not_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with tidebook.open(tmp_path, create=True) as book, served_book(book) as url, client(url) as http:
        await book.journal("orders").append("other", [Event(1)])
        cancelled = hold_reads(book, monkeypatch)
        unknown = await http.post(PATH, json=APPEND, headers=SHORT)
        assert unknown.status_code == 504
        await asyncio.wait_for(cancelled.wait(), 20)
        monkeypatch.undo()
        assert await book.journal("orders").pointer("o-1") is None
        assert pending_outcomes(book) == 0


def hold_reads(book: Book, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Make reads of the store's heads wait for ever; return an event that is set when one is cancelled."""
    cancelled = asyncio.Event()

    async def wait(*_: Any, **__: Any) -> Any:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    monkeypatch.setattr(book.log, "read", wait)
    monkeypatch.setattr(book.store, "head", wait)
    return cancelled


async def test_a_read_is_cancelled_and_releases_its_stream(tmp_path: Path, states: list[ServerState]) -> None:
    async with tidebook.open(tmp_path, create=True) as book:
        await book.journal("orders").append("o-1", [Event(1)])
    # Opened again, so that the journal is not in memory.
    async with tidebook.open(tmp_path) as book, served_book(book) as url, client(url) as http:
        with pytest.MonkeyPatch.context() as patch:
            cancelled = hold_reads(book, patch)
            late = await http.get(PATH, headers=SHORT)
            assert (late.status_code, late.json()["type"]) == (503, "urn:tidebook:error:deadline-exceeded")
            assert late.json()["deadline_s"] == 0.5
            await asyncio.wait_for(cancelled.wait(), 20)
            assert states[0].slots.open == 0
        assert [line.get("payload") for line in lines(await http.get(PATH))] == [1, None]


async def test_a_remote_append_that_is_cancelled_is_retried_without_a_duplicate(tmp_path: Path) -> None:
    (tmp_path / "tidebook.toml").write_text('folder = "book"\n[server]\nrequest_s = 1.0\n')
    async with (
        tidebook.open(tmp_path / "tidebook.toml", create=True) as book,
        served_book(book) as url,
        tidebook.open(url) as remote,
    ):
        orders = remote.journal("orders")
        await orders.append("o-1", [Event(1)])
        with pytest.MonkeyPatch.context() as patch:
            log = HeldLog(book, patch)
            with pytest.raises(OutcomeUnknown) as unknown:
                await orders.append("o-1", [Event(2)])
            log.release(patch)
        done = await orders.append("o-1", [Event(2)], retry=unknown.value)
        assert (done.first, done.last) == (2, 2)
        assert [event.payload async for event in orders.read("o-1")] == [1, 2]


async def test_an_incomplete_body_times_out_and_changes_nothing(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path, create=True) as book, served_book(book) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        head = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 100\r\n"
        writer.write(f"{head}request-timeout: 0.2\r\n\r\n{{".encode())
        answer = await asyncio.wait_for(reader.readuntil(b"}"), 30)
        writer.close()
        assert b"HTTP/1.1 503" in answer
        assert b"deadline-exceeded" in answer
        assert b"nothing was done" in answer


async def test_a_purge_ends_at_its_deadline_even_if_the_audit_cannot_be_written(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path, create=True) as book, served_book(book) as url, client(url) as http:
        await book.journal("orders").append("o-1", [Event(1)])
        with pytest.MonkeyPatch.context() as patch:
            log = HeldLog(book, patch)
            unknown = await http.delete(PATH.removesuffix("/events"), headers=SHORT)
            assert (unknown.status_code, unknown.json()["type"]) == (504, "urn:tidebook:error:outcome-unknown")
            log.release(patch)


async def test_a_change_that_fails_unexpectedly_is_audited(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path, create=True) as book:
        async with served_book(book) as url, client(url) as http:
            await book.journal("orders").append("o-1", [Event(1)])
            with pytest.MonkeyPatch.context() as patch:

                async def fail(*_: Any, **__: Any) -> None:
                    raise RuntimeError("after a part of the change")

                patch.setattr(Journal, "purge", fail)
                assert (await http.delete(PATH.removesuffix("/events"))).status_code == 500
        audit = book.journal("tidebook-audit")
        entries = [event.payload async for id in audit.ids() async for event in audit.read(id)]
        assert ("journals.purge", 500) in {(each["action"], each["status"]) for each in entries}


async def test_a_change_of_a_remote_book_that_fails_unexpectedly_is_unknown(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path, create=True) as book, served_book(book) as url, tidebook.open(url) as remote:
        with pytest.MonkeyPatch.context() as patch:
            append = Journal.append

            async def append_and_fail(self: Journal, *arguments: Any, **options: Any) -> None:
                await append(self, *arguments, **options)
                raise RuntimeError("after the change")

            patch.setattr(Journal, "append", append_and_fail)
            with pytest.raises(OutcomeUnknown) as unknown:
                await remote.journal("orders").append("o-1", [Event(1)])
        assert (await remote.journal("orders").append("o-1", [Event(1)], retry=unknown.value)).first == 1
        assert await book.journal("orders").pointer("o-1") == 1
