"""Streams by tag: catching up beside the bare driver, what tagging costs the replication, and how live they are.

The log is embedded. The store is too, unless `--store cassandra` names a running one: `--address host:port`, or
`./dev servers start --only cassandra --profile bench`.
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

from tidebook.bench.replication import replicate
from tidebook.bench.servers import running
from tidebook.bench.timing import percentile, report, timed
from tidebook.core.event import Event
from tidebook.tags.ticks import tick
from tidebook.wiring.book import Book
from tidebook.wiring.settings import Section, Settings

KEYSPACE = "tidebook_bench"
PAYLOAD = "x" * 200
JOURNALS, RECORD_EVENTS, PAGE, ROUNDS = 200, 50, 1000, 3
#: The delay that a stream without a horizon stays behind the clock, by default.
DELAY_MS = 5000.0
TARGETS = {"catch_up_vs_driver": 0.7, "replication_tagged_vs_plain": 0.6, "live_p50_ms": 50.0}
LIVE_CASSANDRA_MS = 250.0


def main(argv: list[str]) -> None:
    """Run all parts and print the ratios."""
    parser = argparse.ArgumentParser(prog="bench tags", description=__doc__)
    parser.add_argument("--store", choices=["embedded", "cassandra"], default="embedded")
    parser.add_argument("--address", help="host:port of a running Cassandra")
    parser.add_argument("--events", type=int, default=1_000_000, help="tagged events to catch up with")
    parser.add_argument("--quick", action="store_true", help="a fiftieth of the work")
    options = parser.parse_args(argv)
    address = (options.address or running()["cassandra"]["address"]) if options.store == "cassandra" else None
    with tempfile.TemporaryDirectory(prefix="tidebook-bench-") as folder:
        bench = Bench(Path(folder), address, options.events // 50 if options.quick else options.events)
        asyncio.run(bench.run())
    targets = TARGETS if address is None else {**TARGETS, "live_p50_ms": LIVE_CASSANDRA_MS}
    report("tags", bench.ratios(), {name: round(value, 3) for name, value in bench.figures.items()}, targets)


class Bench:
    """One run with topics and a tag of its own."""

    def __init__(self, folder: Path, address: str | None, count: int) -> None:
        self.folder = folder
        self.address = address
        self.count = count // RECORD_EVENTS * RECORD_EVENTS
        self.tag = f"bench-{uuid.uuid4().hex[:8]}"
        self.figures: dict[str, float] = {"delay_ms": DELAY_MS}

    def ratios(self) -> dict[str, float]:
        f = self.figures
        return {
            "catch_up_vs_driver": f["catch_up_per_s"] / f["driver_per_s"],
            "catch_up_with_payloads_vs_driver": f["catch_up_with_payloads_per_s"] / f["driver_per_s"],
            "replication_tagged_vs_plain": f["replicated_tagged_per_s"] / f["replicated_plain_per_s"],
            "live_p50_ms": f["live_p50_ms"],
        }

    async def run(self) -> None:
        sections = {"journal": Section(None, {"partitions": 1})}
        if self.address is not None:
            sections["store"] = Section(f"cassandra://{self.address}/{KEYSPACE}")
        async with Book(Settings(self.folder, sections)) as book:
            for number in range(ROUNDS):
                await self.replication(book, number)
            topic = f"tagged-{self.tag}"
            await self.fill(book, topic, self.count, tags=(self.tag,))
            with timed(f"replicate {self.count:,} events"):
                await self.settle(book, topic)
            for _ in range(ROUNDS):
                await self.catch_up(book, topic)
            await self.live(book, topic)

    async def replication(self, book: Book, number: int) -> None:
        """The same events without and with a tag, each in a topic of its own."""
        part = min(self.count, 100_000) // 2
        for name in ("plain", "tagged") if number % 2 else ("tagged", "plain"):
            topic = f"{name}-{number}-{self.tag}"
            await self.fill(book, topic, part, tags=(f"cost-{number}-{self.tag}",) if name == "tagged" else ())
            with timed(f"replicate {part:,} events, {name}") as watch:
                await replicate(book, topic)
            self.best(f"replicated_{name}_per_s", watch.rate(part))

    def best(self, name: str, rate: float) -> None:
        """Both sides of a ratio are taken at their best of several rounds, one after the other."""
        self.figures[name] = max(self.figures.get(name, 0.0), rate)

    async def fill(self, book: Book, topic: str, count: int, *, tags: tuple[str, ...]) -> None:
        journal = book.journal(topic)
        events = [Event(PAYLOAD, tags=tags)] * RECORD_EVENTS
        with timed(f"append {count:,} events") as _:
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
        self.best("catch_up_per_s", watch.rate(self.count))
        with timed("the same, and every payload") as watch:
            size = 0
            async for event in book.tags.read(self.tag, topics=[topic]):
                size += len(event.payload)
        assert size == self.count * len(PAYLOAD)
        self.best("catch_up_with_payloads_per_s", watch.rate(self.count))
        with timed("the same rows by the bare driver") as watch:
            rows = self.sqlite_rows() if self.address is None else await self.cassandra_rows(self.address)
        assert rows == self.count, (rows, self.count)
        self.best("driver_per_s", watch.rate(self.count))

    def sqlite_rows(self) -> int:
        """Pages of the same rows, as a bare loop would read them: whole, and nothing decoded."""
        connection = apsw.Connection(str(self.folder / "store.db"), flags=apsw.SQLITE_OPEN_READONLY)
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

    async def cassandra_rows(self, address: str) -> int:
        """The driver's own paging over the tag's buckets."""
        import acsylla

        host, port = address.split(":")
        cluster = acsylla.create_cluster([host], port=int(port), consistency="LOCAL_QUORUM", log_level="disabled")
        session = await cluster.create_session(keyspace=KEYSPACE)
        found = 0
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
        await session.close()
        cluster.destroy()
        return found

    async def live(self, book: Book, topic: str) -> None:
        """From replicated, ticks included, to delivered, with the horizon on."""
        arrived: asyncio.Queue[float] = asyncio.Queue()
        tag = f"{self.tag}-live"
        live = f"live-{topic}"

        async def follow() -> None:
            async for _ in book.tags.read(tag, follow=True, topics=[live]):
                arrived.put_nowait(time.perf_counter())

        task = asyncio.create_task(follow())
        took: list[float] = []
        with timed("50 live events"):
            for n in range(50):
                await book.journal(live).append(f"j-{n % 5}", [Event(n, tags={tag})])
                await self.settle(book, live)
                replicated = time.perf_counter()
                took.append(max(0.0, await arrived.get() - replicated) * 1000)
                await asyncio.sleep(0.1)
        task.cancel()
        self.figures["live_p50_ms"] = percentile(took, 0.5)
        self.figures["live_p99_ms"] = percentile(took, 0.99)
