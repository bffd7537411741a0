"""The store is compared with the log, repaired and rebuilt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from tests.pipeline.conftest import OpenBook
from tests.pipeline.spoiling import Spoiler
from tests.pipeline.workloads import expected_rows, lose_log, replicate_here, rows_of, write_history
from tidebook.core.errors import Corrupt, LogLost
from tidebook.core.event import Event
from tidebook.core.head import Head
from tidebook.core.key import Key, partition_of
from tidebook.core.position import Position
from tidebook.core.repair import Repair
from tidebook.core.replication_plan import TagRow
from tidebook.runtime.blocking_portal import BlockingPortal
from tidebook.wiring.book import Book

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tidebook.pipeline.jobs.verify import VerifyResult
    from tidebook.replication.journal_state import Difference

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


def verify(
    spark: SparkSession, book: Book, portal: BlockingPortal, topic: str, **more: Any
) -> tuple[VerifyResult, list[Difference]]:
    from tidebook.pipeline.jobs.verify import verify as job

    reported: list[Difference] = []
    return job(spark, book, portal, [topic], report=reported.append, **more), reported


async def damage(book: Book, topic: str) -> dict[str, str]:
    """Damage a few journals, as a faulty disk or operator might; return the kind of damage by journal."""
    config = await book.store.topic_config(topic)
    assert config is not None
    live = [(id, await _head(book, Key(topic, id))) async for id in book.store.ids(topic)]
    done: dict[str, str] = {}
    for (id, head), what in zip(
        sorted(live), ("event missing", "event extra", "head differs", "head extra"), strict=False
    ):
        key, partition = Key(topic, id), partition_of(id, config.partitions)
        pointer = await book.store.pointer(topic, partition)
        assert pointer is not None
        rows = await book.store.events(key, head, after=0, to=head.seq_nr, limit=1)
        repair = Repair(key=key, partition=partition, pointer=pointer, rev=1, head=head)
        if what == "event missing":
            repair = msgspec.structs.replace(repair, extra_rows=(rows[0].seq_nr,))
        elif what == "event extra":
            row = msgspec.structs.replace(rows[0], seq_nr=head.seq_nr + 3)
            repair = msgspec.structs.replace(repair, rows=(row,))
        elif what == "head differs":
            repair = msgspec.structs.replace(repair, head=msgspec.structs.replace(head, seq_nr=head.seq_nr + 1))
        else:
            id = f"nobody-{id}"
            at = await book.store.pointer(topic, partition_of(id, config.partitions))
            assert at is not None
            began = Position(config.epoch, 0)
            repair = msgspec.structs.replace(
                repair,
                key=Key(topic, id),
                partition=partition_of(id, config.partitions),
                pointer=at,
                head=msgspec.structs.replace(head, incarnation=began, position=began),
            )
        await book.store.repair(repair)
        done[id] = what
    return done


async def _head(book: Book, key: Key) -> Head:
    head = await book.store.head(key)
    assert head is not None
    return head


def test_a_store_replicated_from_the_log_does_not_differ(
    spark: SparkSession, book: Book, portal: BlockingPortal, topic: str
) -> None:
    portal.run(write_history(book, topic, steps=150))
    portal.run(replicate_here(book, book.store, topic))
    portal.run(write_history(book, topic, steps=20, seed=5))  # not replicated yet, therefore not compared
    done, reported = verify(spark, book, portal, topic)
    assert reported == []
    assert (done.left, done.partial) == (0, ())
    assert done.journals >= 15
    assert done.events > 50


def test_every_kind_of_damage_is_reported_and_repaired(
    spark: SparkSession, book: Book, portal: BlockingPortal, topic: str, open_book: OpenBook
) -> None:
    portal.run(write_history(book, topic, steps=150))
    portal.run(replicate_here(book, book.store, topic))
    done_to = portal.run(damage(book, topic))
    found, reported = verify(spark, book, portal, topic)
    assert done_to.items() <= {(each.id, each.what) for each in reported}
    assert found.left == len(reported)
    repaired, _ = verify(spark, book, portal, topic, repair=True)
    assert (repaired.repaired, repaired.left) == (len(reported), 0)
    fresh = open_book("fresh")
    rows = portal.run(rows_of(book.store, topic))
    # A head without any record in the log is replaced by a grave.
    assert {id for id, what in done_to.items() if what == "head extra"} <= rows["graves"].keys()
    rows["graves"] = {id: head for id, head in rows["graves"].items() if id not in done_to}
    assert rows == portal.run(expected_rows(book, fresh, topic))


def test_a_missing_tag_row_is_reported_and_repaired(
    spark: SparkSession, embedded: Book, portal: BlockingPortal, topic: str
) -> None:
    from tidebook.pipeline.jobs.rebuild import rebuild_tags

    book = embedded
    portal.run(book.journal(topic).append("a", [Event(1, tags={"x", "y"}), Event(2, tags={"x"})]))
    portal.run(replicate_here(book, book.store, topic))
    rows = portal.run(book.store.tag_rows("x", after=None, from_ms=0, until_ms=2**62, limit=10))
    pointer = portal.run(book.store.pointer(topic, rows[0].place.partition))
    head = portal.run(_head(book, Key(topic, "a")))
    assert pointer is not None
    spoil = Repair(
        key=Key(topic, "a"), partition=rows[0].place.partition, pointer=pointer, rev=1, head=head,
        extra_tags=(rows[0].place,),
    )  # fmt: skip
    portal.run(book.store.repair(spoil))
    _, reported = verify(spark, book, portal, topic, repair=True)
    assert [each.what for each in reported] == ["tag missing"]
    again = portal.run(book.store.tag_rows("x", after=None, from_ms=0, until_ms=2**62, limit=10))
    assert list(again) == list(rows)
    portal.run(book.store.repair(spoil))
    done = rebuild_tags(spark, book, portal, topic)
    assert (done.written, done.removed) == (3, 0)
    again = portal.run(book.store.tag_rows("x", after=None, from_ms=0, until_ms=2**62, limit=10))
    assert list(again) == list(rows)


def test_a_rebuild_of_all_tags_removes_rows_without_an_event(
    spark: SparkSession, book: Book, portal: BlockingPortal, topic: str
) -> None:
    """It removes a row of a tag that its event does not have, and a row of a journal that does not exist."""
    from tidebook.pipeline.jobs.rebuild import rebuild_tags

    tag, stale = f"tag-{topic}", f"stale-{topic}"
    portal.run(book.journal(topic).append("a", [Event(1, tags={tag})]))
    portal.run(replicate_here(book, book.store, topic))

    def rows(of: str) -> list[TagRow]:
        return list(portal.run(book.store.tag_rows(of, after=None, from_ms=0, until_ms=2**62, limit=10)))

    [true] = rows(tag)
    pointer = portal.run(book.store.pointer(topic, true.place.partition))
    assert pointer is not None
    wrong = (msgspec.structs.replace(true, tag=stale), msgspec.structs.replace(true, index=1, seq_nr=2, tag_seq_nr=2))
    head = portal.run(_head(book, Key(topic, "a")))
    repair = Repair(
        key=Key(topic, "a"), partition=true.place.partition, pointer=pointer, rev=0, head=head, tags=wrong
    )  # fmt: skip
    portal.run(book.store.repair(repair))
    assert (len(rows(tag)), len(rows(stale))) == (2, 1)
    done = rebuild_tags(spark, book, portal, topic)
    assert (done.written, done.removed) == (1, 2)
    assert (rows(tag), rows(stale)) == ([true], [])
    assert rebuild_tags(spark, book, portal, topic).removed == 0


def test_after_retention_the_rest_is_compared_and_a_rebuild_is_refused(
    spark: SparkSession, book: Book, portal: BlockingPortal, topic: str
) -> None:
    from tidebook.pipeline.jobs.rebuild import rebuild

    portal.run(write_history(book, topic, steps=150))
    portal.run(replicate_here(book, book.store, topic))
    for number in range(4):
        end = portal.run(book.log.end(topic, number))
        portal.run(book.log.truncate(topic, number, before=end // 2))
    done, reported = verify(spark, book, portal, topic)
    assert reported == []
    assert done.partial == (topic,)
    with pytest.raises(LogLost):
        rebuild(spark, book, portal, topic)


def test_a_lost_store_is_rebuilt_from_the_log(
    spark: SparkSession, embedded: Book, portal: BlockingPortal, topic: str, open_book: OpenBook
) -> None:
    from tidebook.pipeline.jobs.rebuild import rebuild

    portal.run(write_history(embedded, topic, steps=150))
    portal.run(replicate_here(embedded, embedded.store, topic))
    before = portal.run(rows_of(embedded.store, topic))
    folder = embedded.settings.folder
    portal.run(embedded.__aexit__(None, None, None))
    for file in folder.glob("store.db*"):
        file.unlink()
    portal.run(embedded.__aenter__())
    assert rebuild(spark, embedded, portal, topic).left == 0
    after = portal.run(rows_of(embedded.store, topic))
    assert (after["heads"], after["events"]) == (before["heads"], before["events"])


@pytest.mark.parametrize("config", ["lost", "kept"])
def test_a_lost_store_of_an_adopted_topic_is_not_rebuilt_without_its_older_epochs(
    spark: SparkSession, embedded: Book, portal: BlockingPortal, topic: str, config: str
) -> None:
    from tidebook.pipeline.jobs.rebuild import rebuild

    portal.run(embedded.journal(topic).append("a", [Event(1)]))
    portal.run(replicate_here(embedded, embedded.store, topic))
    portal.run(lose_log(embedded, topic))
    known = portal.run(embedded.journal(topic).adopt())
    portal.run(embedded.journal(topic).append("a", [Event(2)]))
    folder = embedded.settings.folder
    portal.run(embedded.__aexit__(None, None, None))
    for file in folder.glob("store.db*"):
        file.unlink()
    portal.run(embedded.__aenter__())
    if config == "kept":
        portal.run(embedded.store.set_topic_config(topic, known, expected=None))
    with pytest.raises(Corrupt, match="was adopted"):
        rebuild(spark, embedded, portal, topic)


@pytest.mark.parametrize("how", ["repair", "rebuild"])
def test_undecodable_rows_are_repaired_by_both_jobs(
    spark: SparkSession, embedded: Book, portal: BlockingPortal, topic: str, open_book: OpenBook, how: str
) -> None:
    from tidebook.pipeline.jobs.rebuild import rebuild

    portal.run(write_history(embedded, topic, steps=60))
    portal.run(replicate_here(embedded, embedded.store, topic))
    expected = portal.run(expected_rows(embedded, open_book("fresh"), topic))
    ids = sorted(id for id in expected["heads"] if expected["events"][id])
    spoiler = Spoiler(embedded)
    portal.run(spoiler.head(Key(topic, ids[0])))
    portal.run(spoiler.event(Key(topic, ids[1]), expected["events"][ids[1]][0].seq_nr))
    portal.run(spoiler.tag(expected["tags"][0]))
    found, reported = verify(spark, embedded, portal, topic)
    assert {"head damaged", "event damaged", "tag damaged"} <= {each.what for each in reported}
    assert found.left == len(reported)
    if how == "repair":
        done, _ = verify(spark, embedded, portal, topic, repair=True)
    else:
        done = rebuild(spark, embedded, portal, topic)
    assert (done.repaired, done.left) == (len(reported), 0)
    if how == "repair":  # a rebuild replicates the log to its end, ticks included
        assert portal.run(rows_of(embedded.store, topic)) == expected
