"""The blocking classes have the same names and arguments as the async ones."""

from __future__ import annotations

import gc
import inspect
from typing import Any

import pytest

import tidebook
from tidebook.core.errors import InvalidInput
from tidebook.journal.journal import Journal
from tidebook.journal.sync import SyncJournal
from tidebook.outbox.log_topic import LogTopic, SyncLogTopic
from tidebook.queue.queue import Queue
from tidebook.queue.queues import Queues
from tidebook.queue.sync import SyncQueue, SyncQueues
from tidebook.runtime.blocking_facade import forwarded
from tidebook.tags.subscription import Subscription
from tidebook.tags.sync import SyncSubscription, SyncTags
from tidebook.tags.tags import Tags
from tidebook.wal.region import Region
from tidebook.wal.sync import SyncRegion, SyncWal
from tidebook.wal.wal import Wal
from tidebook.wiring.book import Book
from tidebook.wiring.feed import Feed, SyncFeed
from tidebook.wiring.sync import SyncBook

PAIRS: list[tuple[type, type]] = [
    (Book, SyncBook),
    (Feed, SyncFeed),
    (Journal, SyncJournal),
    (LogTopic, SyncLogTopic),
    (Queue, SyncQueue),
    (Queues, SyncQueues),
    (Region, SyncRegion),
    (Subscription, SyncSubscription),
    (Tags, SyncTags),
    (Wal, SyncWal),
]
#: The names that only an async class has, by class, with the reason.
ONLY_ASYNC: dict[str, set[str]] = {
    # The book closes it; the pipeline purges; the domain layer decodes rows and reads snapshots.
    "Journal": {"close", "purge_expired", "read_decoded", "snapshots", "tail_decoded"},
    "Queue": {"close"},
    "Queues": {"browser", "close", "queue"},  # the console browses; `SyncBook.queue` makes them
    "Region": {"exists", "open", "reopen", "replay_pages", "topic_id"},  # used by `Wal`, by the replay and by jobs
    "Wal": {"close"},
}


def public(type_: type) -> dict[str, Any]:
    own = {name: each for name, each in inspect.getmembers_static(type_) if not name.startswith("_")}
    return {name: each for name, each in own.items() if callable(each) or isinstance(each, property | forwarded)}


@pytest.mark.parametrize(("asynchronous", "blocking"), PAIRS)
def test_a_blocking_class_has_the_names_of_its_async_class(asynchronous: type, blocking: type) -> None:
    only_async = ONLY_ASYNC.get(asynchronous.__name__, set())
    assert public(asynchronous).keys() - only_async == public(blocking).keys()


@pytest.mark.parametrize(("asynchronous", "blocking"), PAIRS)
def test_a_blocking_method_has_the_parameters_of_its_async_method(asynchronous: type, blocking: type) -> None:
    for name, method in public(blocking).items():
        if callable(method):
            wanted = inspect.signature(public(asynchronous)[name]).parameters
            assert inspect.signature(method).parameters == wanted, name
            assert not inspect.iscoroutinefunction(method), name


@pytest.mark.parametrize("blocking", [blocking for _, blocking in PAIRS])
def test_every_blocking_name_has_a_docstring(blocking: type) -> None:
    assert [name for name, each in public(blocking).items() if not each.__doc__] == []


def test_a_blocking_book_is_opened_with_the_same_arguments() -> None:
    assert inspect.signature(tidebook.open).parameters == inspect.signature(tidebook.open_sync).parameters


def test_a_call_on_a_book_that_is_not_open_leaves_no_coroutine(recwarn: pytest.WarningsRecorder) -> None:
    book = tidebook.open_sync("unused")
    with pytest.raises(InvalidInput, match="not open"):
        book.topics()
    gc.collect()
    assert [str(each.message) for each in recwarn] == []
