"""The blocking facade has the names and parameters of the async class, and calls it."""

from __future__ import annotations

import inspect
import threading
from pathlib import Path

import pytest

import tidebook
from tidebook.journal.journal import Journal
from tidebook.journal.sync import SyncJournal

#: Methods that only the pipeline uses, or that the blocking book calls for its journals.
ASYNC_ONLY = {"purge_expired", "close", "read_decoded", "snapshots", "tail_decoded"}


def public(type_: type) -> dict[str, inspect.Signature]:
    members = inspect.getmembers(type_, inspect.isfunction)
    return {name: inspect.signature(member) for name, member in members if not name.startswith("_")}


def test_both_facades_have_the_same_names() -> None:
    assert public(Journal).keys() - ASYNC_ONLY == public(SyncJournal).keys()


@pytest.mark.parametrize("name", sorted(public(SyncJournal)))
def test_both_facades_take_the_same_parameters(name: str) -> None:
    assert public(Journal)[name].parameters == public(SyncJournal)[name].parameters


def test_a_sync_book_needs_no_loop(tmp_path: Path) -> None:
    with tidebook.open_sync(tmp_path) as book:
        orders = book.journal("orders")
        done = orders.append("o-1", [tidebook.Event({"total": 3}), tidebook.Event(b"x")], expected=0)
        assert (done.first, done.last) == (1, 2)
        assert [event.payload for event in orders.read("o-1")] == [{"total": 3}, b"x"]
        assert orders.pointer("o-1") == 2
        with pytest.raises(tidebook.Conflict):
            orders.append("o-1", [tidebook.Event(1)], expected=0)
        assert list(orders.ids()) == ["o-1"]


def test_threads_share_a_sync_book(tmp_path: Path) -> None:
    with tidebook.open_sync(tmp_path) as book:
        orders = book.journal("orders")

        def write(name: int) -> None:
            for i in range(10):
                orders.append("o-1", [tidebook.Event([name, i])])

        threads = [threading.Thread(target=write, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        read = [event.payload for event in orders.read("o-1")]
        assert sorted(read) == [[name, i] for name in range(4) for i in range(10)]
        assert [i for name, i in read if name == 2] == list(range(10))


def test_a_sync_tail_is_woken_and_can_be_stopped(tmp_path: Path) -> None:
    with tidebook.open_sync(tmp_path) as book:
        orders = book.journal("orders")
        got: list[str] = []
        first = threading.Event()

        def follow() -> None:
            for event in orders.tail("o-1"):
                got.append(event.payload)
                first.set()
                if event.payload == "last":
                    return

        follower = threading.Thread(target=follow)
        follower.start()
        orders.append("o-1", [tidebook.Event("first")])
        assert first.wait(60)
        orders.append("o-1", [tidebook.Event("last")])
        follower.join(60)
        assert not follower.is_alive()
        assert got == ["first", "last"]


def test_a_call_of_a_closed_sync_book_reports_it(tmp_path: Path) -> None:
    book = tidebook.open_sync(tmp_path)
    with book:
        pass
    with pytest.raises(tidebook.TidebookError):
        book.journal("orders")


def test_a_call_of_a_journal_of_a_closed_sync_book_reports_it(tmp_path: Path) -> None:
    with tidebook.open_sync(tmp_path) as book:
        orders = book.journal("orders")
        orders.append("o-1", [tidebook.Event(1)])
    with pytest.raises(tidebook.Unavailable, match="closed"):
        orders.append("o-1", [tidebook.Event(2)])
    with pytest.raises(tidebook.Unavailable, match="closed"):
        list(orders.read("o-1"))


def test_a_call_of_a_sync_book_that_was_never_opened_reports_it_and_starts_no_thread(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with pytest.raises(tidebook.InvalidInput, match="open_sync"):
        tidebook.open_sync(tmp_path).journal("orders")
    assert set(threading.enumerate()) <= before  # a thread of an earlier test may be ending, but none has started


def test_any_thread_may_read_when_the_check_of_the_epoch_is_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidebook.journal.topic.CHECK_INTERVAL_S", 0.0)
    with tidebook.open_sync(tmp_path) as book:
        orders = book.journal("orders")
        orders.append("o-1", [tidebook.Event(1)])
        for _ in range(20):  # the check is due again as soon as it is done
            assert [event.payload for event in orders.read("o-1")] == [1]
