"""The blocking classes have the same names and arguments as the async ones."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import tidebook
from tidebook.journal.journal import Journal
from tidebook.journal.sync import SyncJournal
from tidebook.outbox.log_topic import LogTopic, SyncLogTopic
from tidebook.queue.queue import Queue
from tidebook.queue.queues import Queues
from tidebook.queue.sync import SyncQueue, SyncQueues
from tidebook.tags.subscription import Subscription
from tidebook.tags.sync import SyncSubscription, SyncTags
from tidebook.tags.tags import Tags
from tidebook.wal.sync import SyncWal
from tidebook.wal.wal import Wal
from tidebook.wiring.book import Book
from tidebook.wiring.sync import SyncBook

PAIRS: list[tuple[type, type]] = [
    (Book, SyncBook),
    (Journal, SyncJournal),
    (LogTopic, SyncLogTopic),
    (Queue, SyncQueue),
    (Queues, SyncQueues),
    (Subscription, SyncSubscription),
    (Tags, SyncTags),
    (Wal, SyncWal),
]
#: The names that only an async class has, by class, with the reason.
ONLY_ASYNC: dict[str, set[str]] = {
    "Journal": {"close", "purge_expired"},  # the book closes it; the pipeline purges
    "Queue": {"close"},
    "Queues": {"close", "queue"},  # `SyncBook.queue` makes them
    "Wal": {"close"},
}


def public(type_: type) -> dict[str, Any]:
    own = {name: each for name, each in inspect.getmembers_static(type_) if not name.startswith("_")}
    return {name: each for name, each in own.items() if callable(each) or isinstance(each, property)}


@pytest.mark.parametrize(("asynchronous", "blocking"), PAIRS)
def test_a_blocking_class_has_every_name_of_its_async_class(asynchronous: type, blocking: type) -> None:
    missing = public(asynchronous).keys() - public(blocking).keys() - ONLY_ASYNC.get(asynchronous.__name__, set())
    assert not missing


def test_a_blocking_book_takes_the_same_arguments() -> None:
    for name, method in public(Book).items():
        if not isinstance(method, property):
            wanted = list(inspect.signature(method).parameters)
            assert list(inspect.signature(public(SyncBook)[name]).parameters) == wanted, name
    assert inspect.signature(tidebook.open).parameters == inspect.signature(tidebook.open_sync).parameters
