"""The embedded log and store alone, compared with a bare SQLite loop of the same durability."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

import apsw

from bench.timing import report, timed
from tidebook.core.head import Head
from tidebook.core.key import Key
from tidebook.core.position import Position
from tidebook.core.replication_plan import EventRow, Pointer, PutEvents, PutHead, SliceWrites
from tidebook.log.port import Acknowledged, Outgoing
from tidebook.store.port import StoreWriter
from tidebook.wiring.book import Book
from tidebook.wiring.book import open as open_book

WRITERS, BATCH = 64, 64
VALUE = b"x" * 250
KEYS, EVENTS = 200, 50
TARGETS = {"sends_64_vs_bare_sqlite": 0.25, "apply_rows_vs_bare_sqlite": 0.5}


def main(argv: list[str]) -> None:
    """Run all parts and print the ratios."""
    parser = argparse.ArgumentParser(prog="bench embedded", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the work")
    count = 20_000 if parser.parse_args(argv).quick else 200_000
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="tidebook-bench-") as folder:
        bare(Path(folder) / "bare.db", count, figures)
        asyncio.run(tidebook(Path(folder) / "book", count, figures))
    ratios = {
        "sends_64_vs_bare_sqlite": figures["sends_64_per_s"] / figures["bare_sqlite_batch_64_per_s"],
        "apply_rows_vs_bare_sqlite": figures["apply_rows_per_s"] / figures["bare_sqlite_batch_64_per_s"],
    }
    report("embedded", ratios, figures, TARGETS)


def bare(path: Path, count: int, figures: dict[str, float]) -> None:
    """Measure a table without an index that one thread fills in batches of 64."""
    connection = apsw.Connection(str(path))
    connection.execute("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL").fetchall()
    connection.execute("CREATE TABLE record (o INTEGER PRIMARY KEY, time_ms INTEGER, key BLOB, value BLOB)")
    with timed("bare SQLite, commits of 64") as watch:
        for first in range(0, count, BATCH):
            rows = [(n, time.time_ns() // 1_000_000, b"key-%d" % n, VALUE) for n in range(first, first + BATCH)]
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany("INSERT INTO record VALUES (?, ?, ?, ?)", rows)
            connection.execute("COMMIT")
    figures["bare_sqlite_batch_64_per_s"] = watch.rate(count)
    connection.close()


async def tidebook(folder: Path, count: int, figures: dict[str, float]) -> None:
    """Measure the log, then the store."""
    async with open_book(folder) as book:
        await sends(book, count, figures)
        await slices(book.store, count, figures)
    figures["records_per_commit"] = count / max(1, book.metrics.counted("sqlite_commits", file="log.db"))


async def sends(book: Book, count: int, figures: dict[str, float]) -> None:
    """Measure 64 writers that send one record at a time, then a scan of all records."""
    log, loop, partitions = book.log, asyncio.get_running_loop(), 4
    await log.create_topic("bench", partitions)

    async def write(writer: int) -> None:
        for n in range(count // WRITERS):
            future: asyncio.Future[object] = loop.create_future()
            log.send(Outgoing("bench", writer % partitions, b"key-%d" % (n % 1000), VALUE), future.set_result)
            assert type(await future) is Acknowledged

    with timed("64 writers, one record a send") as watch:
        await asyncio.gather(*(write(writer) for writer in range(WRITERS)))
    figures["sends_64_per_s"] = watch.rate(count // WRITERS * WRITERS)
    read = 0
    with timed("scan of all records") as watch:
        for partition in range(partitions):
            start, stop = 0, await log.end("bench", partition)
            while start < stop:
                batch = await log.read("bench", partition, start=start, stop=stop)
                start, read = batch.next_offset, read + len(batch.records)
    figures["scan_records_per_s"] = watch.rate(read)


async def slices(store: StoreWriter, count: int, figures: dict[str, float]) -> None:
    """Measure slices of 200 journals with 50 events each, then a scan of all events."""
    pointer: Pointer | None = None
    seconds = 0.0
    for number in range(count // (KEYS * EVENTS)):
        writes = _slice(number, pointer)
        pointer = writes.pointer
        with timed(f"slice {number + 1}") as watch:
            await store.apply(writes)
        seconds += watch.seconds
    figures["apply_rows_per_s"] = count / seconds
    read = 0
    with timed("scan of all events") as watch:
        for n in range(KEYS):
            key, after = Key("bench", f"journal-{n}"), 0
            head = await store.head(key)
            assert head is not None
            while page := await store.events(key, head, after=after, to=head.seq_nr, limit=1000):
                after, read = page[-1].seq_nr, read + len(page)
    figures["scan_events_per_s"] = watch.rate(read)


def _slice(number: int, began: Pointer | None) -> SliceWrites:
    keys = []
    for n in range(KEYS):
        key, first = Key("bench", f"journal-{n}"), number * EVENTS + 1
        at = [Position(1, (number * KEYS + n) * EVENTS + i) for i in range(EVENTS)]
        rows = tuple(EventRow(first + i, VALUE, 1, at[i], 0) for i in range(EVENTS))
        head = Head(True, rows[-1].seq_nr, 0, Position(1, 0), at[-1], 1000, None, 1, (), None, ())
        keys.append((PutEvents(key, head, rows), PutHead(key, head)))
    return SliceWrites("bench", 0, began, Pointer(Position(1, (number + 1) * KEYS * EVENTS - 1), 1), tuple(keys))
