"""Replication from the log to the store on a local Spark: embedded, and from Kafka to Cassandra."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from tests.pipeline.conftest import OpenBook
from tests.pipeline.workloads import (
    expected_rows,
    newer_record,
    rows_of,
    write_garbage,
    write_history,
)
from tidebook.core.errors import LogLost
from tidebook.core.event import Event
from tidebook.core.key import partition_of
from tidebook.pipeline.session import PipelineSettings
from tidebook.runtime.blocking_portal import BlockingPortal
from tidebook.wiring.book import Book

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]


@pytest.fixture
def fresh(open_book: OpenBook) -> Book:
    return open_book("fresh")


def replication(spark: SparkSession, book: Book, portal: BlockingPortal, *topics: str, **more: Any) -> Any:
    from tidebook.pipeline.jobs.replicate import Replication

    return Replication(spark, book, portal, topics=topics, **more)


def test_a_single_run_replicates_everything_in_the_log(
    spark: SparkSession, book: Book, portal: BlockingPortal, fresh: Book, topic: str
) -> None:
    portal.run(write_history(book, topic))
    done = replication(spark, book, portal, topic).run(once=True)
    assert done.lag == 0
    assert portal.run(rows_of(book.store, topic)) == portal.run(expected_rows(book, fresh, topic))


def test_a_second_run_continues_from_the_stores_pointers(
    spark: SparkSession, book: Book, portal: BlockingPortal, fresh: Book, topic: str
) -> None:
    portal.run(write_history(book, topic, steps=100))
    first = replication(spark, book, portal, topic).run(once=True)
    portal.run(write_history(book, topic, steps=50, seed=2))
    second = replication(spark, book, portal, topic).run(once=True)
    ends = sum(each.end for each in second.partitions)
    assert first.records + second.records == ends
    assert portal.run(rows_of(book.store, topic)) == portal.run(expected_rows(book, fresh, topic))


def test_each_log_partition_is_one_slice_and_nothing_is_shuffled(
    spark: SparkSession, book: Book, portal: BlockingPortal, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tidebook.pipeline.jobs import replicate
    from tidebook.pipeline.replication_query import ReplicationQuery

    portal.run(write_history(book, topic, steps=200))
    seen: list[list[tuple[str, int]]] = []
    queries: list[ReplicationQuery] = []

    def start(*arguments: Any, **more: Any) -> ReplicationQuery:
        queries.append(ReplicationQuery(*arguments, **more))
        return queries[-1]

    monkeypatch.setattr(replicate, "ReplicationQuery", start)
    replication(
        spark, book, portal, topic, settings=PipelineSettings(catch_up_records=0),
        on_batch=lambda number, done: seen.append([(d.topic, d.partition) for d in done]),
    ).run(once=True)  # fmt: skip
    assert [sorted(each) for each in seen] == [[(topic, number) for number in range(4)]]
    plan = queries[0].query._jsq.explainInternal(False)
    assert "MapInArrow" in plan
    assert "Exchange" not in plan


def test_a_damaged_record_is_parked_and_stalls_nothing(
    spark: SparkSession, book: Book, portal: BlockingPortal, fresh: Book, topic: str
) -> None:
    portal.run(book.journal(topic).append("o-1", [Event(1)]))
    offset = portal.run(write_garbage(book, topic))
    portal.run(book.journal(topic).append("o-1", [Event(2)]))
    done = replication(spark, book, portal, topic).run(once=True)
    rows = portal.run(rows_of(book.store, topic))
    assert done.lag == 0
    assert [each.position.offset for each in rows["parked"]] == [offset]
    assert rows == portal.run(expected_rows(book, fresh, topic))


def test_a_record_of_an_unknown_version_stops_only_its_partition(
    spark: SparkSession, book: Book, portal: BlockingPortal, topic: str
) -> None:
    portal.run(write_history(book, topic, steps=50))
    at = portal.run(write_garbage(book, topic, "o-1", value=newer_record()))
    stuck = partition_of("o-1", 4)
    for id in [f"o-{n}" for n in range(20) if partition_of(f"o-{n}", 4) != stuck]:
        portal.run(book.journal(topic).append(id, [Event("behind")]))
    portal.run(write_garbage(book, topic, "o-1"))
    job = replication(spark, book, portal, topic)
    done = job.run(once=True)
    assert list(done.stopped) == [f"{topic}/{stuck}"]
    assert "upgrade" in done.stopped[f"{topic}/{stuck}"]
    by_number = {each.partition: each for each in done.partitions}
    assert by_number[stuck].replicated == at
    assert all(each.lag == 0 for number, each in by_number.items() if number != stuck)


def test_replication_waits_for_a_first_topic_and_adds_new_ones(
    spark: SparkSession, embedded: Book, portal: BlockingPortal
) -> None:
    book = embedded
    short = PipelineSettings(lease_s=2.0, look_every_s=0.2)
    job = replication(spark, book, portal, settings=short)
    thread = threading.Thread(target=job.run)
    thread.start()
    try:
        for topic in ("first", "second"):
            done = portal.run(book.journal(topic).append("a", [Event(1)]))
            assert portal.run(book.store.wait(topic, done.partition, beyond=None, timeout_s=60))
    finally:
        job.stop()
        thread.join(120)
    assert not thread.is_alive()
    statuses = job.progress().partitions
    assert {each.topic for each in statuses} == {"first", "second"}


def test_records_that_the_log_has_lost_stop_the_replication_and_are_named(
    spark: SparkSession, book: Book, portal: BlockingPortal, topic: str
) -> None:
    portal.run(write_history(book, topic, steps=100))
    end = portal.run(book.log.end(topic, 0))
    portal.run(book.log.truncate(topic, 0, before=end - 1))
    with pytest.raises(LogLost) as caught:
        replication(spark, book, portal, topic).run(once=True)
    assert (caught.value.partition, caught.value.first, caught.value.last) == (0, 0, end - 2)
