"""The Cassandra store compared with its bare driver, and that with cassandra-driver: 200-byte events, one node.

`./dev bench` starts the node, unless one is running or `--address host:port` names one.
"""

from __future__ import annotations

import argparse
import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import acsylla

from bench.servers import driver_session, running
from bench.timing import percentile, report, timed
from tidebook.core.head import Head
from tidebook.core.key import Key
from tidebook.core.position import Position
from tidebook.core.replication_plan import EventRow, Pointer, PutEvents, PutHead, SliceWrites
from tidebook.core.topic_config import TopicConfig
from tidebook.runtime.metrics import Metrics
from tidebook.store.port import StoreWriter
from tidebook.wiring.adapters import open_store
from tidebook.wiring.settings import Section, Settings

KEYSPACE = "tidebook_bench"
EVENT = b"x" * 200
SEGMENT_SIZE = 1000
SLICE_EVENTS = 5000
PAGE = 1000
PUT = f"INSERT INTO {KEYSPACE}.journal (id, topic, segment, seq_nr, event) VALUES (?, ?, ?, ?, ?) USING TIMESTAMP ?"
SELECT = (
    f"SELECT event FROM {KEYSPACE}.journal "
    "WHERE id = ? AND topic = ? AND segment = ? AND seq_nr > ? AND seq_nr <= ? LIMIT ?"
)
TARGETS = {"read_1k_vs_driver": 1.5, "read_100k_vs_driver": 1.3, "slice_one_journal_vs_driver": 0.7}


def main(argv: list[str]) -> None:
    """Run all parts and print the ratios."""
    parser = argparse.ArgumentParser(prog="bench cassandra", description=__doc__)
    parser.add_argument("--address", help="host:port of a running Cassandra")
    parser.add_argument("--quick", action="store_true", help="a tenth of the work")
    parser.add_argument("--drivers", action="store_true", help="measure cassandra-driver too")
    options = parser.parse_args(argv)
    bench = Bench(options.address or running()["cassandra"]["address"], 10 if options.quick else 1)
    asyncio.run(bench.run())
    if options.drivers:
        bench.other_driver()
    report("cassandra", bench.ratios(), {name: round(value, 3) for name, value in bench.figures.items()}, TARGETS)


class Bench:
    """One run over a separate topic."""

    def __init__(self, address: str, scale: int) -> None:
        self.address = address
        self.topic = f"bench-{uuid.uuid4().hex}"
        self.long = Key(self.topic, "long")
        self.count = 100_000 // scale
        self.keys = 20_000 // scale
        self.rounds = 200 // scale
        self.head: Head | None = None
        self.figures: dict[str, float] = {}

    def ratios(self) -> dict[str, float]:
        f = self.figures
        return {
            "read_1k_vs_driver": f["store_read_1k_p50_ms"] / f["driver_read_1k_p50_ms"],
            "read_100k_vs_driver": f["store_read_all_s"] / f["driver_read_all_s"],
            "slice_one_journal_vs_driver": f["store_rows_per_s"] / f["driver_rows_per_s"],
        }

    async def run(self) -> None:
        section = Section(f"cassandra://{self.address}/{KEYSPACE}")
        store = await open_store(Settings(Path(), {"store": section}), metrics=Metrics())
        config = TopicConfig(topic_id=self.topic, partitions=1, segment_size=SEGMENT_SIZE)
        await store.set_topic_config(self.topic, config, expected=None)
        try:
            async with driver_session(self.address) as driver:
                await self.writes(store, driver)
                await self.reads(store, driver)
            await self.many_keys(store)
        finally:
            await store.close()

    async def writes(self, store: StoreWriter, driver: Any) -> None:
        """Measure a journal that is filled slice by slice, then the same number of rows written by the bare driver."""
        slices = [self.slice_of(first) for first in range(1, self.count + 1, SLICE_EVENTS)]
        with timed(f"{self.count:,} events into one journal") as watch:
            for writes in slices:
                await store.apply(writes)
        self.figures["store_rows_per_s"] = watch.rate(self.count)
        self.head = await store.head(self.long)
        with timed(f"{self.count:,} rows by the bare driver, 100 a batch, 64 batches at once") as watch:
            await self.driver_writes(driver)
        self.figures["driver_rows_per_s"] = watch.rate(self.count)
        singles = self.count // 5
        with timed(f"{singles:,} single rows by the bare driver, 256 at once") as watch:
            await self.driver_singles(driver, singles)
        self.figures["driver_singles_per_s"] = watch.rate(singles)

    def slice_of(self, first: int) -> SliceWrites:
        last = min(first + SLICE_EVENTS, self.count + 1) - 1
        at = Position(1, last)
        head = Head(True, last, 0, Position(1, 0), at, SEGMENT_SIZE, None, 0, (), None, ())
        rows = tuple(EventRow(n, EVENT, 1_700_000_000_000, Position(1, n), 0) for n in range(first, last + 1))
        key_writes = (PutEvents(self.long, head, rows), PutHead(self.long, head))
        return SliceWrites(self.topic, 0, None, Pointer(at, 0), (key_writes,))

    async def driver_writes(self, driver: Any) -> None:
        prepared = await driver.create_prepared(PUT)
        waiting = iter(range(1, self.count + 1, 100))
        cell = b"x" * 223

        async def work() -> None:
            for first in waiting:
                batch = acsylla.create_batch_unlogged()
                for n in range(first, first + 100):
                    batch.add_statement(prepared.bind(["bare", self.topic, (n - 1) // SEGMENT_SIZE, n, cell, n]))
                await driver.execute_batch(batch)

        await asyncio.gather(*(work() for _ in range(64)))

    async def driver_singles(self, driver: Any, singles: int) -> None:
        prepared = await driver.create_prepared(PUT)
        waiting = iter(range(singles))
        cell = b"x" * 223

        async def work() -> None:
            for n in waiting:
                await driver.execute(prepared.bind([f"a{n}", self.topic, 0, 1, cell, n]))

        await asyncio.gather(*(work() for _ in range(256)))

    async def reads(self, store: StoreWriter, driver: Any) -> None:
        head = self.head
        assert head is not None
        prepared = await driver.create_prepared(SELECT)

        async def own(first: int) -> list[tuple[bytes]]:
            values = ["long", self.topic, first // SEGMENT_SIZE, first, self.count, PAGE]
            return [row.as_tuple() for row in await driver.execute(prepared.bind(values, page_size=PAGE))]

        async def own_all() -> None:
            for first in range(0, self.count, PAGE):
                assert len(await own(first)) == PAGE

        async def ours_all() -> None:
            after = 0
            while page := await store.events(self.long, head, after=after, to=head.seq_nr, limit=PAGE):
                after = page[-1].seq_nr
            assert after == self.count

        async def ours() -> None:
            assert len(await store.events(self.long, head, after=0, to=PAGE, limit=PAGE)) == PAGE

        await ours_all()  # warms up the node, and the store learns the size of events
        await own_all()
        took = await alternately({"driver": lambda: own(0), "store": ours}, self.rounds)
        for name, times in took.items():
            self.figures[f"{name}_read_1k_p50_ms"] = percentile(times, 0.5) * 1000
        took = await alternately({"driver": own_all, "store": ours_all}, 5)
        for name, times in took.items():
            self.figures[f"{name}_read_all_s"] = min(times)

    async def many_keys(self, store: StoreWriter) -> None:
        """Measure slices of many journals with one event each, whose heads are read and written."""
        ids = [f"key-{i}" for i in range(self.keys)]
        slices = []
        for start in range(0, self.keys, SLICE_EVENTS):
            writes, at = [], Position(1, 0)
            for i, id in enumerate(ids[start : start + SLICE_EVENTS], start):
                at = Position(1, self.count + 1 + i)  # the last of them is the slice's pointer
                head = Head(True, 1, 0, at, at, SEGMENT_SIZE, None, 0, (), None, ())
                key = Key(self.topic, id)
                writes.append((PutEvents(key, head, (EventRow(1, EVENT, 0, at, 0),)), PutHead(key, head)))
            slices.append(SliceWrites(self.topic, 0, None, Pointer(at, 0), tuple(writes)))
        with timed(f"one event into each of {self.keys:,} journals") as watch:
            for each in slices:
                await store.apply(each)
        self.figures["store_journals_per_s"] = watch.rate(self.keys)
        with timed(f"{self.keys:,} heads") as watch:
            for start in range(0, self.keys, SLICE_EVENTS):
                await store.heads(self.topic, ids[start : start + SLICE_EVENTS])
        self.figures["store_heads_per_s"] = watch.rate(self.keys)
        with timed("all ids") as watch:
            listed = sum([1 async for _ in store.ids(self.topic)])
        assert listed == self.keys + 1
        self.figures["store_ids_per_s"] = watch.rate(listed)

    def other_driver(self) -> None:
        """Measure the same writes and reads with cassandra-driver."""
        from cassandra.cluster import Cluster
        from cassandra.concurrent import execute_concurrent
        from cassandra.query import BatchStatement, BatchType

        host, port = self.address.split(":")
        cluster = Cluster([host], port=int(port))
        session = cluster.connect(KEYSPACE)
        put, select = session.prepare(PUT), session.prepare(SELECT)
        cell = b"x" * 223

        def batches() -> Any:
            for first in range(1, self.count + 1, 100):
                batch = BatchStatement(BatchType.UNLOGGED)
                for n in range(first, first + 100):
                    batch.add(put, ("other", self.topic, (n - 1) // SEGMENT_SIZE, n, cell, n))
                yield batch, None

        with timed(f"{self.count:,} rows by cassandra-driver") as watch:
            execute_concurrent(session, batches(), concurrency=64)
        self.figures["cassandra_driver_rows_per_s"] = watch.rate(self.count)
        times = []
        for _ in range(self.rounds):
            began = time.perf_counter()
            bound = select.bind(("long", self.topic, 0, 0, self.count, PAGE))
            bound.fetch_size = PAGE
            assert len(list(session.execute(bound))) == PAGE
            times.append(time.perf_counter() - began)
        self.figures["cassandra_driver_read_1k_p50_ms"] = percentile(times, 0.5) * 1000
        with timed(f"{self.count // 5:,} single rows by cassandra-driver") as watch:
            singles = ((put, (f"s{n}", self.topic, 0, 1, cell, n)) for n in range(self.count // 5))
            execute_concurrent(session, singles, concurrency=256)
        self.figures["cassandra_driver_singles_per_s"] = watch.rate(self.count // 5)
        cluster.shutdown()


async def alternately(acts: dict[str, Callable[[], Awaitable[Any]]], rounds: int) -> dict[str, list[float]]:
    """Return the times of each function, called alternately, so that other load affects all equally."""
    times: dict[str, list[float]] = {name: [] for name in acts}
    for _ in range(rounds):
        for name, act in acts.items():
            began = time.perf_counter()
            await act()
            times[name].append(time.perf_counter() - began)
    return times
