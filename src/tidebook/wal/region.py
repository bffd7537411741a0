"""`Region`: a write-ahead log that many tables share."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from inspect import isawaitable
from typing import Any

import msgspec

from tidebook.core.errors import Fenced, InvalidInput, NotFound, OutcomeUnknown, Truncated, Unavailable
from tidebook.runtime.clock import Clock, Ids
from tidebook.runtime.metrics import Metrics
from tidebook.wal.group_commit import GroupCommit
from tidebook.wal.meta import Pinned, RegionMeta, TableMeta
from tidebook.wal.reading import EntryPage, Handler, OnProgress, Replay, Run, read_region, read_table
from tidebook.wal.record import (
    Control,
    DropTable,
    FlushRequest,
    MarkDeleted,
    WalEntry,
    Writes,
    Written,
    pack_payloads,
    pack_writes,
    table_id,
    whole_number,
)
from tidebook.wal.snapshot import RegionSnapshot, check_complete, copies_needed, plan_truncation, take_snapshot
from tidebook.wal.topics import RECOVERY_ATTEMPTS_MAX, RegionTopics

#: Called with a table that retains more than `force_flush_bytes`: flush it, then call `mark_deleted`.
OnPinned = Callable[[Pinned], Awaitable[None] | None]


class Cleaned(msgspec.Struct, frozen=True):
    """The result of `Region.clean`."""

    #: The first offset that the data topic has now.
    truncated_to: int
    #: How many offsets were removed.
    removed: int
    #: The table that keeps the log from being truncated further; None if no table has entries.
    pinned_by: int | None
    #: How many bytes of the log the tables still need.
    held_bytes: int


class RegionStatus(msgspec.Struct, frozen=True):
    """The status of a region, for monitoring."""

    region: int
    #: The term of the claim in force; every claim increases it.
    term: int
    #: The number of tables.
    tables: int
    log_start: int
    log_end: int
    #: How many bytes of the log the tables still need.
    held_bytes: int
    #: The table whose oldest entry keeps the log from being truncated; None if no table has entries.
    pinned_by: int | None
    snapshot_age_ms: int | None
    #: How long the recovery took when the region was opened.
    recovery_s: float
    #: The error of the last periodic cleaning; None if it succeeded.
    cleaner_error: str | None


class Region:
    """A write-ahead log that many tables share: write, read and replay entries, mark them deleted, clean the log.

    Open it with `await book.wal(namespace).open_region(id)`. One owner writes; any number of processes may read with
    `writable=False`. Every table numbers its entries from 1 without gaps. Concurrent writes share records of the log.
    """

    def __init__(
        self, topics: RegionTopics, *, clock: Clock, ids: Ids, metrics: Metrics, on_pinned: OnPinned | None = None
    ) -> None:
        self.id = topics.region
        #: How long the recovery took when the region was opened.
        self.recovery_s = 0.0
        self._topics = topics
        self._meta = RegionMeta()
        self._group_commit: GroupCommit | None = None
        self._settings = topics.settings
        self._clock = clock
        self._ids = ids
        self._metrics = metrics
        self._labels: dict[str, object] = {"namespace": topics.namespace, "region": topics.region}
        self._on_pinned = on_pinned
        self._in_callback = False
        self._exclusive = asyncio.Lock()
        self._snapshot_bytes = 0
        self._cleaner_task: asyncio.Task[None] | None = None
        self._cleaner_error: Exception | None = None

    async def open(self, *, writable: bool) -> None:
        """Recover the state and, if `writable`, claim the region and start cleaning it; use `Wal.open_region`."""
        began = time.monotonic()
        self._meta = meta = await self._topics.recover()
        if writable:
            await self._topics.claim_region(meta, self._ids.new())
            self._group_commit = GroupCommit(self._topics, meta, self._count)
        self._snapshot_bytes = meta.byte_index.total_bytes
        self.recovery_s = time.monotonic() - began
        self._metrics.time("wal_recovery", self.recovery_s, **self._labels)
        if writable and self._settings.clean_every_s:
            self._cleaner_task = asyncio.create_task(self._clean_periodically())

    def _count(self, name: str, n: int = 1) -> None:
        self._metrics.count(name, n, **self._labels)

    async def reopen(self, on_pinned: OnPinned | None) -> None:
        """Prepare an open region for another caller: replace the flush callback if given, and refresh a reader."""
        self._on_pinned = on_pinned or self._on_pinned
        if self._group_commit is None:
            await self.refresh()

    async def exists(self) -> bool:
        """Return whether the region still exists and was not deleted and created again."""
        return await self._topics.find_id() == self.topic_id

    @property
    def topic_id(self) -> str:
        """The id of the data topic, which changes when the region is deleted and created again."""
        return self._topics.topic_id

    @property
    def meta(self) -> RegionMeta:
        """The state of the tables, folded from acknowledged records only; call `refresh` to bring it up to date."""
        return self._meta

    @property
    def writable(self) -> bool:
        """Whether the region was opened for writing and no other writer has claimed it since."""
        return self._group_commit is not None and self._group_commit.fenced is None

    # Writing

    async def write(self, table: int, payloads: Sequence[Any]) -> Written:
        """Write payloads to a table, atomically and in order; return their sequence numbers and the record's offset.

        The write is durable when this returns; the first write creates the table. Raise `Fenced` if another writer has
        claimed the region, `TooLarge` above `limit_bytes`, `InvalidInput` if the region is read-only, `Unavailable` if
        nothing was written, and `OutcomeUnknown` if it cannot be determined whether the payloads were written.

        >>> async def example(region):
        ...     return await region.write(table=1, payloads=[b"a", b"b"])   # Written(first=1, last=2, offset=1)
        """
        packed = pack_payloads(table_id(table), payloads)
        [written] = await self._owner().write([packed])
        return written

    async def write_many(self, writes: Writes) -> list[Written]:
        """Write to several tables atomically, in the order given; return one `Written` for each pair.

        `writes` is a sequence of (table, payloads) pairs, or a mapping from table to payloads. The errors are those of
        `write`.
        """
        packed = pack_writes(writes)
        return await self._owner().write(packed)

    def _owner(self) -> GroupCommit:
        if self._group_commit is None:
            raise InvalidInput(f"region {self.id} was opened with writable=False: open it for writing")
        return self._group_commit

    # Reading

    async def read(self, *, from_offset: int = 0) -> AsyncGenerator[WalEntry, None]:
        """Yield the entries of all tables in log order, as of the start of the read, without those marked deleted.

        Raise `Truncated` if a cleaner removes entries during the read (start it again), `LogLost` or `Corrupt` if
        entries that are still needed are missing.
        """
        start = whole_number(from_offset, "from_offset")
        pages = self._pages(lambda meta: read_region(self._topics, meta, from_offset=start))
        async with aclosing(pages):  # if the caller stops early, release the fetch now, not at garbage collection
            async for page in pages:
                for run in page.runs:
                    for entry in run:
                        yield entry

    async def read_table(self, table: int, *, start: int = 1) -> AsyncGenerator[WalEntry, None]:
        """Yield one table's entries from sequence number `start` on, without those marked deleted.

        The errors are those of `read`.
        """
        id, first = table_id(table), whole_number(start, "start")
        pages = self._pages(lambda meta: read_table(self._topics, meta, table=id, start=first))
        async with aclosing(pages):
            async for page in pages:
                for run in page.runs:
                    for entry in run:
                        yield entry

    async def replay(
        self, handlers: Mapping[int, Handler], *, other: Handler | None = None, progress: OnProgress | None = None
    ) -> dict[int, int]:
        """Read the region once, pass each entry to the handler of its table, and return the entry count by table.

        `other` handles the tables that have no handler; without it they are skipped. A handler may be async: the replay
        awaits it before the next entry. `progress` is called with the offsets done and in total after each page.
        """
        replay = Replay(handlers, other=other, progress=progress)
        async for page in self.replay_pages():
            for handler, run in replay.take(page):
                for entry in run:
                    result = handler(entry)
                    if result is not None and isawaitable(result):
                        await result
        return replay.counts

    async def replay_pages(self) -> AsyncIterator[EntryPage]:
        """Yield the pages that a replay reads; a last, empty page reports that all offsets are done."""
        total = 0
        async with aclosing(self._pages(lambda meta: read_region(self._topics, meta))) as pages:
            async for page in pages:
                total = page.total
                yield page
        yield EntryPage([], total, total)

    async def refresh(self) -> None:
        """Fold all records up to the end of the data topic into `meta`.

        A reader sees the owner's latest writes after this; an owner sees marks and drops by other processes.
        """
        if self._group_commit is not None and self.writable:
            await self._group_commit.rescan()
        else:
            await self._follow()

    async def _follow(self, stop: int = 0) -> None:
        async with self._exclusive:
            if not stop:
                await self._topics.check_incarnation()
            await self._topics.follow(self._meta, stop=stop or await self._topics.end())

    async def _catch_up(self) -> None:
        """Bring `meta` up to date while writes continue; an owner that lost its claim follows the log as a reader."""
        if self._group_commit is not None and self.writable:
            try:
                return await self._group_commit.catch_up()
            except Fenced:
                pass
        await self._follow()

    async def _pages(
        self, read: Callable[[RegionMeta], AsyncGenerator[list[Run], None]]
    ) -> AsyncGenerator[EntryPage, None]:
        """Yield the pages of a read as of now; restart it if a cleaner truncates the log before the first page.

        Raise `LogLost` if the log no longer has entries that are still needed.
        """
        for _ in range(RECOVERY_ATTEMPTS_MAX):
            await self._catch_up()
            meta = self._meta.frozen()
            begin, has_started = meta.first_offset, False
            try:
                async with aclosing(read(meta)) as found:
                    async for runs in found:
                        has_started = True
                        yield EntryPage(runs, runs[-1][-1].offset + 1 - begin, meta.next_offset - begin)
                return
            except Truncated:
                if has_started:
                    raise
                start = await self._topics.start()
                await self._catch_up()
                check_complete(self._topics.data, self._meta, start)
        raise self._topics.cleaned_too_often("read: read again")

    # Deleting

    async def mark_deleted(self, table: int, seq: int, *, incarnation: int | None = None) -> None:
        """Mark a table's entries below `seq` as no longer needed; pass the table's `next_seq_num` to mark all.

        Marks only advance, need no claim, and let `clean` truncate the log. Raise `NotFound` if there is no such table,
        or if `incarnation` is given and the table was dropped and created again since; raise `InvalidInput` if `seq` is
        before the current mark or beyond what was written.
        """
        table = table_id(table)
        if type(seq) is not int:
            raise InvalidInput(f"seq must be a whole number, not {type(seq).__name__}")
        current = await self._current_table(table, seq)
        if incarnation is not None and current.incarnation != incarnation:
            raise NotFound(f"region {self.id}: table {table} was dropped and created again")
        if seq > current.next_seq_num:
            raise InvalidInput(
                f"table {table}: {seq} is beyond what was written: mark up to {current.next_seq_num} to mark all"
            )
        if seq < current.latest_marked_deleted:
            raise InvalidInput(f"table {table}: a mark must be at least {current.latest_marked_deleted}, not {seq}")
        if seq > current.latest_marked_deleted:
            await self._append_control(MarkDeleted(table, current.incarnation, seq))

    async def request_flush(self, table: int | None = None) -> list[int]:
        """Ask the region's owner to flush a table, or all tables with entries; return those tables.

        The request is a record of the log. In its next round of cleaning, the owner passes the table to its `on_pinned`
        callback, however little the table retains, and truncates the log. The mark that the flush sets fulfils the
        request; it stays open until then, for example while there is no owner.
        """
        if table is not None:
            await self._current_table(table_id(table))
        else:
            await self._catch_up()
        requested = [each.table for each in self.pinned() if table in (None, each.table)]
        for id in requested:
            current = self._meta.tables[id]
            await self._append_control(FlushRequest(id, current.incarnation, current.next_seq_num))
        return requested

    async def drop_table(self, table: int) -> None:
        """Drop a table; its next write starts again at sequence number 1. Raise `NotFound` if there is no such table.

        A snapshot without the table is written before this returns; `OutcomeUnknown` if only that failed.
        """
        table = table_id(table)
        if self._group_commit is not None:
            await self._group_commit.wait_resolved()
        drop = DropTable(table, (await self._current_table(table)).incarnation)
        await self._append_control(drop)
        try:
            await self.snapshot()
        except Unavailable as error:
            raise OutcomeUnknown(
                f"region {self.id}: table {table} is dropped, but no snapshot was written: {error}"
            ) from error

    async def _current_table(self, table: int, seq: int | None = None) -> TableMeta:
        """Return the state of a table; raise `NotFound` if there is none, `Fenced` if the claim was lost.

        An owner reads the log only if its own state would reject the call: other processes may have changed the table.
        """
        if self._group_commit is None:
            await self._follow()
        elif self._group_commit.fenced is not None:
            raise Fenced(str(self._group_commit.fenced))
        elif (current := self._meta.tables.get(table)) is None or (
            seq is not None and not current.latest_marked_deleted <= seq <= current.next_seq_num
        ):
            await self._group_commit.catch_up()
        found = self._meta.tables.get(table)
        if found is None:
            raise NotFound(f"region {self.id} has no table {table}")
        return found

    async def _append_control(self, record: Control) -> None:
        """Append a mark, drop or request. It names the table's incarnation, so an unknown outcome is safe to retry."""
        if (group_commit := self._group_commit) is not None:
            await self._topics.retry(lambda: group_commit.write(control=record))
            return
        sent = await self._topics.retry(lambda: self._topics.append(record))
        try:
            await self._follow(sent.offset + 1)
        except Unavailable as error:
            message = f"{self._topics.data}: written at offset {sent.offset}, but not read back: {error}"
            raise OutcomeUnknown(message, partition=0, offset=sent.offset) from error

    # Snapshots and cleaning

    async def snapshot(self) -> RegionSnapshot:
        """Write a snapshot of `meta` to the meta topic and return it; the snapshot is durable when this returns."""
        async with self._exclusive:
            return await self._put_snapshots()

    async def _put_snapshots(self, *, truncated_to: int = 0, copies: int = 1) -> RegionSnapshot:
        total_bytes = self._meta.byte_index.total_bytes
        snapshot = take_snapshot(
            self._meta, topic_id=self.topic_id, truncated_to=truncated_to, taken_ms=self._clock.now_ms()
        )
        for _ in range(copies):
            await self._topics.put_snapshot(snapshot, snapshot_id=self._ids.new())
        self._meta.snapshot_ms, self._snapshot_bytes = snapshot.taken_ms, total_bytes
        self._count("wal_snapshots", copies)
        return snapshot

    async def clean(self) -> Cleaned:
        """Truncate the part of the log that no table needs, after writing snapshots that replace it.

        Tables that retain more than `force_flush_bytes`, or whose flush was requested, are passed to `on_pinned` first.
        A crash between any two steps leaves a region that recovers to the same state: the data topic is truncated only
        below what two snapshots, read back from the meta topic, still need.
        """
        await self.refresh()
        await self._call_on_pinned()
        async with self._exclusive:
            start = await self._topics.start()
            wanted = self._meta.first_offset
            if wanted > start:
                copies = copies_needed(await self._topics.snapshots(), topic_id=self.topic_id, wanted=wanted)
                await self._put_snapshots(truncated_to=wanted, copies=copies)
            # Read the snapshots back from the meta topic to decide: one that is unreadable must not count.
            truncation = plan_truncation(await self._topics.snapshots(), topic_id=self.topic_id, wanted=wanted)
            new_start = start
            if truncation is not None:
                await self._topics.truncate(data_before=truncation.data_before, meta_before=truncation.meta_before)
                self._meta.truncated_to = max(self._meta.truncated_to, truncation.data_before)
                self._meta.byte_index = self._meta.byte_index.from_offset(truncation.data_before)
                new_start = max(start, truncation.data_before)
            pinned, held_bytes = self.pinned(), self._meta.held_bytes
        self._metrics.gauge("wal_held_bytes", held_bytes, **self._labels)
        self._metrics.gauge("wal_tables", len(self._meta.tables), **self._labels)
        self._metrics.gauge("wal_pinned_by_table", pinned[0].table if pinned else -1, **self._labels)
        if (age_ms := self._snapshot_age_ms()) is not None:
            self._metrics.gauge("wal_snapshot_age_seconds", age_ms / 1000, **self._labels)
        return Cleaned(new_start, new_start - start, pinned[0].table if pinned else None, held_bytes)

    async def _call_on_pinned(self) -> None:
        """Call the flush callback for each table that retains too much or has a requested flush, oldest first."""
        if self._on_pinned is None or self._in_callback:
            return
        limit_bytes = self._settings.force_flush_bytes or sys.maxsize
        self._in_callback = True  # a callback that calls `clean` must not be called again for the same table
        try:
            for pinned in self.pinned():
                table = self._meta.tables.get(pinned.table)
                if table is None or (pinned.held_bytes <= limit_bytes and not table.awaits_flush):
                    continue
                self._count("wal_forced_flushes")
                result = self._on_pinned(pinned)
                if result is not None and isawaitable(result):
                    await result
        finally:
            self._in_callback = False

    def _snapshot_age_ms(self) -> int | None:
        return None if self._meta.snapshot_ms is None else self._clock.now_ms() - self._meta.snapshot_ms

    def pinned(self) -> list[Pinned]:
        """Return the tables with entries, oldest entry first: the first one keeps the log from being truncated."""
        return self._meta.pinned_tables()

    async def status(self) -> RegionStatus:
        """Return the region's size, owner term, snapshot age and the last error of the cleaner."""
        pinned = self.pinned()
        return RegionStatus(
            region=self.id,
            term=self._meta.term,
            tables=len(self._meta.tables),
            log_start=await self._topics.start(),
            log_end=await self._topics.end(),
            held_bytes=self._meta.held_bytes,
            pinned_by=pinned[0].table if pinned else None,
            snapshot_age_ms=self._snapshot_age_ms(),
            recovery_s=self.recovery_s,
            cleaner_error=None if self._cleaner_error is None else str(self._cleaner_error),
        )

    async def _clean_periodically(self) -> None:
        while True:
            await asyncio.sleep(self._settings.clean_every_s)
            try:
                await self.clean()
                if self._meta.byte_index.total_bytes - self._snapshot_bytes >= self._settings.snapshot_every_bytes:
                    await self.snapshot()
                self._cleaner_error = None
            except Exception as error:  # also the callback's: it is in status and metrics, and the next round retries
                self._cleaner_error = error
                self._count("wal_cleaner_failures")
                if isinstance(error, Fenced):
                    return

    async def close(self) -> None:
        """Finish the pending writes, stop the cleaner and refuse further writes."""
        if self._cleaner_task is not None:
            self._cleaner_task.cancel()
            await asyncio.gather(self._cleaner_task, return_exceptions=True)
            self._cleaner_task = None
        if self._group_commit is not None:
            await self._group_commit.close()
