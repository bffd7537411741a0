"""Embedded journals, compared with eventsourcing on SQLite and a bare SQLite loop.

All make their writes durable with an fsync before they return; events have 200 bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import resource
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import UUID

import apsw

import tidebook
from bench.replication import replicate
from bench.timing import report, timed
from tidebook.core.event import Event
from tidebook.core.key import partition_of
from tidebook.journal.append import encode_append
from tidebook.journal.journal import Journal
from tidebook.journal.settings import JournalSettings
from tidebook.runtime.clock import RandomIds
from tidebook.wiring.book import Book

WRITERS = 64
ROUNDS = 4
#: A prime, so that writers spread over all journals.
STRIDE = 7_919
BYTES = b"x" * 200
TARGETS = {
    "writers_64_vs_eventsourcing": 10.0,
    "batch_100_vs_eventsourcing": 2.0,
    "replay_10k_vs_eventsourcing": 3.0,
    "replay_10k_replicated_vs_eventsourcing": 3.0,
    "writers_64_vs_bare_sqlite": 0.1,
    "keys_100k_vs_1k_time": 1.5,
    "read_1m_memory_growth_mb": 50.0,
}


def main(argv: list[str]) -> None:
    """Run all parts and print the ratios."""
    parser = argparse.ArgumentParser(prog="bench journal", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the work")
    options = parser.parse_args(argv)
    scale = 10 if options.quick else 1
    with tempfile.TemporaryDirectory(prefix="tidebook-bench-") as folder:
        bench = Bench(Path(folder), scale)
        bench.run()
    report("journal", bench.ratios(), bench.figures, TARGETS)


class Bench:
    """One run in a temporary folder."""

    def __init__(self, folder: Path, scale: int) -> None:
        self.folder = folder
        self.scale = scale
        self.figures: dict[str, float] = {}

    def run(self) -> None:
        self.eventsourcing()
        asyncio.run(self.tidebook())

    def keep_best(self, name: str, rate: float) -> None:
        """Keep the best of several alternating rounds, because a disk may be slow for seconds."""
        self.figures[name] = max(rate, self.figures.get(name, 0.0))

    def ratios(self) -> dict[str, float]:
        f = self.figures
        return {
            "writers_64_vs_eventsourcing": f["tidebook_writers_64_per_s"] / f["eventsourcing_writers_64_per_s"],
            "batch_100_vs_eventsourcing": f["tidebook_batch_100_per_s"] / f["eventsourcing_batch_100_per_s"],
            "replay_10k_vs_eventsourcing": f["eventsourcing_replay_s"] / f["tidebook_replay_s"],
            "replay_10k_replicated_vs_eventsourcing": f["eventsourcing_replay_s"] / f["tidebook_replay_replicated_s"],
            "writers_64_vs_bare_sqlite": f["tidebook_writers_64_per_s"] / f["bare_sqlite_batch_64_per_s"],
            "keys_100k_vs_1k_time": f["tidebook_1k_keys_per_s"] / f["tidebook_100k_keys_per_s"],
            "read_1m_memory_growth_mb": f["read_1m_memory_growth_mb"],
        }

    # ---- the references

    def eventsourcing(self) -> None:
        from eventsourcing.application import Application
        from eventsourcing.domain import Aggregate, event

        class Thing(Aggregate):
            @event("Happened")
            def happen(self, what: str) -> None:
                self.last = what

        what = BYTES.decode()
        app: Application[UUID] = Application(
            env={
                "PERSISTENCE_MODULE": "eventsourcing.sqlite",
                "SQLITE_DBNAME": str(self.folder / "eventsourcing.db"),
            }
        )
        local = threading.local()

        def save_one(_: int) -> None:
            thing = getattr(local, "thing", None)
            if thing is None:
                thing = local.thing = Thing()
            thing.happen(what)
            app.save(thing)

        count = 6_400 // self.scale
        with ThreadPoolExecutor(WRITERS) as pool, timed("eventsourcing, 64 writers") as watch:
            list(pool.map(save_one, range(count)))
        self.figures["eventsourcing_writers_64_per_s"] = watch.rate(count)

        calls = 500 // self.scale
        thing = Thing()
        app.save(thing)
        with timed("eventsourcing, 100 events a call") as watch:
            for _ in range(calls):
                for _ in range(100):
                    thing.happen(what)
                app.save(thing)
        self.figures["eventsourcing_batch_100_per_s"] = watch.rate(calls * 100)

        long = Thing()
        for _ in range(100):
            for _ in range(100):
                long.happen(what)
            app.save(long)
        best = min(self._replays(lambda: app.repository.get(long.id)))
        self.figures["eventsourcing_replay_s"] = best

    def _replays(self, replay: Callable[[], object]) -> list[float]:
        found = []
        for _ in range(5):
            began = time.perf_counter()
            replay()
            found.append(time.perf_counter() - began)
        return found

    def bare(self) -> None:
        """Insert the records that 64 writers would send (offset, time, key and value), under the cheapest key."""
        connection = apsw.Connection(str(self.folder / f"bare-{time.monotonic_ns()}.db"))
        connection.pragma("journal_mode", "wal")
        connection.pragma("synchronous", "full")
        connection.execute("CREATE TABLE record(place INTEGER PRIMARY KEY, time_ms INTEGER, key BLOB, value BLOB)")
        config = JournalSettings().topic_config("bare", JournalSettings().partitions)
        ids = [f"j-{n}" for n in range(WRITERS)]
        bases = [partition_of(id, config.partitions) << 40 for id in ids]
        _, value = encode_append(config, RandomIds(), [Event(BYTES)])
        keys = [id.encode() for id in ids]
        count = 128_000 // ROUNDS // self.scale // WRITERS * WRITERS
        offset = 0
        with timed("bare SQLite, batches of 64") as watch:
            while offset < count:
                now_ms = time.time_ns() // 1_000_000
                with connection:
                    rows = [(bases[i] + offset + i, now_ms, keys[i], value) for i in range(WRITERS)]
                    connection.executemany("INSERT INTO record VALUES (?, ?, ?, ?)", rows)
                offset += WRITERS
        self.keep_best("bare_sqlite_batch_64_per_s", watch.rate(count))
        connection.close()

    # ---- ours

    async def tidebook(self) -> None:
        async with tidebook.open(self.folder / "book") as book:
            for _ in range(ROUNDS):
                self.bare()
                await self.writers(book)
            await self.batches(book)
            await self.replay(book)
            await self.keys(book)
            await self.memory(book)

    async def writers(self, book: Book) -> None:
        journal = book.journal("writers")
        each = 2_000 // ROUNDS // self.scale
        await asyncio.gather(*(journal.append(f"j-{n}", [Event(BYTES)]) for n in range(WRITERS)))

        async def writer(n: int) -> None:
            for _ in range(each):
                await journal.append(f"j-{n}", [Event(BYTES)])

        with timed("tidebook, 64 writers") as watch:
            await asyncio.gather(*(writer(n) for n in range(WRITERS)))
        self.keep_best("tidebook_writers_64_per_s", watch.rate(each * WRITERS))

    async def batches(self, book: Book) -> None:
        journal = book.journal("batches")
        calls = 500 // self.scale
        events = [Event(BYTES)] * 100
        await journal.append("warm", events)
        with timed("tidebook, 100 events a call") as watch:
            for _ in range(calls):
                await journal.append("j", events)
        self.figures["tidebook_batch_100_per_s"] = watch.rate(calls * 100)

    async def replay(self, book: Book) -> None:
        journal = book.journal("replay")
        for _ in range(100):
            await journal.append("j", [Event(BYTES)] * 100)
        self.figures["tidebook_replay_s"] = await self._replay(journal, "tidebook, replay of 10,000 from the log")
        await replicate(book, "replay")
        self.figures["tidebook_replay_replicated_s"] = await self._replay(
            journal, "tidebook, replay of 10,000 from the store"
        )

    async def _replay(self, journal: Journal, what: str) -> float:
        best = float("inf")
        for _ in range(5):
            with timed(what) as watch:
                seen = 0
                async for _event in journal.read("j"):
                    seen += 1
            assert seen == 10_000
            best = min(best, watch.seconds)
        return best

    async def keys(self, book: Book) -> None:
        """Measure appends to few and to many existing journals."""
        sizes = (("1k", 1_000), ("100k", 100_000 // self.scale))
        for name, keys in sizes:
            journal = book.journal(f"keys-{name}")
            for start in range(0, keys, 5_000):
                some = range(start, min(keys, start + 5_000))
                await journal.append_many([(f"k-{n}", [Event(BYTES)]) for n in some])
        for _ in range(ROUNDS):
            for name, keys in sizes:
                await self._keys(book.journal(f"keys-{name}"), name, keys)

    async def _keys(self, journal: Journal, name: str, keys: int) -> None:
        appends = 50_000 // ROUNDS // self.scale

        async def writer(n: int) -> None:
            for i in range(n, appends, WRITERS):
                await journal.append(f"k-{i * STRIDE % keys}", [Event(BYTES)])

        with timed(f"tidebook, 64 writers over {keys:,} journals") as watch:
            await asyncio.gather(*(writer(n) for n in range(WRITERS)))
        self.keep_best(f"tidebook_{name}_keys_per_s", watch.rate(appends))

    async def memory(self, book: Book) -> None:
        journal = book.journal("long")
        count = 1_000_000 // self.scale
        with timed(f"tidebook, appending {count:,} events"):
            for _ in range(count // 1_000):
                await journal.append("j", [Event(BYTES)] * 1_000)
        gc.collect()
        before = resident_mb()
        most = before
        with timed(f"tidebook, reading {count:,} events") as watch:
            seen = 0
            async for _event in journal.read("j"):
                seen += 1
                if seen % 10_000 == 0:
                    most = max(most, resident_mb())
        assert seen == count
        self.figures["tidebook_read_1m_per_s"] = watch.rate(count)
        self.figures["read_1m_memory_growth_mb"] = most - before


def resident_mb() -> float:
    """Return the resident memory of this process."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
