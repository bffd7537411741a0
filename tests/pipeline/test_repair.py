"""Rows of the store that cannot be decoded are reported as differences, and repaired from the log."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

pytest.importorskip("pyspark")

from tests.pipeline.conftest import OpenBook
from tests.pipeline.spoiling import Spoiler
from tests.pipeline.workloads import TAG, expected_rows, replicate_here, rows_of, write_history
from tidebook.core.errors import Corrupt
from tidebook.core.event import Event
from tidebook.core.key import Key, partition_of
from tidebook.core.replication_plan import TagRow
from tidebook.log.port import read_all
from tidebook.pipeline.jobs.verify import TOTALS, Comparison, compare_task, record_rows, store_rows, tag_rows
from tidebook.pipeline.source.records import to_arrow
from tidebook.replication.compare import CompareBounds
from tidebook.runtime.blocking_portal import BlockingPortal
from tidebook.store.port import next_repair_revision
from tidebook.wiring.book import Book
from tidebook.wiring.settings import settings_to_json

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def servers_toml(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Name the real servers and a separate keyspace: the scans of other tests must not find damaged rows."""
    kafka, cassandra = request.getfixturevalue("kafka_bootstrap"), request.getfixturevalue("cassandra_address")
    toml = tmp_path / "tidebook.toml"
    toml.write_text(
        f'[log]\nurl = "kafka://{kafka}"\n[store]\nurl = "cassandra://{cassandra}/repair_tests"\n'
        "[journal]\nsegments = 8\n"
    )
    return toml


def verify_here(book: Book, portal: BlockingPortal, topic: str, *, repair: bool = False) -> list[dict[str, Any]]:
    """Compare a topic, and repair it, with the tasks of the job but without Spark; return the differences."""
    rev = portal.run(next_repair_revision(book.store, (topic,))) if repair else 0
    settings = settings_to_json(book.settings)
    config = portal.run(book.store.topic_config(topic))
    assert config is not None
    bounds, batches = {}, []
    for number, pointer in portal.run(book.store.pointers(topic)).items():
        start, stop = portal.run(book.log.start(topic, number)), pointer.position.offset + 1
        bounds[number] = CompareBounds(start, pointer)
        records = portal.run(read_all(book.log, topic, number, start=start, stop=stop))
        if records:
            batches.append(to_arrow(topic, number, records))
    splits = portal.run(book.store.splits(topic, count=2))
    parts = pa.RecordBatch.from_pylist([{"topic": topic, "low": each.low, "high": each.high} for each in splits])
    tags = pa.RecordBatch.from_pylist([{"tag": TAG}, {"tag": own_tag(topic)}])
    rows = [
        row
        for batch in chain(
            record_rows(batches), store_rows(settings)([parts]), tag_rows(settings, {topic: config})([tags])
        )
        for row in batch.to_pylist()
    ]
    rows.sort(key=lambda row: (row["topic"], row["key"], row["kind"], row["n"]))
    comparison = Comparison(settings, {topic: config}, {topic: bounds}, rev)
    together = pa.RecordBatch.from_pylist(rows, schema=next(iter(record_rows(batches))).schema)
    found = [row for batch in compare_task(comparison)([together]) for row in batch.to_pylist()]
    return [row for row in found if row["what"] != TOTALS]


def own_tag(topic: str) -> str:
    """Return a tag that no other test reads, because its rows will be damaged."""
    return f"of-{topic}"


async def tagged(book: Book, topic: str) -> list[TagRow]:
    found: list[TagRow] = []
    while page := await book.store.tag_rows(
        own_tag(topic), after=found[-1].place if found else None, from_ms=0, until_ms=2**62, limit=1_000
    ):
        found += page
    return found


async def write_journals(book: Book, topic: str) -> None:
    """Write a history and five journals, and replicate them."""
    await write_history(book, topic, steps=60)
    for id in ("head", "event", "shared", "tag", "all"):
        events = [Event({"n": n}, tags={own_tag(topic)}) for n in range(6)]
        for some in [events] if id == "shared" else [[each] for each in events]:
            await book.journal(topic).append(id, some)
    await replicate_here(book, book.store, topic)


async def damage_journals(book: Book, topic: str) -> dict[str, str]:
    """Damage rows of the five journals; return the kind of damage by journal."""
    spoiler = Spoiler(book)
    tag_rows = {row.id: row for row in await tagged(book, topic)}
    await spoiler.head(Key(topic, "head"))
    await spoiler.event(Key(topic, "event"), 3)
    await spoiler.event(Key(topic, "shared"), 6)
    await spoiler.tag(tag_rows["tag"])
    await spoiler.tag(tag_rows["all"])
    await spoiler.event(Key(topic, "all"), 6)
    await spoiler.head(Key(topic, "all"))
    return {"head": "head", "event": "event", "shared": "event", "tag": "tag", "all": "head"}


def test_damaged_rows_are_differences_and_are_repaired(
    book: Book, portal: BlockingPortal, topic: str, open_book: OpenBook
) -> None:
    portal.run(write_journals(book, topic))
    before = portal.run(tagged(book, topic))
    done_to = portal.run(damage_journals(book, topic))
    with pytest.raises(Corrupt):
        portal.run(book.store.head(Key(topic, "head")))
    found = verify_here(book, portal, topic)
    assert {row["id"] for row in found} == set(done_to)
    for id, what in done_to.items():
        assert f"{what} damaged" in {row["what"] for row in found if row["id"] == id}
    assert all(row["repaired"] for row in verify_here(book, portal, topic, repair=True))
    assert verify_here(book, portal, topic) == []
    rows = portal.run(rows_of(book.store, topic))
    assert rows == portal.run(expected_rows(book, open_book("fresh"), topic))
    assert portal.run(tagged(book, topic)) == before


def test_a_damaged_head_whose_records_the_log_has_lost_is_reported_and_left_unchanged(
    embedded: Book, portal: BlockingPortal, topic: str
) -> None:
    """A fold that starts with the rest of the log would renumber the journal."""
    for n in range(6):
        portal.run(embedded.journal(topic).append("a", [Event({"n": n}, tags={TAG})]))
    portal.run(replicate_here(embedded, embedded.store, topic))
    for number in portal.run(embedded.store.pointers(topic)):
        portal.run(embedded.log.truncate(topic, number, before=3))
    portal.run(Spoiler(embedded).head(Key(topic, "a")))
    [reported] = verify_here(embedded, portal, topic, repair=True)
    assert (reported["what"], reported["repaired"]) == ("head damaged", False)
    assert "the log does not reach back far enough" in reported["found"]
    with pytest.raises(Corrupt):
        portal.run(embedded.store.head(Key(topic, "a")))


@pytest.mark.parametrize(("number", "repaired"), [(2, False), (5, True)])
def test_a_damaged_event_is_repaired_if_the_log_still_has_it(
    embedded: Book, portal: BlockingPortal, topic: str, number: int, repaired: bool
) -> None:
    """A row from before the log's start stays damaged: removing it would hide that an event is lost."""
    for n in range(6):
        portal.run(embedded.journal(topic).append("a", [Event({"n": n}, tags={TAG})]))
    portal.run(replicate_here(embedded, embedded.store, topic))
    config = portal.run(embedded.journal(topic).topic_config())
    home = partition_of("a", config.partitions)
    head = portal.run(embedded.store.head(Key(topic, "a")))
    assert head is not None
    rows = portal.run(embedded.store.events(Key(topic, "a"), head, after=0, to=6, limit=10))
    portal.run(embedded.log.truncate(topic, home, before=rows[3].position.offset))
    portal.run(Spoiler(embedded).event(Key(topic, "a"), number))
    reported = verify_here(embedded, portal, topic, repair=True)
    assert [(row["what"], row["seq_nr"], row["repaired"]) for row in reported] == [("event damaged", number, repaired)]
    again = verify_here(embedded, portal, topic)
    assert [(row["what"], row["seq_nr"]) for row in again] == ([] if repaired else [("event damaged", number)])
