"""The options of `format("tidebook")`, and warnings about unreplicated events, without a Spark session."""

from __future__ import annotations

import json
import logging
import traceback
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("pyspark")

from tests.pipeline.workloads import replicate_here
from tidebook.core.errors import InvalidInput, NotFound, Unavailable
from tidebook.core.event import Event
from tidebook.core.key import partition_of
from tidebook.pipeline.source import journal_stream
from tidebook.pipeline.source.format import TidebookSource
from tidebook.pipeline.source.journal_stream import JournalStream
from tidebook.pipeline.source.journals import JournalsReader
from tidebook.pipeline.source.options import Options, Selection
from tidebook.pipeline.source.regions import RegionsReader
from tidebook.pipeline.worker import SparkWorker
from tidebook.runtime.blocking_portal import BlockingPortal
from tidebook.wiring.book import Book

LOGGER = "tidebook.pipeline"


@pytest.fixture
def book(book: Book, portal: BlockingPortal) -> Book:
    """Return a book with ten replicated events of `a` in the topic orders."""
    portal.run(book.journal("orders").append("a", [Event({"step": i}) for i in range(10)]))
    portal.run(replicate_here(book, book.store, "orders"))
    return book


def numbers(book: Book, **options: str) -> list[int]:
    """Read a table in this process; return the numbers of its events."""
    reader = JournalsReader({"book": str(book.settings.folder), "topic": "orders", **options})
    batches = [batch for part in reader.partitions() for batch in reader.read(part)]
    return sorted(number for batch in batches for number in batch.column("seq_nr").to_pylist())


def test_options_name_topics_ids_a_tag_and_bounds() -> None:
    given = {"topic": "a, b", "id": "x", "TAG": "paid", "minseqnr": "2", "maxTimestamp": "2026-01-01T00:00:00+00:00"}
    assert Options(given).selection() == Selection(
        topics=frozenset({"a", "b"}), ids=frozenset({"x"}), tag="paid", seq_nr_from=2, time_to_ms=1_767_225_600_000
    )


def test_options_select_events_instead_of_filters(book: Book) -> None:
    assert numbers(book) == list(range(1, 11))
    assert numbers(book, minSeqNr="4", maxSeqNr="5") == [4, 5]
    assert numbers(book, id="a", minSeqNr="9") == [9, 10]
    assert numbers(book, id="b") == []
    assert numbers(book, maxTimestamp="2001-01-01T00:00:00Z") == []
    assert numbers(book, minTimestamp="2001-01-01T00:00:00Z", splits="1") == list(range(1, 11))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topics": "orders"}, "the option topics is unknown: did you mean topic?"),
        ({"path": "/somewhere"}, "the option path is unknown: the options are asOfOffsets, asOfTimestamp, book, "),
        ({"topic": " , "}, "the option topic must have at least one name"),
        ({"minSeqNr": "many"}, "the option minSeqNr must be a whole number of at least 1, not 'many'"),
        ({"minTimestamp": "2026-01-01"}, "the option minTimestamp must be a time with a zone"),
        ({"wal": "metrics", "topic": "orders"}, "the option topic is unknown"),
        ({"freshness": "now"}, "the option freshness must be one of log, store, not 'now'"),
        ({"payload": "text"}, "the option payload must be one of binary, json, variant, not 'text'"),
        ({"asOfTimestamp": "yesterday"}, "the option asOfTimestamp must be a time with a zone"),
        ({"asOfOffsets": '{"orders": {"0": -2}}'}, "the option asOfOffsets must be JSON such as"),
        ({"splits": "few"}, "the option splits must be a whole number from 1 to 10000, not 'few'"),
        ({"splits": "1000000000"}, "the option splits must be a whole number from 1 to 10000"),
        ({"minSeqNr": "9" * 5000}, "the option minSeqNr must be a whole number of at least 1, not '9999"),
        ({"tag": ""}, "the option tag is empty: name a tag"),
        ({"book": ""}, "the name of the book is empty"),
        ({"endingOffsets": '{"orders": {"0": 1, "00": 2}}'}, "the option endingOffsets must be JSON such as"),
        ({"asOfOffsets": '{"orders": {"epoch": -1, "0": -1}}'}, "the option asOfOffsets must be JSON such as"),
        ({"endingOffsets": '{"orders": {"epoch": 0, "0": 1}}'}, "the option endingOffsets must be JSON such as"),
        ({"endingOffsets": '{"orders": {"\u0663": 1}}'}, "the option endingOffsets must be JSON such as"),
        ({"asOfOffsets": f'{{"orders": {{"0": {10**30}}}}}'}, "the option asOfOffsets must be JSON such as"),
        ({"asOfOffsets": "[" * 100_000}, "the option asOfOffsets must be JSON such as"),
    ],
)
def test_a_wrong_option_is_refused_in_one_line_when_the_table_is_loaded(
    tmp_path: Path, options: dict[str, str], message: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        TidebookSource({"book": str(tmp_path), **options})
    assert str(caught.value).splitlines()[0].find(message) >= 0
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "options", [{"splits": "0"}, {"splits": "x"}, {"startingOffsets": "5"}, {"endingOffsets": '{"orders": {"x": 1}}'}]
)
def test_a_wrong_value_of_a_table_is_refused(book: Book, options: dict[str, str]) -> None:
    with pytest.raises(InvalidInput, match=f"the option {next(iter(options))} must be"):
        numbers(book, **options)


@pytest.mark.parametrize("name", ["startingOffsets", "endingOffsets", "asOfOffsets"])
def test_offsets_of_a_topic_or_a_partition_that_is_not_read_are_refused(book: Book, name: str) -> None:
    """They would be ignored, and the table would not have the rows that the caller expects."""
    everywhere = {str(number): 0 for number in range(4)}
    others = {"asOfOffsets": {"orders": dict.fromkeys(everywhere, -1)}}.get(name, {})
    with pytest.raises(InvalidInput, match=f"the option {name} names the topic oders, which is not read"):
        numbers(book, **{name: json.dumps({**others, "oders": everywhere})})
    with pytest.raises(InvalidInput, match=f"the option {name} names partition 4 of topic orders: it has 0 to 3"):
        numbers(book, **{name: json.dumps({"orders": {**others.get("orders", everywhere), "4": 0}})})


@pytest.mark.parametrize("name", ["startingOffsets", "endingOffsets"])
def test_offsets_of_an_epoch_that_has_not_begun_are_refused(book: Book, name: str) -> None:
    with pytest.raises(InvalidInput, match=f"the option {name} names epoch 2 of topic orders, which is in epoch 1"):
        numbers(book, **{name: '{"orders": {"epoch": 2, "0": 1}}'})


@pytest.mark.parametrize("freshness", ["log", "store"])
@pytest.mark.parametrize("recreated", [False, True])
def test_reading_a_topic_that_is_deleted_meanwhile_fails_instead_of_returning_a_part(
    book: Book, portal: BlockingPortal, freshness: str, recreated: bool
) -> None:
    folder = str(book.settings.folder)
    reader = JournalsReader({"book": folder, "topic": "orders", "freshness": freshness, "splits": "2"})
    first, *others = reader.partitions()
    list(reader.read(first))
    portal.run(book.delete_topic("orders"))
    if recreated:
        portal.run(book.journal("orders").append("a", [Event({"step": -1})]))
        portal.run(replicate_here(book, book.store, "orders"))
    with pytest.raises(NotFound, match="topic orders: it was deleted while it was read"):
        list(chain.from_iterable(reader.read(part) for part in others))


def test_a_table_as_of_a_position_has_no_events_that_were_deleted_or_purged_later(
    book: Book, portal: BlockingPortal
) -> None:
    config = portal.run(book.journal("orders").create())
    ends = {str(number): portal.run(book.log.end("orders", number)) - 1 for number in range(config.partitions)}
    as_of = {"asOfOffsets": json.dumps({"orders": ends})}
    portal.run(book.journal("orders").append("a", [Event({"step": 10})]))
    portal.run(book.journal("orders").delete("a", to=4))
    assert numbers(book, **as_of) == list(range(5, 11))
    portal.run(replicate_here(book, book.store, "orders"))
    assert numbers(book, **as_of) == numbers(book, **as_of, freshness="store") == list(range(5, 11))
    portal.run(book.journal("orders").purge("a"))
    portal.run(book.journal("orders").append("a", [Event({"step": 11})]))
    assert numbers(book, **as_of) == []
    assert numbers(book) == [1]
    portal.run(replicate_here(book, book.store, "orders"))
    assert numbers(book, **as_of) == numbers(book, **as_of, freshness="store") == []


def test_a_stream_refuses_freshness_because_it_has_only_replicated_events(book: Book) -> None:
    with pytest.raises(InvalidInput, match="freshness is for tables: a stream delivers events once they are replic"):
        stream(book, freshness="log")


def test_a_missing_book_is_an_error_and_nothing_is_created(tmp_path: Path) -> None:
    for options in ({}, {"wal": "metrics"}):
        with pytest.raises(NotFound, match="there is no book in"):
            TidebookSource({"book": str(tmp_path / "nope"), **options})
    with pytest.raises(InvalidInput, match="there is no such settings file"):
        TidebookSource({"book": str(tmp_path / "nope.toml")})
    assert list(tmp_path.iterdir()) == []


def test_a_write_ahead_log_that_does_not_exist_is_an_error_and_an_empty_one_has_no_rows(
    book: Book, portal: BlockingPortal
) -> None:
    def rows(namespace: str) -> list[int]:
        reader = RegionsReader({"book": str(book.settings.folder), "wal": namespace})
        return [batch.num_rows for part in reader.partitions() for batch in reader.read(part)]

    portal.run(book.wal("metrics").open_region(7, create=True))
    topics = portal.run(book.log.topics())
    assert rows("metrics") == []
    with pytest.raises(NotFound, match="there is no write-ahead log metric: "):
        rows("metric")
    assert portal.run(book.log.topics()) == topics


def test_an_unknown_topic_is_an_error(book: Book) -> None:
    with pytest.raises(NotFound, match="topic nobody is not in the store, which has orders") as caught:
        numbers(book, topic="orders,nobody")
    assert len(traceback.format_exception_only(caught.value)) == 1
    with pytest.raises(NotFound, match="topic nobody"):
        stream(book, topic="nobody").initialOffset()


def stream(book: Book, **options: str) -> JournalStream:
    return JournalStream({"book": str(book.settings.folder), "topic": "orders", **options})


@pytest.mark.parametrize("starts", ['{"orders": {"0": 0}}', '{"orders": {}}', '{"others": {"0": 0}}'])
def test_starting_offsets_of_a_stream_name_every_partition(book: Book, starts: str) -> None:
    """A partition without a starting offset would never be read."""
    with pytest.raises(InvalidInput, match="startingOffsets"):
        stream(book, startingOffsets=starts).initialOffset()


def test_a_read_warns_of_events_that_are_not_replicated(
    book: Book, portal: BlockingPortal, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, LOGGER):
        assert len(numbers(book, freshness="store")) == 10
        assert caplog.messages == []
        for step in range(3):
            portal.run(book.journal("orders").append("a", [Event({"step": step})]))
        assert len(numbers(book)) == 13
        assert caplog.messages == []
        assert len(numbers(book, freshness="store")) == 10
        stream(book).prepareForTriggerAvailableNow()
    assert len(caplog.messages) == 2
    for message in caplog.messages:
        assert message.startswith("topic orders: 3 records of the log are not in the store yet, the oldest for ")


def test_a_running_stream_warns_while_nothing_replicates(
    book: Book, portal: BlockingPortal, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [100.0]
    monkeypatch.setattr(journal_stream, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    reader = stream(book)
    at = reader.initialOffset()

    def triggered(after_s: float) -> int:
        """Advance the time, let a trigger look for new offsets, and return the number of warnings so far."""
        now_s[0] += after_s
        reader.latestOffset(at, reader.getDefaultReadLimit())
        return len(caplog.messages)

    with caplog.at_level(logging.WARNING, LOGGER):
        assert [triggered(1) for _ in range(20)] == [0] * 20  # everything is replicated
        portal.run(book.journal("orders").append("a", [Event({"step": 10})]))
        assert max(triggered(1) for _ in range(6)) == 1
        assert caplog.messages[0].startswith("topic orders: 1 records of the log are not in the store yet")
        assert [triggered(10) for _ in range(5)] == [1] * 5
        assert triggered(10) == 2  # a minute later
        portal.run(replicate_here(book, book.store, "orders"))
        assert [triggered(10) for _ in range(9)] == [2] * 9


def test_marks_and_unselected_records_are_not_lag(
    book: Book, portal: BlockingPortal, caplog: pytest.LogCaptureFixture
) -> None:
    async def read() -> None:
        async for _ in book.journal("orders").read("a"):
            pass

    with caplog.at_level(logging.WARNING, LOGGER):
        portal.run(read())  # its barrier is a mark
        numbers(book, freshness="store")
        partitions = portal.run(book.journal("orders").topic_config()).partitions
        portal.run(book.journal("orders").append("a", [Event({"step": 1})]))
        home = partition_of("a", partitions)
        other = next(id for id in map(str, range(100)) if partition_of(id, partitions) != home)
        numbers(book, freshness="store", id=other)
        replicated = portal.run(book.store.pointers("orders"))[home].position.offset + 1
        numbers(book, freshness="store", endingOffsets=json.dumps({"orders": {home: replicated}}))
    assert caplog.messages == []


def test_an_unavailable_log_does_not_fail_a_read_of_the_store(
    book: Book, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unavailable(self: SparkWorker) -> None:
        raise Unavailable("the broker does not answer")

    monkeypatch.setattr(SparkWorker, "log", unavailable)
    with caplog.at_level(logging.WARNING, LOGGER):
        assert len(numbers(book, freshness="store")) == 10
    assert caplog.messages == [
        "topic orders: this read returns what the store holds; the log's end is unknown: the broker does not answer"
    ]
    with pytest.raises(Unavailable, match=r'does not answer; or read what is replicated, with .option\("freshness"'):
        numbers(book)
