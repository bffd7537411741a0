"""One seeded run: replicators that race, pause and die, with concurrent readers, over a simulated cluster.

The store down to the driver's session, the planning and application of slices, and the reader of journals are real.
The cluster, the log and time are simulated.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from itertools import combinations
from typing import Any, NamedTuple

from tests.simulation.cluster import MUCH_LATER_S, NONE, REPLICAS, Batch, Cluster, Driver, Faults
from tests.simulation.cql import AddColumn, CreateTable, DropTable, parse
from tests.simulation.history import IDS, PARTITION, TAGS, TOPIC, ExpectedJournal, History, random_history
from tests.simulation.virtual_time import VirtualTimeLoop
from tidebook.core.errors import LogLost, OutcomeUnknown, TidebookError, Truncated, Unavailable
from tidebook.core.head import Head
from tidebook.core.key import Key
from tidebook.core.position import Position
from tidebook.core.replication_plan import EventRow, Parked, Pointer, TagRow
from tidebook.core.seq_nr import LAST
from tidebook.journal.head_cache import HeadCache
from tidebook.journal.reader import Reader
from tidebook.journal.settings import JournalSettings
from tidebook.journal.view import read_events
from tidebook.log.port import Record
from tidebook.log.port import RecordPage as LogBatch
from tidebook.runtime.metrics import Metrics
from tidebook.store.cassandra import CassandraSettings, CassandraStore
from tidebook.store.cassandra.migrations import BOOTSTRAP, MIGRATIONS
from tidebook.store.cassandra.session import CassandraSession
from tidebook.store.port import StoredSnapshot
from tidebook.testing.replicating import replicate_slice

#: The duration of faults and appends, in seconds of simulated time.
TROUBLE_S = 40.0
EVER_MS = 2**62
PAGE = 1000


class Wrong(AssertionError):
    """The store, or a reader, returned something that differs from the log."""


class SimulatedLog:
    """A log that grows during a run."""

    def __init__(self, records: Sequence[Record], *, like_kafka: bool) -> None:
        self._records = records
        self.size = 0
        self.indexed_by_key = self.end_is_linearizable = not like_kafka

    async def start(self, topic: str, partition: int) -> int:
        return 0

    async def end(self, topic: str, partition: int) -> int:
        return self.size

    async def read(
        self, topic: str, partition: int, *, start: int, stop: int, key: bytes | None = None, limit: int = 1000
    ) -> LogBatch:
        stop = min(stop, self.size)
        records = self._records[start:stop]
        return LogBatch(tuple(record for record in records if key is None or record.key == key), stop)


#: Prepared statements are shared by all clients of all runs, to save preparing them thousands of times.
_PREPARED: dict[str, Any] = {}


class Clients:
    """Opens stores on one cluster, each as if in a separate process."""

    def __init__(self, cluster: Cluster, settings: CassandraSettings) -> None:
        self.cluster = cluster
        self.settings = settings
        self._metrics = Metrics()

    def store(self, *, asks: Sequence[int] | None = None) -> CassandraStore:
        return self.store_of(Driver(self.cluster, asks=asks))

    def store_of(self, driver: Driver) -> CassandraStore:
        session = CassandraSession(driver, driver, self.settings, self._metrics, new_batch=Batch)
        session._prepared = _PREPARED
        return CassandraStore(session, self.settings, self._metrics)


class SavedIncarnation(NamedTuple):
    """A journal incarnation that snapshots were saved for."""

    id: str
    incarnation: Position


class Run:
    """One history and one course of events; the seed determines both."""

    def __init__(self, seed: int, history: History | None = None) -> None:
        self.dice = dice = random.Random(seed)
        self.history = random_history(dice) if history is None else history
        self.config = self.history.config
        self.cluster = Cluster(random.Random(dice.random()))
        settings = CassandraSettings(
            hosts=("simulated",),
            keyspace="simulated",
            partitions_together_max=dice.choice((1, 10)),
            write_deadline_s=dice.choice((1.0, 30.0)),
        )
        self.clients = Clients(self.cluster, settings)
        self._log = SimulatedLog(self.history.records, like_kafka=dice.random() < 0.5)
        #: By incarnation: the snapshots that may exist, and those that were acknowledged.
        self._saved: dict[SavedIncarnation, set[int]] = {}
        self._acknowledged: dict[SavedIncarnation, set[int]] = {}

    async def go(self) -> None:
        """Run, and raise `Wrong` if anything differs from the fold of the log."""
        for ddl in (*BOOTSTRAP, *(ddl for migration in MIGRATIONS for ddl in migration.statements)):
            parsed = parse(ddl)
            assert isinstance(parsed, CreateTable | DropTable | AddColumn), ddl
            self.cluster.define(parsed)
        await self.clients.store().set_topic_config(TOPIC, self.config, expected=None)
        dice = self.dice
        self.cluster.faults = Faults(
            late=dice.choice((0.0, 0.1)),
            much_later=dice.choice((0.02, 0.1, 0.2)),
            lost=dice.choice((0.0, 0.05)),
            refused=dice.choice((0.0, 0.01)),
            unanswered=dice.choice((0.0, 0.02)),
            unrepaired=dice.choice((0.0, 0.5, 1.0)),
        )
        replicators = [asyncio.ensure_future(self._replicate(dice.random())) for _ in range(dice.randint(2, 3))]
        others = [
            asyncio.ensure_future(self._grow_log(dice.random())),
            asyncio.ensure_future(self._read_journals(dice.random())),
            asyncio.ensure_future(self._read_tags(dice.random())),
            asyncio.ensure_future(self._save_snapshots(dice.random())),
            asyncio.ensure_future(self._fail_replicas(dice.random())),
        ]
        killed = [task for task in replicators if dice.random() < 0.4]
        for task in killed:
            asyncio.get_running_loop().call_later(dice.random() * TROUBLE_S, task.cancel)
        await asyncio.sleep(TROUBLE_S)
        await asyncio.gather(*others)
        self.cluster.faults = NONE
        await self._catch_up(self.clients.store())
        await self._check(dice.choice(_PAIRS))
        # Now paused replicators continue, and late requests arrive, also those of dead replicators.
        for outcome in await asyncio.gather(*replicators, return_exceptions=True):
            if isinstance(outcome, BaseException) and not isinstance(outcome, asyncio.CancelledError):
                raise outcome
        await asyncio.sleep(MUCH_LATER_S)
        assert not self.cluster.in_flight
        await self.check_all()

    async def check_all(self) -> None:
        for pair in _PAIRS:
            await self._check(pair)
        await self._check_pointer()

    # Actors

    async def _grow_log(self, seed: float) -> None:
        dice = random.Random(seed)
        at_once = dice.random() < 0.5
        for _ in self.history.records:
            if not at_once:
                await asyncio.sleep(dice.random() * 1.4 * TROUBLE_S / len(self.history.records))
            self._log.size += 1

    async def _replicate(self, seed: float) -> None:
        """Replicate a few slices, each starting at or before the pointer's next offset, of random length."""
        dice = random.Random(seed)
        driver = Driver(self.cluster)
        store = self.clients.store_of(driver)
        complete, stops = dice.random() < 0.3, dice.choice((0.0, 0.3, 0.7))
        count = dice.randint(1, 5)
        for _ in range(count):
            await asyncio.sleep(dice.random() * 2 * TROUBLE_S / count)
            try:
                pointer = await store.pointer(TOPIC, PARTITION)
                next_offset = 0 if pointer is None else pointer.position.offset + 1
                start = max(0, next_offset - dice.choice((0, 0, 1, 3)))
                stop = self._log.size if complete else dice.randint(next_offset, max(next_offset, self._log.size))
                driver.stops_after = dice.randint(2, 9) if dice.random() < stops else None
                records = self.history.records[start:stop]
                await replicate_slice(store, TOPIC, PARTITION, records, self.config)
            except (Unavailable, OutcomeUnknown, LogLost):
                continue  # the next read may not yet see the pointer that was read

    async def _catch_up(self, store: CassandraStore) -> None:
        pointer = await replicate_slice(store, TOPIC, PARTITION, self.history.records, self.config)
        if pointer is None or pointer.position.offset != len(self.history.records) - 1:
            raise Wrong(f"the last replicator stopped at {pointer}")

    async def _fail_replicas(self, seed: float) -> None:
        dice = random.Random(seed)
        if dice.random() < 0.5:
            return
        left_s = TROUBLE_S
        while (wait_s := dice.random() * TROUBLE_S / 2) < left_s:
            await asyncio.sleep(wait_s)
            replica = dice.choice(self.cluster.replicas)
            replica.up = False
            down_s = dice.random() * 5
            await asyncio.sleep(down_s)
            replica.up = True
            left_s -= wait_s + down_s

    async def _save_snapshots(self, seed: float) -> None:
        """Save snapshots of incarnations that exist or existed a moment ago."""
        dice = random.Random(seed)
        store = self.clients.store()
        for _ in range(dice.randint(0, 4)):
            await asyncio.sleep(dice.random() * TROUBLE_S / 4)
            id = dice.choice(IDS)
            head = dice.choice(self.history.truths[: self._log.size + 1]).heads.get(id)
            if head is None or not head.live:
                continue
            incarnation, number = SavedIncarnation(id, head.incarnation), head.seq_nr
            self._saved.setdefault(incarnation, set()).add(number)
            try:
                snapshot = StoredSnapshot(number, 1, b"%d" % number, 5)
                await store.save_snapshot(Key(TOPIC, id), head.incarnation, snapshot, slots=2)
            except (Unavailable, OutcomeUnknown):
                continue
            self._acknowledged.setdefault(incarnation, set()).add(number)

    # Readers

    async def _read_journals(self, seed: float) -> None:
        """Check the real reader: it returns the journal as of one position at or after the start, or raises."""
        dice = random.Random(seed)
        store, metrics = self.clients.store(), Metrics()
        settings = JournalSettings(page_events=dice.choice((1, 2, 4, 100)), follow_s=0.0)
        cache = HeadCache(self._log, store, TOPIC, PARTITION, self.config, settings, metrics)  # type: ignore[arg-type]
        reader = Reader(self._log, store, cache, settings, metrics)  # type: ignore[arg-type]
        for _ in range(dice.randint(1, 5)):
            await asyncio.sleep(dice.random() * TROUBLE_S / 3)
            id, start = dice.choice(IDS), dice.choice((1, 1, 2, 4))
            first = self._log.size
            seen = []
            try:
                async for event in reader.decoded_events(
                    Key(TOPIC, id), read_events, start=start, to=LAST, kind="offset"
                ):
                    seen.append((event.seq_nr, event.offset, event.payload))
            except (Unavailable, Truncated):
                if not seen:
                    continue
                complete = False
            else:
                complete = True
            possible = []
            for truth in self.history.truths[first : self._log.size + 1]:
                rows = [row for row in truth.rows[id] if row.seq_nr >= start]
                possible.append(
                    [(row.seq_nr, row.position.offset, f"{row.position.offset}.{row.index}") for row in rows]
                )
            if not any(seen == (rows if complete else rows[: len(seen)]) for rows in possible):
                raise Wrong(f"a read of {id} from {start} gave {seen}, and the journal was {possible}")
        await cache.close()

    async def _read_tags(self, seed: float) -> None:
        """Check a read of a tag below the pointer's time: it has all rows that stay, and no deleted one."""
        dice = random.Random(seed)
        store = self.clients.store()
        for _ in range(dice.randint(0, 2)):
            await asyncio.sleep(dice.random() * TROUBLE_S)
            tag = dice.choice(TAGS)
            try:
                pointer = await store.pointer(TOPIC, PARTITION)
                if pointer is None:
                    continue
                rows = await _tag_rows(store, tag, pointer.time_ms)
            except Unavailable:
                continue
            offset = pointer.position.offset
            allowed = {row for row in self.history.truths[offset + 1].tags[tag] if row.time_ms < pointer.time_ms}
            required = set(allowed)
            for truth in self.history.truths[offset + 2 :]:
                required &= set(truth.tags[tag])
            if not required <= set(rows) <= allowed:
                raise Wrong(f"tag {tag} through offset {offset} gave {rows}, not {required} to {allowed}")

    # Final checks

    async def _check(self, asks: Sequence[int]) -> None:
        """Check that these replicas together hold the fold of the whole log, and nothing else."""
        store = self.clients.store(asks=asks)
        truth = self.history.truths[-1]
        found = await read_everything(store)
        expected = Found(dict(truth.heads), dict(truth.rows), dict(truth.rows), dict(truth.tags), truth.parked)
        for what, is_there, should_be in zip(Found._fields, found, expected, strict=True):
            if is_there != should_be:
                raise Wrong(f"replicas {asks}: {what}: the store has {is_there}, the fold says {should_be}")
        await self._check_snapshots(store, truth)

    async def _check_pointer(self) -> None:
        """Check the merged pointer of all replicas: a read that misses the last one only causes a replay."""
        pointer = await self.clients.store(asks=range(REPLICAS)).pointer(TOPIC, PARTITION)
        last, time_ms = Position(self.config.epoch, len(self.history.records) - 1), self.history.truths[-1].time_ms
        if pointer != Pointer(last, time_ms):
            raise Wrong(f"the pointer is {pointer}, not {last} at {time_ms}")

    async def _check_snapshots(self, store: CassandraStore, truth: ExpectedJournal) -> None:
        for incarnation, saved in self._saved.items():
            head = truth.heads[incarnation.id]
            numbers = [
                each.seq_nr for each in await store.snapshots(Key(TOPIC, incarnation.id), incarnation.incarnation)
            ]
            if not head.live or head.incarnation != incarnation.incarnation:
                if numbers:
                    raise Wrong(f"snapshots {numbers} of {incarnation}, which was purged")
                continue
            newest = max(self._acknowledged.get(incarnation, {0}))
            if not set(numbers) <= saved or (newest and (not numbers or max(numbers) < newest)):
                raise Wrong(
                    f"snapshots {numbers} of {incarnation}; saved were {saved}, the newest acknowledged {newest}"
                )


_PAIRS = list(combinations(range(REPLICAS), 2))


class Found(NamedTuple):
    heads: dict[str, Head]
    events_of_table: dict[str, tuple[EventRow, ...]]
    events_by_head: dict[str, tuple[EventRow, ...]]
    tags: dict[str, tuple[TagRow, ...]]
    parked: tuple[Parked, ...]


async def read_everything(store: CassandraStore) -> Found:
    [split] = await store.splits(TOPIC, count=1)
    heads = {id: head async for page in store.heads_in(TOPIC, split) for id, head in page}
    in_table: dict[str, list[EventRow]] = {id: [] for id in IDS}
    found = [each async for page in store.events_in(TOPIC, split) for each in page]
    for id, row in sorted(found, key=lambda each: (each[0], each[1].seq_nr)):
        in_table[id].append(row)
    by_head: dict[str, tuple[EventRow, ...]] = {}
    for id in IDS:
        head = heads.get(id)
        by_head[id] = tuple(await events_of(store, id, head)) if head is not None and head.live else ()
    tags = {tag: tuple(await _tag_rows(store, tag, EVER_MS)) for tag in TAGS}
    parked = tuple([each async for each in store.parked(TOPIC)])
    return Found(heads, {id: tuple(rows) for id, rows in in_table.items()}, by_head, tags, parked)


async def events_of(store: CassandraStore, id: str, head: Head) -> list[EventRow]:
    """Return the events of a live journal, by its head."""
    rows: list[EventRow] = []
    after = head.delete_to
    while page := await store.events(Key(TOPIC, id), head, after=after, to=head.seq_nr, limit=PAGE):
        rows += page
        after = page[-1].seq_nr
    return rows


async def _tag_rows(store: CassandraStore, tag: str, until_ms: int) -> list[TagRow]:
    rows: list[TagRow] = []
    while True:
        after = rows[-1].place if rows else None
        page = await store.tag_rows(tag, after=after, from_ms=0, until_ms=until_ms, limit=PAGE)
        if not page:
            return rows
        rows += page


def simulate(
    loop: VirtualTimeLoop, seed: int, history: History | None = None, *, run_type: type[Run] = Run
) -> str | None:
    """Run one seed, over its own random log or this one; return the error with the log, or None."""
    run = run_type(seed, history)
    try:
        loop.run(run.go())
    except (Wrong, TidebookError) as error:
        return f"seed {seed}: {error!r}\n  {run.history.shown}"
    return None
