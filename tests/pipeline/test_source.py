"""`format("tidebook")`: journals as a Spark table and as a stream."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import tidebook
from tests.pipeline.one_frame import EVENTS, IDS, PUSHDOWN, expected_rows, query_one_frame
from tests.pipeline.workloads import lose_log, replicate_here, write_history
from tidebook.core.event import Event
from tidebook.runtime.blocking_portal import BlockingPortal
from tidebook.wiring.book import Book
from tidebook.wiring.settings import settings_to_json

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


def table(spark: SparkSession, book: Book, topic: str, **options: str) -> DataFrame:
    from tidebook.pipeline.source.format import register

    register(spark)
    reader = spark.read.format("tidebook").option("settings", settings_to_json(book.settings)).option("splits", "2")
    for name, value in {"topic": topic, **options}.items():
        reader = reader.option(name, value)
    return reader.load()


async def everything(book: Book, topic: str) -> set[tuple[Any, ...]]:
    """Read all events from the journals, as (id, seq_nr, offset, payload)."""
    found = set()
    async for id in book.journal(topic).ids():
        async for event in book.journal(topic).read(id):
            found.add((id, event.seq_nr, event.offset, event.payload["step"]))
    return found


def as_set(frame: DataFrame) -> set[tuple[Any, ...]]:
    from pyspark.sql.functions import col, get_json_object

    step = get_json_object(col("payload").cast("string"), "$.step").cast("int")
    rows = frame.select("id", "seq_nr", "offset", step.alias("step")).collect()
    assert len(rows) == len(set(rows))
    return {tuple(row) for row in rows}


def test_a_table_has_every_event_once_whether_it_is_replicated_or_not(
    spark: SparkSession, book: Book, portal: BlockingPortal, topic: str
) -> None:
    portal.run(write_history(book, topic, steps=120))
    portal.run(replicate_here(book, book.store, topic))
    replicated = portal.run(everything(book, topic))
    portal.run(write_history(book, topic, steps=60, seed=2))  # deletes and purges among them
    frame = table(spark, book, topic)
    assert as_set(frame) == portal.run(everything(book, topic)) != replicated
    assert as_set(table(spark, book, topic, freshness="store")) == replicated
    row = frame.where("size(tags) > 0").first()
    assert row is not None
    assert (row["tags"], row["payload_type"], row["topic"], row["metadata"]) == (["paid"], "json", topic, None)
    by_tag = {(row["id"], row["seq_nr"]) for row in table(spark, book, topic, tag="paid").collect()}
    assert by_tag == {(row["id"], row["seq_nr"]) for row in frame.where("array_contains(tags, 'paid')").collect()}


@pytest.mark.parametrize("pushdown", ["false", "true"])
def test_queries_over_one_frame_do_not_see_one_anothers_filters(
    spark: SparkSession, embedded: Book, portal: BlockingPortal, topic: str, pushdown: str
) -> None:
    """This also holds if the user has enabled filter pushdown: Spark 4.2.0 then shares one reader between the scans."""
    for id in IDS:
        portal.run(embedded.journal(topic).append(id, [Event({"step": i}) for i in range(EVENTS)]))
        if id == IDS[0]:  # the others are in the log only
            portal.run(replicate_here(embedded, embedded.store, topic))
    before = spark.conf.get(PUSHDOWN)
    frame = table(spark, embedded, topic)
    assert spark.conf.get(PUSHDOWN) == before
    spark.conf.set(PUSHDOWN, pushdown)
    try:
        assert query_one_frame(frame) == expected_rows()
    finally:
        spark.conf.unset(PUSHDOWN)


def test_a_wrong_option_is_reported_in_one_line_and_creates_nothing(
    spark: SparkSession, embedded: Book, portal: BlockingPortal, tmp_path: Path
) -> None:
    portal.run(embedded.journal("orders").append("a", [Event({"step": 1})]))
    cases = [
        ({"book": str(tmp_path / "nope")}, "there is no book in"),
        ({"topics": "orders"}, "did you mean topic"),
        ({"topic": "nobody"}, "topic nobody is not in the store"),
        ({"splits": "few"}, "the option splits must be a whole number"),
        ({"freshness": "now"}, "the option freshness must be one of log, store, not 'now'"),
        ({"asOfOffsets": '{"orders": {"0": 0}}'}, "partition 0 is written up to offset -1 of epoch 1"),
    ]
    for options, message in cases:
        reader = spark.read.format("tidebook").option("book", str(embedded.settings.folder))
        for name, value in options.items():
            reader = reader.option(name, value)
        with one_line_error(message):
            reader.load().count()
    assert not (tmp_path / "nope").exists()
    reader = spark.read.format("tidebook").option("book", str(embedded.settings.folder))
    with one_line_error("is read-only"):
        reader.load().write.format("tidebook").option("book", str(embedded.settings.folder)).mode("append").save()
    with one_line_error("has fixed columns"):
        reader.schema("id string, seq_nr int").load().count()


@contextmanager
def one_line_error(message: str) -> Iterator[None]:
    """Expect an error of one line, followed by Spark's own line with the state."""
    with pytest.raises(Exception, match=message) as caught:
        yield
    text = str(caught.value)
    assert "Traceback" not in text
    assert [line for line in text.splitlines() if line.strip()][1:] == [" SQLSTATE: 38000"]


def test_a_payload_is_a_variant_on_request(
    spark: SparkSession, embedded: Book, portal: BlockingPortal, topic: str
) -> None:
    payloads: list[Any] = [{"total": 3, "of": [1.5, None]}, "text", b"\xff"]
    portal.run(embedded.journal(topic).append("a", [Event(each) for each in payloads]))
    read = {"variant": "to_json(payload)", "json": "to_json(parse_json(payload))"}
    for form, column in read.items():
        frame = table(spark, embedded, topic, payload=form).orderBy("seq_nr").selectExpr(column)
        assert [row[0] for row in frame.collect()] == ['{"of":[1.5,null],"total":3}', '"text"', None]


def test_a_session_is_configured_for_a_book(
    spark: SparkSession, embedded: Book, portal: BlockingPortal, tmp_path: Path
) -> None:
    portal.run(embedded.journal("orders").append("a", [Event({"step": 1})]))
    for given in (embedded, embedded.settings.folder, str(embedded.settings.folder)):
        session = tidebook.spark(given)
        assert session.sparkContext is spark.sparkContext  # the running one
        assert session.read.format("tidebook").option("topic", "orders").load().count() == 1
    with pytest.raises(tidebook.NotFound, match="there is no book in"):
        tidebook.spark(tmp_path / "nope")
    assert not (tmp_path / "nope").exists()


def test_the_python_of_the_howto_runs(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "howto" / "pipeline.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert blocks
    monkeypatch.chdir(tmp_path)
    for block in blocks * 2:  # readers repeat an example in the same folder
        exec(compile(block, str(page), "exec"), {})


def test_the_python_of_the_page_about_flushing_reads_a_region(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "howto" / "wal-flush.md"
    [block] = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tidebook.toml").write_text("")
    with tidebook.open_sync("tidebook.toml") as book:
        region = book.wal("metrics").open_region(7, create=True)
        region.write(1, [{"cpu": 0.7}, {"cpu": 0.9}])
        region.close()
    *lines, last = block.splitlines()
    names: dict[str, Any] = {}
    exec(compile("\n".join([*lines, f"rows = ({last.partition('#')[0].strip()})"]), str(page), "exec"), names)
    columns = [each.strip() for each in last.partition("#")[2].split(",")]
    assert names["rows"].columns == columns
    assert [(row.seq, row.payload) for row in names["rows"].orderBy("seq").collect()] == [
        (1, b'{"cpu":0.7}'),
        (2, b'{"cpu":0.9}'),
    ]


def batches(spark: SparkSession, book: Book, topic: str, checkpoint: Path, **options: str) -> list[list[Any]]:
    """Run a stream until it has read what is available now; return the rows of each micro-batch."""
    from tidebook.pipeline.source.format import register

    register(spark)
    reader = spark.readStream.format("tidebook").option("settings", settings_to_json(book.settings))
    for name, value in {"topic": topic, **options}.items():
        reader = reader.option(name, value)
    rows: list[Any] = []

    def each(batch: DataFrame, number: int) -> None:
        rows.append(batch.collect())

    writer = reader.load().writeStream.foreachBatch(each).option("checkpointLocation", str(checkpoint))
    writer.trigger(availableNow=True).start().awaitTermination()
    return rows


def stream(spark: SparkSession, book: Book, topic: str, checkpoint: Path, **options: str) -> list[Any]:
    """Run a stream until it has read what is available now; return its rows."""
    return [row for batch in batches(spark, book, topic, checkpoint, **options) for row in batch]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topic": "nobody"}, "topic nobody is not in the store"),
        ({"topic": ","}, "the option topic must have at least one name"),
        ({"freshness": "log"}, "the option freshness is for tables"),
        ({"splits": "2"}, "the option splits is unknown"),
        ({"startingOffsets": '{"orders": {"0": 1}}'}, "must name all partitions from 0 to 3"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
@pytest.mark.parametrize("trigger", [{"availableNow": True}, {"processingTime": "1 second"}], ids=["now", "repeated"])
def test_a_wrong_option_of_a_stream_is_reported_in_one_line(
    spark: SparkSession,
    embedded: Book,
    portal: BlockingPortal,
    tmp_path: Path,
    options: dict[str, str],
    message: str,
    trigger: dict[str, Any],
) -> None:
    portal.run(embedded.journal("orders").append("a", [Event({"step": 1})]))
    given = {"book": str(embedded.settings.folder), "topic": "orders", **options}

    def run() -> None:
        writer = spark.readStream.format("tidebook").options(**given).load().writeStream.format("noop")
        writer.option("checkpointLocation", str(tmp_path / "c")).trigger(**trigger).start().awaitTermination()

    with pytest.raises(Exception, match=message) as caught:
        run()
    text = str(caught.value)
    assert "Traceback" not in text
    assert message in text.splitlines()[0]


def test_a_stream_continues_where_it_stopped_and_stays_within_its_limit(
    spark: SparkSession, book: Book, portal: BlockingPortal, topic: str, tmp_path: Path
) -> None:
    portal.run(write_history(book, topic, steps=60))
    portal.run(replicate_here(book, book.store, topic))
    found = batches(spark, book, topic, tmp_path / "c", maxRecordsPerTrigger="40")
    assert len(found) > 1
    assert all(len({(row["partition"], row["offset"]) for row in batch}) <= 40 for batch in found)
    first = [(row["id"], row["seq_nr"], row["offset"]) for batch in found for row in batch]
    assert len(first) == len(set(first))
    assert set(first) == {each[:3] for each in portal.run(everything(book, topic))}
    portal.run(book.journal(topic).append("new", [Event({"step": 1}), Event({"step": 2})]))
    portal.run(replicate_here(book, book.store, topic))
    second = stream(spark, book, topic, tmp_path / "c")
    assert [(row["id"], row["seq_nr"]) for row in second] == [("new", 1), ("new", 2)]


def test_a_stream_that_retention_has_overtaken_raises_an_error(
    spark: SparkSession, book: Book, portal: BlockingPortal, topic: str, tmp_path: Path
) -> None:
    portal.run(write_history(book, topic, steps=60))
    portal.run(replicate_here(book, book.store, topic))
    end = portal.run(book.log.end(topic, 0))
    portal.run(book.log.truncate(topic, 0, before=end))
    starts = f'{{"{topic}": {{"0": 0, "1": 0, "2": 0, "3": 0}}}}'
    with pytest.raises(Exception, match=f"the log lost offsets 0 to {end - 1}"):
        stream(spark, book, topic, tmp_path / "c", startingOffsets=starts)


def test_after_an_adopt_a_table_has_everything_and_a_stream_reports_that_it_cannot_continue(
    spark: SparkSession, embedded: Book, portal: BlockingPortal, topic: str, tmp_path: Path
) -> None:
    """Offsets restart at 0: those that the stream has stored now refer to other records."""
    zero = f'{{"{topic}": {{"0": 0, "1": 0, "2": 0, "3": 0}}}}'
    for n in range(30):
        portal.run(embedded.journal(topic).append(f"o-{n % 5}", [Event({"step": n})]))
    portal.run(replicate_here(embedded, embedded.store, topic))
    assert len(stream(spark, embedded, topic, tmp_path / "old")) == 30
    portal.run(lose_log(embedded, topic))
    with pytest.raises(Exception, match="holds another incarnation of it than the store was filled from"):
        stream(spark, embedded, topic, tmp_path / "old")
    portal.run(embedded.journal(topic).adopt())
    for n in range(30, 35):
        portal.run(embedded.journal(topic).append(f"o-{n % 5}", [Event({"step": n})]))
    portal.run(replicate_here(embedded, embedded.store, topic))
    expected = portal.run(everything(embedded, topic))
    assert len(expected) == 35
    assert as_set(table(spark, embedded, topic)) == expected
    assert as_set(table(spark, embedded, topic, startingOffsets=zero)) == expected
    epoch_2 = zero.replace('"0": 0', '"epoch": 2, "0": 0')
    assert table(spark, embedded, topic, startingOffsets=epoch_2).count() == 5
    with pytest.raises(Exception, match="the topic is in epoch 2: it was adopted since"):
        stream(spark, embedded, topic, tmp_path / "old")
    assert len(stream(spark, embedded, topic, tmp_path / "new")) == 5


def test_a_stream_past_the_end_of_the_log_raises_an_error(
    spark: SparkSession, embedded: Book, portal: BlockingPortal, topic: str, tmp_path: Path
) -> None:
    portal.run(embedded.journal(topic).append("a", [Event({"step": 1})]))
    portal.run(replicate_here(embedded, embedded.store, topic))
    starts = f'{{"{topic}": {{"0": 0, "1": 0, "2": 0, "3": 50}}}}'
    with pytest.raises(Exception, match=r"the log lost offsets \d+ to 49 that it contained before"):
        stream(spark, embedded, topic, tmp_path / "c", startingOffsets=starts)
