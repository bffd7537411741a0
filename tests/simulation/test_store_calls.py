"""Streams, settings and repairs of a store behave the same on the embedded one and on the simulated Cassandra."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("acsylla")

from tests.simulation import cluster as clusters
from tests.simulation.cluster import Cluster
from tests.simulation.cql import AddColumn, CreateTable, DropTable, parse
from tests.simulation.simulation import Clients
from tidebook.core.action import Append
from tidebook.core.errors import InvalidInput, NotFound, TooLarge
from tidebook.core.event import Event, encode_events
from tidebook.core.key import Key
from tidebook.core.position import FIRST_EPOCH, Position
from tidebook.core.repair import REV_MAX
from tidebook.core.replication_plan import Parked, Pointer, SliceWrites, TagPosition, TagRow, TopicPosition
from tidebook.core.topic_config import TopicConfig
from tidebook.log.port import Record
from tidebook.store.cassandra import CassandraSettings
from tidebook.store.cassandra import store as cassandra_stores
from tidebook.store.cassandra.migrations import BOOTSTRAP, MIGRATIONS
from tidebook.store.port import ScanSplit, StoredSnapshot, StoreWriter, next_repair_revision
from tidebook.store.sqlite import SqliteStore
from tidebook.store.sqlite import store as sqlite_stores
from tidebook.testing.conformance.journal_records import append, delete, purge, records_of, topic_config
from tidebook.testing.replicating import replicate_slice

TOPIC = "orders"
HOUR_MS = 3_600_000


def simulated() -> StoreWriter:
    cluster = Cluster(random.Random(1))
    for ddl in (*BOOTSTRAP, *(ddl for migration in MIGRATIONS for ddl in migration.statements)):
        parsed = parse(ddl)
        assert isinstance(parsed, CreateTable | DropTable | AddColumn), ddl
        cluster.define(parsed)
    return Clients(cluster, CassandraSettings(hosts=("simulated",), keyspace="simulated")).store()


@pytest.fixture(params=["embedded", "simulated"])
async def store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[StoreWriter]:
    monkeypatch.setattr(clusters, "LATENCY_S", 0.0)
    opened = SqliteStore(tmp_path) if request.param == "embedded" else simulated()
    yield opened
    if request.param == "embedded":
        await opened.close()


@pytest.fixture
async def config(store: StoreWriter) -> TopicConfig:
    return await store.set_topic_config(TOPIC, topic_config(TOPIC), expected=None)


def tagged(offset: int, id: str, *tags: set[str], hours: int = 0) -> Record:
    """Return a record at that hour which appends one event for each set of tags."""
    events = [Event(f"{id}-{offset}-{n}", tags=each) for n, each in enumerate(tags)]
    body, counts = encode_events(events)
    action = Append(FIRST_EPOCH, b"%016d" % offset, len(events), body, tagged=counts)
    [record] = records_of([(id, action)], start=offset)
    return Record(offset, HOUR_MS * (hours + 10) + offset, record.key, record.value)


async def fill(store: StoreWriter, config: TopicConfig) -> None:
    """Replicate events of three hours: all but one have the tag x, some have y."""
    records = [
        tagged(0, "a", {"x"}, {"x", "y"}, {"y"}),
        tagged(1, "b", {"x"}),
        tagged(2, "a", {"x"}, hours=1),
        tagged(3, "c", {"x", "y"}, hours=3),
    ]
    await replicate_slice(store, TOPIC, 0, records, config)


def places(rows: Any) -> list[tuple[str, int, int]]:
    return [(row.id, row.seq_nr, row.tag_seq_nr) for row in rows]


X = [("a", 1, 1), ("a", 2, 2), ("b", 1, 1), ("a", 4, 3), ("c", 1, 1)]


@pytest.mark.parametrize("limit", [1, 2, 5, 100])
async def test_a_stream_is_read_in_pages_in_the_order_of_the_log(
    store: StoreWriter, config: TopicConfig, limit: int
) -> None:
    await fill(store, config)
    for read in (store.tag_rows, store.inspect_tag):
        found: list[TagRow] = []
        after: TagPosition | None = None
        while page := await read("x", after=after, from_ms=0, until_ms=2**60, limit=limit):
            assert len(page) <= limit
            found += page  # type: ignore[arg-type]
            after = found[-1].place
        assert places(found) == X
        assert {row.topic for row in found} == {TOPIC}
        assert [row.position for row in found] == [Position(FIRST_EPOCH, n) for n in (0, 0, 1, 2, 3)]


async def test_a_stream_is_bounded_in_time(store: StoreWriter, config: TopicConfig) -> None:
    await fill(store, config)

    async def between(from_ms: int, until_ms: int) -> list[tuple[str, int, int]]:
        return places(await store.tag_rows("x", after=None, from_ms=from_ms, until_ms=until_ms, limit=10))

    at = [HOUR_MS * 10, HOUR_MS * 10 + 1, HOUR_MS * 11 + 2, HOUR_MS * 13 + 3]
    assert await between(0, at[0]) == []
    assert await between(0, at[0] + 1) == X[:2]
    assert await between(at[0], at[1] + 1) == X[:3]
    assert await between(at[1], at[2]) == X[2:3]
    assert await between(at[2], at[3] + 1) == X[3:]
    assert await between(at[3] + 1, 2**60) == []
    rows = await store.tag_rows("x", after=None, from_ms=0, until_ms=2**60, limit=10)
    later = await store.tag_rows("x", after=rows[0].place, from_ms=at[2], until_ms=2**60, limit=10)
    assert places(later) == X[3:], "the start was ignored although it is later than the position"
    assert places(await store.tag_rows("y", after=None, from_ms=0, until_ms=2**60, limit=10)) == [
        ("a", 2, 1), ("a", 3, 2), ("c", 1, 1),
    ]  # fmt: skip
    assert await store.tag_rows("z", after=None, from_ms=0, until_ms=2**60, limit=10) == []


async def test_the_names_of_tags_topics_and_pointers_are_listed(store: StoreWriter, config: TopicConfig) -> None:
    assert [tag async for tag in store.tags()] == []
    await fill(store, config)
    await store.set_topic_config("bills", topic_config("bills"), expected=None)
    assert [tag async for tag in store.tags()] == ["x", "y"]
    assert list(await store.topics()) == ["bills", TOPIC]
    assert await store.pointers(TOPIC) == {0: Pointer(Position(FIRST_EPOCH, 3), HOUR_MS * 13 + 3)}
    assert await store.pointers("bills") == {}
    assert sorted([id async for id in store.ids(TOPIC)]) == ["a", "b", "c"]


async def test_deleted_and_purged_events_leave_their_streams(store: StoreWriter, config: TopicConfig) -> None:
    await fill(store, config)
    records = records_of([("a", delete(2)), ("c", purge())], start=4)
    await replicate_slice(store, TOPIC, 0, records, config)
    assert places(await store.tag_rows("x", after=None, from_ms=0, until_ms=2**60, limit=10)) == X[2:4]
    assert places(await store.tag_rows("y", after=None, from_ms=0, until_ms=2**60, limit=10)) == [("a", 3, 2)]
    assert sorted([id async for id in store.ids(TOPIC)]) == ["a", "b"]
    assert [id async for id, _ in store.graves(TOPIC)] == ["c"]


async def test_a_setting_changes_only_from_its_current_value(store: StoreWriter) -> None:
    assert await store.setting("s") is None
    assert not await store.set_setting("s", "1", expected="0")
    assert await store.set_setting("s", "1", expected=None)
    assert not await store.set_setting("s", "2", expected=None)
    assert not await store.set_setting("s", "2", expected="0")
    assert await store.set_setting("s", "2", expected="1")
    assert await store.setting("s") == "2"


async def test_each_repair_of_a_topic_has_a_higher_revision_up_to_the_greatest(store: StoreWriter) -> None:
    assert await next_repair_revision(store, []) == 1
    assert [await next_repair_revision(store, ["a"]) for _ in range(3)] == [1, 2, 3]
    assert await next_repair_revision(store, ["a", "b"]) == 4
    assert await next_repair_revision(store, ["b"]) == 2
    assert [await next_repair_revision(store, ["a"]) for _ in range(5)] == [5, 6, REV_MAX, REV_MAX, REV_MAX]


async def test_wait_any_ends_at_its_timeout_with_a_count_that_never_falls(
    store: StoreWriter, config: TopicConfig
) -> None:
    since = await store.wait_any(timeout_s=0.0, since=-1)
    await fill(store, config)
    after = await store.wait_any(timeout_s=0.001, since=since)
    assert after > since or after == since >= 0


async def test_parked_records_are_listed_by_topic_and_removed(store: StoreWriter, config: TopicConfig) -> None:
    await store.set_topic_config("bills", topic_config("bills"), expected=None)
    parked = [
        Parked(topic, partition, Position(FIRST_EPOCH, offset), 5, "a", "damaged", b"value")
        for topic in ("bills", TOPIC)
        for partition in (0, 1)
        for offset in (0, 1)
    ]
    for topic in ("bills", TOPIC):
        for partition in (0, 1):
            some = tuple(each for each in parked if (each.topic, each.partition) == (topic, partition))
            pointer = Pointer(Position(FIRST_EPOCH, 1), 5)
            await store.apply(SliceWrites(topic, partition, None, pointer, (), some))

    async def listed(topic: str | None) -> list[Parked]:
        return sorted([each async for each in store.parked(topic)], key=lambda each: (each.topic, *each.position))

    everything = await listed(None)
    assert len(everything) == 8
    in_one = {(each.topic, each.partition) for each in await listed("bills")}
    assert in_one <= {("bills", 0), ("bills", 1)}
    assert ("bills", 0) in in_one
    await store.unpark(parked[:3])
    left = {(each.topic, each.partition, each.position.offset) for each in await listed(None)}
    assert left == {(each.topic, each.partition, each.position.offset) for each in parked[3:]}


@pytest.mark.parametrize("count", [1, 2, 3, 7])
async def test_the_splits_of_a_topic_contain_each_journal_once(
    store: StoreWriter, config: TopicConfig, count: int
) -> None:
    ids = [f"j-{n}" for n in range(7)]
    await replicate_slice(store, TOPIC, 0, records_of([(id, append(2)) for id in ids]), config)
    splits = await store.splits(TOPIC, count=count)
    assert 1 <= len(splits) <= count
    heads = [id for split in splits async for page in store.heads_in(TOPIC, split) for id, _ in page]
    events = [(id, row.seq_nr) for split in splits async for page in store.events_in(TOPIC, split) for id, row in page]
    inspected = [id for split in splits async for page in store.inspect(TOPIC, split) for id, _ in page]
    assert sorted(heads) == ids
    assert sorted(events) == [(id, n) for id in ids for n in (1, 2)]
    assert sorted(inspected) == sorted(ids * 3)
    assert await store.splits("nobody", count=1) is not None


async def test_values_that_a_store_cannot_keep_are_refused(store: StoreWriter, config: TopicConfig) -> None:
    with pytest.raises(NotFound):
        await store.set_topic_config("nobody", topic_config("x"), expected=config)
    if isinstance(store, SqliteStore):
        return
    key, at = Key(TOPIC, "a"), Position(FIRST_EPOCH, 0)
    with pytest.raises(InvalidInput, match="slots must be at least 1"):
        await store.save_snapshot(key, at, StoredSnapshot(1, 0, b"", 0), slots=0)
    most = cassandra_stores.SNAPSHOT_BYTES_MAX
    await store.save_snapshot(key, at, StoredSnapshot(1, 0, b"x" * most, 0), slots=1)
    with pytest.raises(TooLarge):
        await store.save_snapshot(key, at, StoredSnapshot(2, 0, b"x" * (most + 1), 0), slots=1)
    limit = cassandra_stores.LIMIT_BYTES_MAX
    large = TopicConfig(topic_id="l", partitions=1, limit_bytes=limit)
    assert await store.set_topic_config("large", large, expected=None) == large
    with pytest.raises(TooLarge):
        await store.set_topic_config(
            "larger", TopicConfig(topic_id="l", partitions=1, limit_bytes=limit + 1), expected=None
        )
    with pytest.raises(InvalidInput, match="segments"):
        await store.set_topic_config(
            "large", TopicConfig(topic_id="l", partitions=1, segments=large.segments + 1), expected=large
        )
    with pytest.raises(NotFound):
        await store.apply(SliceWrites("nobody", 0, None, Pointer(Position(FIRST_EPOCH, 0), 0), ()))
    with pytest.raises(InvalidInput, match="from the log"):
        await store.topic_rows(TOPIC, after=None, until_ms=9, limit=1)
    assert not store.orders_topics


async def test_the_embedded_store_orders_the_events_of_a_topic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SqliteStore(tmp_path)
    config = await store.set_topic_config(TOPIC, topic_config(TOPIC), expected=None)
    await fill(store, config)
    order = [("a", 1), ("a", 2), ("a", 3), ("b", 1), ("a", 4), ("c", 1)]
    for limit in (1, 2, 100):
        found: list[Any] = []
        after: TopicPosition | None = None
        while page := await store.topic_rows(TOPIC, after=after, until_ms=2**60, limit=limit):
            assert len(page) <= limit
            found += page
            after = found[-1].place
        assert [(row.id, row.seq_nr) for row in found] == order
    early = await store.topic_rows(TOPIC, after=None, until_ms=HOUR_MS * 11 + 2, limit=100)
    assert [(row.id, row.seq_nr) for row in early] == order[:4]
    assert await store.topic_rows("nobody", after=None, until_ms=2**60, limit=5) == []
    # A page ends after the step in which its bytes exceed the bound.
    monkeypatch.setattr(sqlite_stores, "PAGE_BYTES_MAX", 1)
    monkeypatch.setattr(sqlite_stores, "STEP_ROWS", 2)
    assert len(await store.topic_rows(TOPIC, after=None, until_ms=2**60, limit=100)) == 2
    head = await store.head(Key(TOPIC, "a"))
    assert head is not None
    rows = await store.events(Key(TOPIC, "a"), head, after=1, to=4, limit=100)
    assert [row.seq_nr for row in rows] == [2, 3]
    assert len(await store.tag_rows("x", after=None, from_ms=0, until_ms=2**60, limit=9)) == 2
    everything = [row async for page in store.events_in(TOPIC, ScanSplit("", "zzz")) for row in page]
    assert len(everything) == 6
    await store.close()
