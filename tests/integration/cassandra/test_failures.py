"""Cassandra is killed, paused, down and restarted: which errors callers get, and what the tables contain afterwards."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tidebook.core.errors import OutcomeUnknown, Unavailable
from tidebook.core.key import Key
from tidebook.core.position import Position
from tidebook.core.replication_plan import TagRow
from tidebook.runtime.clock import SystemClock
from tidebook.runtime.metrics import Metrics
from tidebook.store.cassandra import CassandraSettings, CassandraStore, open_cassandra_store
from tidebook.store.cassandra.mutations import Batch
from tidebook.store.port import StoredSnapshot
from tidebook.tags.tags import Tags
from tidebook.testing.conformance.journal_records import Step, append, delete, purge, records_of, topic_config
from tidebook.testing.conformance.store_suite import assert_equals_fold
from tidebook.testing.replicating import replicate_slice
from tidebook.testing.servers import Cassandra

pytestmark = [pytest.mark.cassandra, pytest.mark.timeout(300)]

#: A caller gets an error within this time, whatever state the node is in.
SOON_S = 6.0
BACK_S = 60.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cassandra]:
    """Start a separate node, because these tests kill and pause it."""
    with Cassandra(tmp_path_factory.mktemp("cassandra") / "node").temporarily() as server:
        yield server


@pytest.fixture(autouse=True)
def serving(server: Cassandra) -> None:
    """Wait until the node serves requests, whatever state the previous test left it in."""
    if server.alive():
        server.resume()
    else:
        server.restart()


@pytest.fixture
async def opened(server: Cassandra) -> AsyncIterator[Callable[..., Awaitable[CassandraStore]]]:
    stores: list[CassandraStore] = []

    async def open_one(**options: Any) -> CassandraStore:
        settings = CassandraSettings.read(server.url, options)
        stores.append(await open_cassandra_store(settings, metrics=Metrics()))
        return stores[-1]

    yield open_one
    for store in stores:
        await store.close()


@pytest.fixture
def topic() -> str:
    return f"t-{uuid4().hex}"


async def until_it_answers(act: Callable[[], Awaitable[Any]]) -> Any:
    """Repeat the call while the node is unavailable, as a caller's own retry would."""
    give_up = time.monotonic() + BACK_S
    while True:
        try:
            return await act()
        except Unavailable:
            assert time.monotonic() < give_up
            await asyncio.sleep(0.1)


def history(keys: int) -> list[Step]:
    """Return concurrent histories of journals with appends, deletes, purges and appends after a purge."""
    steps: list[Step] = []
    for action in (append(7), append(4), delete(5), append(9), purge(), append(6), delete(2)):
        steps += [(f"j-{i}", action) for i in range(keys) if (i + len(steps)) % 5]
    return steps


async def test_a_slice_that_a_kill_interrupted_is_complete_after_the_next_run(
    server: Cassandra, opened: Callable[..., Awaitable[CassandraStore]], topic: str
) -> None:
    store = await opened(write_deadline_s=1.0, write_timeout_s=0.5, partitions_together_max=2)
    config = await store.set_topic_config(topic, topic_config(topic, segments=16), expected=None)
    steps = history(12)
    records = records_of(steps)
    pass_on, count = store.write, 0

    async def killing(batch: Batch) -> None:
        nonlocal count
        count += 1
        if count == 30:
            await asyncio.to_thread(server.kill9)
        await pass_on(batch)

    store.write = killing
    with pytest.raises((Unavailable, OutcomeUnknown)):
        await replicate_slice(store, topic, 0, records, config)
    await asyncio.to_thread(server.restart)
    again = await until_it_answers(opened)
    assert await until_it_answers(lambda: again.pointer(topic, 0)) is None
    await replicate_slice(again, topic, 0, records, config)
    await assert_equals_fold(again, topic, config, steps)


async def test_reads_fail_soon_while_the_node_is_down_and_succeed_when_it_is_back(
    server: Cassandra, opened: Callable[..., Awaitable[CassandraStore]], topic: str
) -> None:
    store = await opened()
    config = await store.set_topic_config(topic, topic_config(topic), expected=None)
    steps: list[Step] = [("a", append(3))]
    await replicate_slice(store, topic, 0, records_of(steps), config)
    key, incarnation = Key(topic, "a"), Position(1, 0)
    head = await store.head(key)
    assert head is not None

    await asyncio.to_thread(server.kill9)
    calls: list[Callable[[], Awaitable[Any]]] = [
        lambda: store.head(key),
        lambda: store.pointer(topic, 0),
        lambda: store.heads(topic, ["a", "b"]),
        lambda: store.events(key, head, after=0, to=3, limit=9),
        lambda: store.topic_config(topic),
        lambda: store.snapshots(key, incarnation),
        lambda: store.set_setting(topic, "1", expected=None),
        lambda: store.wait(topic, 0, beyond=Position(1, 5), timeout_s=60),
        lambda: _listed(store, topic),
        lambda: store.tag_rows(topic, after=None, from_ms=0, until_ms=2**62, limit=9),
        opened,
    ]
    for call in calls:
        began = time.monotonic()
        with pytest.raises(Unavailable):
            await call()
        assert time.monotonic() - began < SOON_S
    began = time.monotonic()
    with pytest.raises(OutcomeUnknown):  # the driver cannot know whether the node received it before it died
        await store.save_snapshot(key, incarnation, StoredSnapshot(1, 2, b"", 0), slots=1)
    assert time.monotonic() - began < SOON_S

    await asyncio.to_thread(server.restart)
    assert await until_it_answers(lambda: store.head(key)) == head
    await assert_equals_fold(store, topic, config, steps)


async def _listed(store: CassandraStore, topic: str) -> list[str]:
    return [id async for id in store.ids(topic)]


def unread_bytes(server: Cassandra) -> int:
    """Return how many bytes were sent to the node and not yet read by it."""
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(int(row[4].split(":")[1], 16) for row in rows if int(row[1].split(":")[1], 16) == server.ports["client"])


@pytest.mark.parametrize("kind", ["write", "compare-and-set"])
async def test_requests_in_flight_when_the_node_dies_have_an_unknown_outcome(
    server: Cassandra, opened: Callable[..., Awaitable[CassandraStore]], topic: str, kind: str
) -> None:
    store = await opened(write_timeout_s=60.0)
    numbers = itertools.count()

    async def act() -> None:
        if kind == "write":
            await store.save_snapshot(Key(topic, "a"), Position(1, 0), StoredSnapshot(1, 2, b"", 0), slots=1)
        else:
            await store.set_setting(f"{topic} {next(numbers)}", "1", expected=None)

    await act()  # prepares its statements
    server.pause()
    before = unread_bytes(server)
    acting = asyncio.create_task(act())
    async with asyncio.timeout(BACK_S):
        while unread_bytes(server) == before:  # noqa: ASYNC110 - there is no event to await
            await asyncio.sleep(0.01)
    await asyncio.to_thread(server.kill9)
    with pytest.raises(OutcomeUnknown):
        await asyncio.wait_for(acting, SOON_S)


async def test_a_frozen_node_is_unavailable_soon_and_serves_again_when_it_thaws(
    server: Cassandra, opened: Callable[..., Awaitable[CassandraStore]], topic: str
) -> None:
    store = await opened()
    config = await store.set_topic_config(topic, topic_config(topic), expected=None)
    server.pause()
    try:
        for _ in range(2):
            began = time.monotonic()
            with pytest.raises(Unavailable):
                await store.pointer(topic, 0)
            assert time.monotonic() - began < SOON_S
    finally:
        server.resume()
    await until_it_answers(lambda: store.pointer(topic, 0))
    await replicate_slice(store, topic, 0, records_of([("a", append())]), config)


async def test_a_page_of_a_tag_is_requested_once_from_a_frozen_node_and_arrives_when_it_thaws(
    server: Cassandra, opened: Callable[..., Awaitable[CassandraStore]], topic: str
) -> None:
    store = await opened()
    # This fixes the bucket size of the whole past, so that reads of it do not look up the bucket sizes.
    await Tags(store=store, clock=SystemClock()).set_bucket_size("minute")
    store = await opened(read_timeout_s=1.0)

    async def page() -> Sequence[TagRow]:
        return await store.tag_rows(topic, after=None, from_ms=0, until_ms=2**62, limit=1000)

    assert await until_it_answers(page) == []  # prepares its statements, and reads the bucket sizes
    server.pause()
    try:
        asked = store._metrics.counted("tag_pages")
        began = time.monotonic()
        with pytest.raises(Unavailable):
            await page()
        assert time.monotonic() - began < SOON_S
        assert store._metrics.counted("tag_pages") == asked + 1
    finally:
        server.resume()
    assert await until_it_answers(page) == []


async def test_writes_of_a_slice_are_retried_until_a_frozen_node_acknowledges_them(
    server: Cassandra, opened: Callable[..., Awaitable[CassandraStore]], topic: str
) -> None:
    store = await opened(write_timeout_s=0.5)
    config = await store.set_topic_config(topic, topic_config(topic), expected=None)
    steps = history(3)
    records = records_of(steps)
    await replicate_slice(store, topic, 0, records[:-9], config)  # prepares every statement
    pass_on, frozen = store.write, asyncio.Event()

    async def freezing(batch: Batch) -> None:
        if not frozen.is_set():
            server.pause()
            frozen.set()
        await pass_on(batch)

    store.write = freezing
    applying = asyncio.create_task(replicate_slice(store, topic, 0, records[-9:], config))
    await frozen.wait()
    done, _ = await asyncio.wait([applying], timeout=2.0)
    server.resume()
    assert not done
    await applying
    assert store._metrics.counted("cassandra_write_retries") > 0
    await assert_equals_fold(store, topic, config, steps)


async def test_a_slice_is_given_up_at_its_deadline(
    server: Cassandra, opened: Callable[..., Awaitable[CassandraStore]], topic: str
) -> None:
    store = await opened(write_timeout_s=0.4, write_deadline_s=1.0)
    config = await store.set_topic_config(topic, topic_config(topic), expected=None)
    pass_on = store.write

    async def freezing(batch: Batch) -> None:
        server.pause()
        await pass_on(batch)

    store.write = freezing
    records = records_of([("a", append())])
    began = time.monotonic()
    try:
        with pytest.raises((OutcomeUnknown, Unavailable)):
            await replicate_slice(store, topic, 0, records, config)
        assert time.monotonic() - began < SOON_S
    finally:
        server.resume()
    store.write = pass_on
    await until_it_answers(lambda: replicate_slice(store, topic, 0, records, config))
    await assert_equals_fold(store, topic, config, [("a", append())])


async def test_a_port_without_a_server_is_unavailable_at_once() -> None:
    settings = CassandraSettings.read("cassandra://127.0.0.1:1/books")
    began = time.monotonic()
    with pytest.raises(Unavailable):
        await open_cassandra_store(settings, metrics=Metrics())
    assert time.monotonic() - began < 2


async def test_a_call_on_a_closed_store_is_unavailable(
    opened: Callable[..., Awaitable[CassandraStore]], topic: str
) -> None:
    store = await opened()
    await store.close()
    await store.close()
    with pytest.raises(Unavailable):
        await store.pointer(topic, 0)


async def test_a_cancelled_call_leaves_the_store_usable(
    opened: Callable[..., Awaitable[CassandraStore]], topic: str
) -> None:
    store = await opened()
    config = await store.set_topic_config(topic, topic_config(topic), expected=None)
    for _ in range(20):
        call = asyncio.create_task(store.heads(topic, ["a", "b", "c"]))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    await replicate_slice(store, topic, 0, records_of([("a", append(2))]), config)
    await assert_equals_fold(store, topic, config, [("a", append(2))])
