"""Streams by tag: catching up compared with the bare driver, the cost of tags in replication, and live latency.

The log is embedded. The store is too, unless `--store` is `cassandra` or `both`: then `./dev bench` starts a node,
unless one is running or `--address host:port` names one.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import apsw

from bench.replication import replicate
from bench.servers import driver_session, running
from bench.tag_live import followed, job_live
from bench.timing import Rounds, percentile, report, timed
from tidebook.core.event import Event
from tidebook.replication.ticks import Ticker, tick
from tidebook.wiring.book import Book
from tidebook.wiring.settings import Section, Settings

KEYSPACE = "tidebook_bench"
PAYLOAD = "x" * 200
JOURNALS, RECORD_EVENTS, PAGE, ROUNDS = 200, 50, 1000, 5
#: The delay of a stream without a horizon, by default.
DELAY_MS = 5000.0
PARTS = ("slices", "catch-up", "live", "cost", "job-live")
TARGETS = {"catch_up_vs_driver": 0.7, "job_tagged_vs_plain": 0.6, "live_p50_ms": 50.0, "job_live_p50_ms": 50.0}
ON_CASSANDRA = {"live_p50_ms": 250.0, "job_live_p50_ms": 250.0}
LIVE_EVENTS, LIVE_WARM_UP = 50, 12
COMPACTED_S_MAX = 180.0
#: The poll interval of an idle replication.
REPLICATE_EVERY_S = 0.005


def main(argv: list[str]) -> None:
    """Run all parts and print the ratios."""
    parser = argparse.ArgumentParser(prog="bench tags", description=__doc__)
    parser.add_argument("--store", choices=["embedded", "cassandra", "both"], default="embedded")
    parser.add_argument("--address", help="host:port of a running Cassandra")
    parser.add_argument("--events", type=int, default=1_000_000, help="the number of tagged events to catch up with")
    parser.add_argument("--quick", action="store_true", help="a fiftieth of the work")
    parser.add_argument("--only", help=f"parts, separated by commas: {', '.join(PARTS)}")
    options = parser.parse_args(argv)
    only = set(options.only.split(",")) if options.only else set(PARTS)
    stores = ["embedded", "cassandra"] if options.store == "both" else [options.store]
    ratios: dict[str, float] = {}
    figures: dict[str, float] = {"delay_ms": DELAY_MS}
    targets: dict[str, float] = {}
    for store in stores:
        address = (options.address or running()["cassandra"]["address"]) if store == "cassandra" else None
        before = f"{store}_" if len(stores) > 1 else ""
        with tempfile.TemporaryDirectory(prefix="tidebook-bench-") as folder:
            bench = Bench(Path(folder), address, options.events // 50 if options.quick else options.events)
            bench.run(only)
        ratios |= {f"{before}{name}": value for name, value in bench.ratios().items()}
        figures |= {f"{before}{name}": round(value, 3) for name, value in bench.figures.items()}
        of_store = TARGETS if address is None else {**TARGETS, **ON_CASSANDRA}
        targets |= {f"{before}{name}": value for name, value in of_store.items() if f"{before}{name}" in ratios}
    report("tags", ratios, figures, targets)


class Bench:
    """One run with its own topics and tag."""

    def __init__(self, folder: Path, address: str | None, count: int) -> None:
        self.folder = folder
        self.address = address
        self.store = None if address is None else f"cassandra://{address}/{KEYSPACE}"
        self.count = count // RECORD_EVENTS * RECORD_EVENTS
        self.tag = f"bench-{uuid.uuid4().hex[:8]}"
        self.rounds = Rounds()
        self.figures: dict[str, float] = {}

    def ratios(self) -> dict[str, float]:
        """Return the ratios of the parts that were run."""
        f = self.figures
        found = {
            name: f[above] / f[below]
            for name, above, below in (
                ("catch_up_vs_driver", "catch_up_per_s", "driver_per_s"),
                ("catch_up_with_payloads_vs_driver", "catch_up_with_payloads_per_s", "driver_per_s"),
                ("job_tagged_vs_plain", "job_tagged_per_s", "job_plain_per_s"),
                ("slices_tagged_vs_plain", "slices_tagged_per_s", "slices_plain_per_s"),
            )
            if above in f and below in f
        }
        return found | {
            name: f[name] for name in ("live_p50_ms", "job_live_p50_ms", "below_horizon_p50_ms") if name in f
        }

    def run(self, only: set[str]) -> None:
        if only & {"slices", "catch-up", "live"}:
            asyncio.run(self.streams(only))
        if "cost" in only:
            self.cost()
        if "job-live" in only:
            self.live_after_job()

    def settings(self, folder: Path, *, partitions: int) -> Settings:
        sections = {"journal": Section(None, {"partitions": partitions})}
        if self.store is not None:
            sections["store"] = Section(self.store)
        return Settings(folder, sections)

    def cost(self) -> None:
        """Measure the cost of a tag in the pipeline's job."""
        from bench.tag_cost import tag_cost

        settings = self.settings(self.folder / "job", partitions=8)
        self.figures |= tag_cost(settings, self.tag, min(self.count, 300_000))

    def live_after_job(self) -> None:
        """Measure the latency of a stream whose events the pipeline's job replicates."""
        self.figures |= job_live(self.folder / "job-live", self.store)

    async def streams(self, only: set[str]) -> None:
        """Run the parts that need no Spark, on one book."""
        topic = f"tagged-{self.tag}"
        async with Book(self.settings(self.folder / "book", partitions=1)) as book:
            if "slices" in only:
                for number in range(ROUNDS):
                    await self.replication(book, number)
            if "catch-up" in only:
                await self.fill(book, topic, self.count, tags=(self.tag,))
                with timed(f"replicate {self.count:,} events"):
                    await self.settle(book, topic)
                if self.address is not None:
                    await self.compacted(self.address)
                for _ in range(ROUNDS):
                    await self.catch_up(book, topic)
            self.figures |= self.rounds.medians()
            if "live" in only:
                await self.live(book, topic)
                await self.shown(book, topic)

    async def replication(self, book: Book, number: int) -> None:
        """Measure replication without Spark, with and without a tag, in separate topics, of 50 events per record."""
        part = min(self.count, 100_000) // 2
        for name in ("plain", "tagged") if number % 2 else ("tagged", "plain"):
            topic = f"{name}-{number}-{self.tag}"
            await self.fill(book, topic, part, tags=(f"cost-{number}-{self.tag}",) if name == "tagged" else ())
            with timed(f"replicate {part:,} events, {name}") as watch:
                await replicate(book, topic)
            self.rounds.add(f"slices_{name}_per_s", watch.rate(part))

    async def fill(self, book: Book, topic: str, count: int, *, tags: tuple[str, ...]) -> None:
        journal = book.journal(topic)
        events = [Event(PAYLOAD, tags=tags)] * RECORD_EVENTS
        with timed(f"append {count:,} events"):
            for first in range(0, count // RECORD_EVENTS, JOURNALS):
                ids = range(min(JOURNALS, count // RECORD_EVENTS - first))
                await asyncio.gather(*(journal.append(f"j-{n}", events) for n in ids))

    async def settle(self, book: Book, topic: str) -> None:
        await replicate(book, topic)
        await tick(book.log, book.store, [topic])
        await replicate(book, topic)

    async def catch_up(self, book: Book, topic: str) -> None:
        with timed(f"catch up with {self.count:,} events") as watch:
            found = 0
            async for _ in book.tags.read(self.tag, topics=[topic]):
                found += 1
        assert found == self.count, (found, self.count)
        self.rounds.add("catch_up_per_s", watch.rate(self.count))
        with timed("the same, with every payload") as watch:
            size = 0
            async for event in book.tags.read(self.tag, topics=[topic]):
                size += len(event.payload)
        assert size == self.count * len(PAYLOAD)
        self.rounds.add("catch_up_with_payloads_per_s", watch.rate(self.count))
        with timed("the same rows by the bare driver") as watch:
            rows = self.sqlite_rows() if self.address is None else await self.cassandra_rows(self.address)
        assert rows == self.count, (rows, self.count)
        self.rounds.add("driver_per_s", watch.rate(self.count))

    def sqlite_rows(self) -> int:
        """Read the same rows page by page with a bare loop, without decoding."""
        connection = apsw.Connection(str(self.folder / "book" / "store.db"), flags=apsw.SQLITE_OPEN_READONLY)
        place = 'log_ms, topic, partition, "offset", "index", epoch'
        sql = f"""SELECT * FROM tag_views WHERE tag = ?
            AND ({place}) > (?, ?, ?, ?, ?, ?) ORDER BY {place} LIMIT {PAGE}"""
        found = 0
        last: tuple[Any, ...] = (0, "", -1, -1, -1, -1)
        while rows := connection.execute(sql, (self.tag, *last)).fetchall():
            found += len(rows)
            last = rows[-1][1:7]
        connection.close()
        return found

    async def compacted(self, address: str) -> None:
        """Wait until the node has finished its compactions, which would slow down either side."""
        with timed("waiting until the node has compacted"):
            async with asyncio.timeout(COMPACTED_S_MAX), driver_session(address) as session:
                while [*await session.query("SELECT * FROM system_views.sstable_tasks")]:  # noqa: ASYNC110
                    await asyncio.sleep(0.5)

    async def cassandra_rows(self, address: str) -> int:
        """Read the tag's buckets with the driver's paging."""
        found = 0
        async with driver_session(address, KEYSPACE) as session:
            buckets = await session.create_prepared("SELECT bucket FROM tag_buckets WHERE tag = ?")
            prepared = await session.create_prepared("SELECT * FROM tag_views WHERE tag = ? AND bucket = ?")
            bound = buckets.bind()
            bound.bind_list([self.tag])
            for row in await session.execute(bound):
                statement = prepared.bind(page_size=PAGE)
                statement.bind_list([self.tag, row.as_tuple()[0]])
                while True:
                    page = await session.execute(statement)
                    found += sum(1 for each in page if each.as_tuple())
                    if not page.has_more_pages():
                        break
                    statement.set_page_state(page.page_state())
        return found

    async def live(self, book: Book, topic: str) -> None:
        """Measure the time from the replication of an event's record to its delivery, with the horizon.

        The horizon is that of all topics of the run, of which all but one are idle. Ticks are sent as the pipeline
        sends them for a follower, and are replicated like any record.
        """
        live = f"live-{topic}"
        await book.journal(live).append("begin", [Event(0)])
        topics = [each for each in await book.store.topics() if each.endswith(self.tag)]
        passed: list[tuple[int, float]] = []

        async def replicate_all() -> None:
            while True:
                await asyncio.gather(*(replicate(book, each) for each in topics))
                pointer = await book.store.pointer(live, 0)
                if pointer is not None and (not passed or passed[-1][0] < pointer.position.offset):
                    passed.append((pointer.position.offset, time.perf_counter()))
                await asyncio.sleep(REPLICATE_EVERY_S)

        async def tick_all() -> None:
            ticker = Ticker(book.log, book.store, topics)
            while True:
                await ticker.pause(await ticker.step())

        took: list[float] = []
        tag = self.new_tag()
        async with followed(book, tag, topics) as arrived:
            tasks = [asyncio.create_task(each) for each in (replicate_all(), tick_all())]
            with timed(f"{LIVE_EVENTS} live events over {len(topics)} topics"):
                for n in range(-LIVE_WARM_UP, LIVE_EVENTS):
                    done = await book.journal(live).append(f"j-{n % 5}", [Event(n, tags={tag})])
                    at = await arrived.get()
                    replicated = next(when for offset, when in passed if offset >= done.offset)
                    if n >= 0:
                        took.append(max(0.0, at - replicated) * 1000)
                    await asyncio.sleep(0.1)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self.figures["live_p50_ms"] = percentile(took, 0.5)
        self.figures["live_p99_ms"] = percentile(took, 0.99)

    async def shown(self, book: Book, topic: str) -> None:
        """Measure the time from the replication of the ticks after an event to its delivery, with one topic."""
        shown = f"shown-{topic}"
        await book.journal(shown).append("begin", [Event(0)])
        took: list[float] = []
        tag = self.new_tag()
        async with followed(book, tag, [shown]) as arrived:
            with timed(f"{LIVE_EVENTS} live events, ticks replicated"):
                for n in range(LIVE_EVENTS):
                    await book.journal(shown).append(f"j-{n % 5}", [Event(n, tags={tag})])
                    await self.settle(book, shown)
                    replicated = time.perf_counter()
                    took.append(max(0.0, await arrived.get() - replicated) * 1000)
                    await asyncio.sleep(0.1)
        self.figures["below_horizon_p50_ms"] = percentile(took, 0.5)

    def new_tag(self) -> str:
        return f"{self.tag}-{uuid.uuid4().hex[:4]}"
