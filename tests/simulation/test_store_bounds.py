"""The store on the simulated Cassandra: the bounds of its waits, reads and concurrent writes."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from functools import partial
from typing import Any

import msgspec
import pytest

pytest.importorskip("acsylla")

from tests.simulation import cluster as clusters
from tests.simulation.cluster import Cluster
from tests.simulation.cql import AddColumn, CreateTable, DropTable, parse
from tests.simulation.simulation import Clients
from tests.simulation.virtual_time import run_in_virtual_time as run
from tidebook.core.errors import Corrupt, NotFound, OutcomeUnknown, Unavailable
from tidebook.core.head import Head
from tidebook.core.key import Key
from tidebook.core.position import FIRST_EPOCH, Position, write_stamp
from tidebook.core.repair import Repair
from tidebook.core.replication_plan import Parked, Pointer, PutHead, SliceWrites
from tidebook.core.topic_config import TopicConfig
from tidebook.store.cassandra import CassandraSettings, CassandraStore
from tidebook.store.cassandra import store as stores
from tidebook.store.cassandra.migrations import BOOTSTRAP, MIGRATIONS
from tidebook.store.cassandra.mutations import head_batches
from tidebook.store.cassandra.session import SERIAL_ATTEMPTS
from tidebook.store.port import StoredSnapshot
from tidebook.testing.conformance.journal_records import append, purge, records_of, topic_config
from tidebook.testing.replicating import replicate_slice

TOPIC = "orders"


@pytest.fixture(autouse=True)
def _no_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "LATENCY_S", 0.0)


def simulated(**options: Any) -> CassandraStore:
    cluster = Cluster(random.Random(1))
    for ddl in (*BOOTSTRAP, *(ddl for migration in MIGRATIONS for ddl in migration.statements)):
        parsed = parse(ddl)
        assert isinstance(parsed, CreateTable | DropTable | AddColumn), ddl
        cluster.define(parsed)
    return Clients(cluster, CassandraSettings(hosts=("simulated",), keyspace="simulated", **options)).store()


def counted(store: CassandraStore) -> Counter[str]:
    """Count the reads of the store by kind."""
    calls: Counter[str] = Counter()
    session: Any = store._session
    for name in ("read", "read_serial", "compare_and_set", "write_once"):

        def count(name: str, call: Any, *given: Any, **options: Any) -> Any:
            calls[name] += 1
            return call(*given, **options)

        setattr(session, name, partial(count, name, getattr(session, name)))
    return calls


def moved(offset: int) -> SliceWrites:
    return SliceWrites(TOPIC, 0, None, Pointer(Position(FIRST_EPOCH, offset), 5), ())


# ---- waiting for a pointer


def test_a_wait_ends_at_its_timeout_or_when_the_pointer_has_passed() -> None:
    async def program() -> None:
        store = simulated()
        await store.set_topic_config(TOPIC, topic_config(TOPIC), expected=None)
        loop = asyncio.get_running_loop()
        began = loop.time()
        assert await store.wait(TOPIC, 0, beyond=None, timeout_s=1.0) is False
        assert loop.time() - began == pytest.approx(1.0)
        assert await store.wait(TOPIC, 0, beyond=None, timeout_s=0.0) is False
        await store.apply(moved(4))
        began = loop.time()
        assert await store.wait(TOPIC, 0, beyond=None, timeout_s=1.0) is True
        assert await store.wait(TOPIC, 0, beyond=Position(FIRST_EPOCH, 3), timeout_s=1.0) is True
        assert loop.time() == pytest.approx(began)
        assert await store.wait(TOPIC, 0, beyond=Position(FIRST_EPOCH, 4), timeout_s=0.5) is False
        waiting = asyncio.create_task(store.wait(TOPIC, 0, beyond=Position(FIRST_EPOCH, 4), timeout_s=60.0))
        await asyncio.sleep(2.0)
        assert not waiting.done()
        await store.apply(moved(5))
        began = loop.time()
        assert await waiting is True
        assert loop.time() - began <= stores.POLL_MAX_S

    run(program)


def test_a_long_wait_polls_less_and_less_often() -> None:
    async def program() -> int:
        store = simulated()
        calls = counted(store)
        await store.wait(TOPIC, 0, beyond=None, timeout_s=10.0)
        return calls["read"]

    assert 40 < run(program) < 60


# ---- configurations


class Swaps:
    """Replaces the compare-and-set of a store: each attempt is lost, refused or unanswered, as the test says."""

    def __init__(self, store: CassandraStore, *outcomes: str) -> None:
        self.outcomes = list(outcomes)
        self.attempts = 0
        self._swap = store._swap
        store._swap = self  # type: ignore[method-assign,assignment]

    async def __call__(self, *given: Any) -> bool:
        self.attempts += 1
        outcome = self.outcomes.pop(0) if self.outcomes else "applied"
        if outcome in ("applied", "applied without an answer"):
            assert await self._swap(*given)
        if outcome.endswith("without an answer"):
            raise OutcomeUnknown("no answer")
        return outcome == "applied"


@pytest.mark.parametrize(
    ("outcomes", "attempts"),
    [
        (["applied"], 1),
        (["applied without an answer"], 1),
        (["lost without an answer"], 2),
        (["lost"] * (SERIAL_ATTEMPTS - 1), SERIAL_ATTEMPTS),
    ],
)
async def test_a_configuration_is_set_even_if_an_attempt_has_no_answer(outcomes: list[str], attempts: int) -> None:
    store, config = simulated(), topic_config(TOPIC)
    swaps = Swaps(store, *outcomes)
    assert await store.set_topic_config(TOPIC, config, expected=None) == config
    assert swaps.attempts == attempts
    assert await store.topic_config(TOPIC) == config


async def test_a_configuration_that_cannot_be_set_is_given_up() -> None:
    store = simulated()
    swaps = Swaps(store, *["lost"] * 9)
    with pytest.raises(Unavailable, match="concurrent changes"):
        await store.set_topic_config(TOPIC, topic_config(TOPIC), expected=None)
    assert swaps.attempts == SERIAL_ATTEMPTS


async def test_another_processs_configuration_is_returned_and_not_overwritten() -> None:
    store, first = simulated(), topic_config(TOPIC)
    await store.set_topic_config(TOPIC, first, expected=None)
    other = msgspec.structs.replace(first, epoch=first.epoch + 1)
    assert await store.set_topic_config(TOPIC, other, expected=None) == first
    assert await store.set_topic_config(TOPIC, other, expected=other) == first
    assert await store.set_topic_config(TOPIC, other, expected=first) == other
    assert await store.topic_config(TOPIC) == other


async def test_a_change_that_is_refused_returns_the_configuration_in_force() -> None:
    store, first = simulated(), topic_config(TOPIC)
    await store.set_topic_config(TOPIC, first, expected=None)
    other = msgspec.structs.replace(first, epoch=first.epoch + 1)
    swaps = Swaps(store, "lost")
    assert await store.set_topic_config(TOPIC, other, expected=first) == first
    assert swaps.attempts == 1


async def test_a_configuration_that_cannot_be_decoded_is_corrupt() -> None:
    store = simulated()
    assert await store._swap(stores.CONFIG, TOPIC, "no json", None)
    with pytest.raises(Corrupt, match="damaged"):
        await store.topic_config(TOPIC)


async def test_the_number_of_segments_is_read_once() -> None:
    store = simulated()
    calls = counted(store)
    for _ in range(2):
        assert await store.head(Key("nobody", "a")) is None
        assert await store.heads("nobody", ["a"]) == {}
    assert calls["read"] == calls["read_serial"] == 4, "a missing configuration was cached"
    await store.set_topic_config(TOPIC, topic_config(TOPIC), expected=None)
    calls.clear()
    for _ in range(3):
        assert await store.head(Key(TOPIC, "a")) is None
    assert (calls["read_serial"], calls["read"]) == (0, 3)
    assert await store.heads(TOPIC, []) == {}
    assert calls["read"] == 3


# ---- heads


async def filled(store: CassandraStore, *actions: Any) -> TopicConfig:
    config = await store.set_topic_config(TOPIC, topic_config(TOPIC), expected=None)
    await replicate_slice(store, TOPIC, 0, records_of(list(actions)), config)
    return config


async def test_a_journal_that_no_longer_expires_is_not_listed_as_expired() -> None:
    """The head is read again after the scan has found the journal."""
    store = simulated()
    await filled(store, ("a", append(1)), ("b", append(1)))
    found = await store.heads(TOPIC, ["a", "b"])

    def expiring(id: str, at_ms: int | None) -> Head:
        head = found[id]
        after_ms = None if at_ms is None else at_ms - head.touched_ms
        return msgspec.structs.replace(head, expire_after_ms=after_ms)

    at_ms = max(head.touched_ms for head in found.values()) + 100
    for id in "ab":
        put = PutHead(Key(TOPIC, id), expiring(id, at_ms))
        stamp = write_stamp(put.head.position, rev=1)
        for batch in head_batches([put], topic_config(TOPIC).segments, tags={}, stamp=stamp):
            await store.write(batch)
    now: dict[str, Head] = {}

    async def heads(topic: str, ids: Any) -> dict[str, Head]:
        return {id: now[id] for id in ids if id in now}

    async def expired(now_ms: int) -> list[str]:
        return sorted([id async for id, _ in store.expired(TOPIC, now_ms=now_ms)])

    assert await expired(at_ms - 1) == []
    assert await expired(at_ms) == ["a", "b"]
    store.heads = heads  # type: ignore[method-assign]
    now["b"] = expiring("b", at_ms)
    for later in (None, expiring("a", at_ms + 1), expiring("a", None)):
        now.pop("a", None)
        if later is not None:
            now["a"] = later
        assert await expired(at_ms) == ["b"]
    now["a"] = expiring("a", at_ms)
    assert await expired(at_ms) == ["a", "b"]


async def test_a_re_created_journal_is_not_listed_as_a_grave() -> None:
    store = simulated()
    await filled(store, ("a", append(1)), ("a", purge()), ("b", append(1)), ("b", purge()), ("c", append(1)))
    graves = {id: head async for id, head in store.graves(TOPIC)}
    assert sorted(graves) == ["a", "b"]

    async def heads(topic: str, ids: Any) -> dict[str, Head]:
        assert set(ids) <= {"a", "b"}
        now = {"a": msgspec.structs.replace(graves["a"], live=True), "b": graves["b"]}
        return {id: now[id] for id in ids}

    store.heads = heads  # type: ignore[method-assign]
    assert [id async for id, _ in store.graves(TOPIC)] == ["b"]
    assert [id async for id in store.ids(TOPIC)] == ["c"]


async def test_a_topic_without_a_configuration_is_empty_and_refuses_writes() -> None:
    store = simulated()
    calls = counted(store)
    assert [id async for id in store.ids("nobody")] == []
    assert [each async for each in store.graves("nobody")] == []
    assert [each async for each in store.expired("nobody", now_ms=2**60)] == []
    assert [each async for each in store.parked("nobody")] == []
    assert calls["read"] == calls["read_serial"] == 4, "a segment of the topic was read"
    grave = Head(False, 1, 1, Position(1, 0), Position(1, 1), 10, None, 0, (), None, ())
    await store.remove_graves("nobody", [("a", grave)])
    repair = Repair(key=Key("nobody", "a"), partition=0, pointer=Pointer(Position(1, 1), 5), rev=1, head=grave)
    with pytest.raises(NotFound, match="nobody"):
        await store.repair(repair)


# ---- writing


class Writes:
    """Counts the writes of a store that are in flight."""

    def __init__(self, store: CassandraStore) -> None:
        self.most = self.in_flight = self.batches = 0
        self._write = store.write
        store.write = self

    async def __call__(self, batch: Any) -> None:
        self.in_flight += 1
        self.batches += 1
        self.most = max(self.most, self.in_flight)
        for _ in range(3):
            await asyncio.sleep(0)
        try:
            await self._write(batch)
        finally:
            self.in_flight -= 1


async def test_a_slice_bounds_its_concurrent_batches() -> None:
    store = simulated(in_flight_max=3, partitions_together_max=1)
    config = await store.set_topic_config(TOPIC, topic_config(TOPIC), expected=None)
    writes = Writes(store)
    records = records_of([(f"j-{number}", append(1)) for number in range(40)])
    await replicate_slice(store, TOPIC, 0, records, config)
    assert writes.most == 6
    assert len([id async for id in store.ids(TOPIC)]) == 40


async def test_unparking_bounds_its_concurrent_writes() -> None:
    store = simulated(in_flight_max=2)
    await store.set_topic_config(TOPIC, topic_config(TOPIC), expected=None)
    parked = [Parked(TOPIC, 0, Position(FIRST_EPOCH, offset), 5, "a", "damaged", b"value") for offset in range(20)]
    await store.apply(SliceWrites(TOPIC, 0, None, Pointer(Position(FIRST_EPOCH, 20), 5), (), tuple(parked)))
    assert len([each async for each in store.parked(TOPIC)]) == 20
    writes = Writes(store)
    await store.unpark(parked)
    assert (writes.most, writes.batches) == (4, 20)
    assert [each async for each in store.parked(TOPIC)] == []


async def test_snapshots_beyond_their_slots_are_deleted_with_one_more_write() -> None:
    store = simulated()
    calls = counted(store)
    key, at = Key(TOPIC, "a"), Position(FIRST_EPOCH, 0)
    for seq_nr in range(1, 5):
        await store.save_snapshot(key, at, StoredSnapshot(seq_nr, 0, b"x", 5), slots=3)
        assert calls["write_once"] == (seq_nr if seq_nr <= 3 else seq_nr + 1)
    assert [each.seq_nr for each in await store.snapshots(key, at)] == [4, 3, 2]
    await store.delete_snapshots(key, at, to=3)
    assert [each.seq_nr for each in await store.snapshots(key, at)] == [4]


async def test_a_snapshot_is_saved_even_if_older_ones_cannot_be_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    store = simulated()
    key, at = Key(TOPIC, "a"), Position(FIRST_EPOCH, 0)

    async def fail(*given: Any, **options: Any) -> Any:
        raise Unavailable("no node answers")

    for seq_nr in (1, 2):
        with monkeypatch.context() as patched:
            patched.setattr(store._session, "read", fail)
            # Unavailable would mean that nothing was changed.
            await store.save_snapshot(key, at, StoredSnapshot(seq_nr, 0, b"x", 5), slots=1)
    assert [each.seq_nr for each in await store.snapshots(key, at)] == [2, 1]
    await store.save_snapshot(key, at, StoredSnapshot(3, 0, b"x", 5), slots=1)
    assert [each.seq_nr for each in await store.snapshots(key, at)] == [3]
