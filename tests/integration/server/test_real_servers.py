"""The server on Kafka, Cassandra and PostgreSQL: selected cases of the suites through a remote book, and its queues."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import pytest

from tests.integration.server.running import served_book
from tests.integration.server.test_remote_contract import remote_books
from tidebook import Event, LeaseLost
from tidebook.queue.entry import Entry
from tidebook.testing.conformance.journal import BookFactory, JournalContract
from tidebook.testing.conformance.tags import TagsContract
from tidebook.wiring.book import Book
from tidebook.wiring.remote_book import RemoteBook
from tidebook.wiring.settings import Section, Settings

pytestmark = [pytest.mark.kafka, pytest.mark.cassandra, pytest.mark.postgres]

#: The rest of the suites runs over HTTP on an embedded book, and on the servers without HTTP.
CHOSEN = {
    "test_events_follow_the_last_one",
    "test_any_other_expected_number_is_a_conflict_with_expected_and_found",
    "test_payloads_tags_and_metadata_are_read_unchanged",
    "test_an_append_id_that_is_used_again_gives_the_first_result",
    "test_the_next_incarnation_begins_at_1_without_the_old_events",
    "test_a_read_of_several_pages_is_complete",
    "test_a_tail_yields_existing_events_and_then_new_ones",
    "test_a_snapshot_is_loaded_after_later_appends_and_deletes",
    "test_the_stream_is_the_filter_of_the_journals_in_the_order_of_the_log",
}


def _only_chosen(suite: type) -> None:
    for name in dir(suite):
        if name.startswith("test_") and name not in CHOSEN:
            setattr(suite, name, None)


@pytest.fixture
def sections(kafka_bootstrap: str, cassandra_address: str, postgres_url: str) -> dict[str, Section]:
    """Return the settings of a book on all three servers."""
    return {
        "log": Section(f"kafka://{kafka_bootstrap}"),
        "store": Section(f"cassandra://{cassandra_address}/server_contract"),
        "sql": Section(postgres_url),
    }


@pytest.fixture
def book_factory(tmp_path: Path, sections: dict[str, Section]) -> BookFactory:
    """Return a factory of remote books whose server has the book on the three servers open."""
    return remote_books(tmp_path, sections)


class TestJournalsOnServers(JournalContract):
    @pytest.fixture
    def book_factory(self, book_factory: BookFactory) -> BookFactory:
        return book_factory


class TestTagsOnServers(TagsContract):
    @pytest.fixture
    def book_factory(self, book_factory: BookFactory) -> BookFactory:
        return book_factory


_only_chosen(TestJournalsOnServers)
_only_chosen(TestTagsOnServers)


async def test_a_queue_on_postgres_works_through_a_server(tmp_path: Path, sections: dict[str, Section]) -> None:
    name = f"mail-{uuid4().hex[:8]}"
    async with (
        Book(Settings(tmp_path, sections)) as local,
        served_book(local) as url,
        RemoteBook(url) as book,
    ):
        queue = book.queue(name)
        assert (await queue.put_many([Entry(data=n, key=f"k-{n}") for n in range(3)])).inserted == 3
        first, second, third = await queue.claim(limit=3)
        await queue.heartbeat([second], lease=120)
        await queue.done(first)
        with pytest.raises(LeaseLost):
            await queue.done(first)
        assert await queue.fail(second) == ["waiting"]
        await queue.done(third)
        [again] = await queue.claim()
        assert (again.key, again.timeouts) == (second.key, 1)
        await queue.done(again)
        status = await queue.status()
        assert (status.waiting, status.processing, status.dead) == (0, 0, 0)
        await book.journal("orders").append(name, [Event(1)])
        assert await book.journal("orders").pointer(name) == 1
