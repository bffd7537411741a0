"""`Region`: a write-ahead log that many tables share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from inspect import isawaitable
from typing import Any

import msgspec

from tidebook.core.errors import Fenced, InvalidInput, NotFound, OutcomeUnknown, TooLarge, Truncated, Unavailable
from tidebook.runtime.clock import Clock, Ids
from tidebook.runtime.metrics import Metrics
from tidebook.wal import reading
from tidebook.wal.claiming import RECOVERY_ATTEMPTS_MAX, claim_region, follow, recover
from tidebook.wal.cleaner import Cleaned, Cleaner, OnPinned
from tidebook.wal.cleaning import Pinned, pinned_tables
from tidebook.wal.entry import WalEntry, Written
from tidebook.wal.group_commit import GroupCommit
from tidebook.wal.meta import RegionMeta, TableMeta
from tidebook.wal.names import ID_MAX, RegionId, table_id, whole_number
from tidebook.wal.reading import EntryPage
from tidebook.wal.record import DropTable, MarkDeleted, Writes, pack_payloads, pack_writes, record_bytes_max
from tidebook.wal.recovery import lost_entries
from tidebook.wal.replay import Handler, OnProgress, Replay
from tidebook.wal.settings import WalSettings
from tidebook.wal.snapshot import RegionSnapshot
from tidebook.wal.topics import RegionTopics


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
        self,
        topics: RegionTopics,
        *,
        id: RegionId,
        meta: RegionMeta,
        group_commit: GroupCommit | None,
        cleaner: Cleaner,
        settings: WalSettings,
        metrics: Metrics,
        labels: dict[str, object],
        recovery_s: float,
    ) -> None:
        self.id = id
        self.recovery_s = recovery_s
        self._topics = topics
        self._meta = meta
        self._group_commit = group_commit
        self._cleaner = cleaner
        self._settings = settings
        self._metrics = metrics
        self._labels = labels
        self._payloads_bytes_max = settings.limit_bytes - record_bytes_max(0)
        self._exclusive = asyncio.Lock()
        self._cleaner_task: asyncio.Task[None] | None = None
        self._cleaner_error: Exception | None = None

    @classmethod
    async def open(
        cls,
        topics: RegionTopics,
        *,
        id: RegionId,
        writable: bool,
        settings: WalSettings,
        clock: Clock,
        ids: Ids,
        metrics: Metrics,
        labels: dict[str, object],
        on_pinned: OnPinned | None = None,
    ) -> Region:
        """Recover a region and, if `writable`, claim it and start its periodic cleaning; use `Wal.open_region`."""
        began = time.monotonic()
        meta = await recover(topics)
        group_commit = None
        if writable:
            await claim_region(topics, meta, ids.new(), attempts_max=settings.attempts_max)
            group_commit = GroupCommit(topics, meta, settings=settings, metrics=metrics, labels=labels)
        recovery_s = time.monotonic() - began
        metrics.time("wal_recovery", recovery_s, **labels)
        region = cls(
            topics,
            id=id,
            meta=meta,
            group_commit=group_commit,
            cleaner=Cleaner(
                topics,
                meta,
                settings=settings,
                clock=clock,
                ids=ids,
                metrics=metrics,
                labels=labels,
                on_pinned=on_pinned,
            ),
            settings=settings,
            metrics=metrics,
            labels=labels,
            recovery_s=recovery_s,
        )
        if writable and settings.clean_every_s:
            region._cleaner_task = asyncio.create_task(region._clean_periodically())
        return region

    async def reopen(self, on_pinned: OnPinned | None) -> None:
        """Prepare an open region for another caller: refresh a reader, and replace the flush callback if given."""
        if on_pinned is not None:
            self._cleaner.on_pinned = on_pinned
        if self._group_commit is None:
            await self.refresh()

    async def exists(self) -> bool:
        """Return whether the region still exists and was not deleted and created again."""
        return await self._topics.is_same()

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
        group_commit = self._group_commit
        if type(table) is not int or not 0 <= table <= ID_MAX:
            table_id(table)  # raises
        packed = pack_payloads(table, payloads)
        if group_commit is None or packed.size_bytes > self._payloads_bytes_max or not group_commit.has_room:
            group_commit = await self._with_room(packed.size_bytes)
        return await group_commit.write(packed)

    async def write_many(self, writes: Writes) -> list[Written]:
        """Write to several tables atomically, in the order given; return one `Written` for each pair.

        `writes` is a sequence of (table, payloads) pairs, or a mapping from table to payloads. Errors are those of
        `write`.
        """
        packed = pack_writes(writes)
        group_commit = await self._with_room(sum(each.size_bytes for each in packed))
        return await group_commit.write_many(packed)

    async def _with_room(self, payloads_bytes: int) -> GroupCommit:
        """Return the group commit when it has room; raise if the region is read-only or the payloads are too large."""
        if self._group_commit is None:
            raise InvalidInput(f"region {self.id} was opened with writable=False: open it for writing")
        if payloads_bytes > self._payloads_bytes_max:
            size_bytes = record_bytes_max(payloads_bytes)
            raise TooLarge("the write", size_bytes=size_bytes, limit_bytes=self._settings.limit_bytes)
        await self._group_commit.wait_for_room()
        return self._group_commit

    # Reading

    async def read(self, *, from_offset: int = 0) -> AsyncGenerator[WalEntry, None]:
        """Yield the entries of all tables in log order, as of the start of the read, without those marked deleted.

        Raise `Truncated` if a cleaner removes entries during the read (start it again), `LogLost` or `Corrupt` if
        entries that are still needed are missing.
        """
        start = whole_number(from_offset, "from_offset")
        pages = self._pages(lambda meta: reading.read_region(self._topics, meta, from_offset=start))
        async with aclosing(pages):  # release the fetch at once if the caller stops early, not at garbage collection
            async for page in pages:
                for run in page.runs:
                    for entry in run:
                        yield entry

    async def read_table(self, table: int, *, start: int = 1) -> AsyncGenerator[WalEntry, None]:
        """Yield one table's entries from sequence number `start` on, without those marked deleted; raise as `read`."""
        id, first = table_id(table), whole_number(start, "start")
        pages = self._pages(lambda meta: reading.read_table(self._topics, meta, table=id, start=first))
        async with aclosing(pages):
            async for page in pages:
                for run in page.runs:
                    for entry in run:
                        yield entry

    async def replay(
        self,
        handlers: Mapping[int, Handler],
        *,
        other: Handler | None = None,
        progress: OnProgress | None = None,
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
        async with aclosing(self._pages(lambda meta: reading.read_region(self._topics, meta))) as pages:
            async for page in pages:
                total = page.total
                yield page
        yield EntryPage([], total, total)

    async def refresh(self) -> None:
        """Fold all records up to the end of the data topic into `meta`.

        A reader sees the owner's latest writes after this; an owner sees marks and drops by other processes.
        """
        if self._group_commit is not None and self._group_commit.fenced is None:
            await self._group_commit.rescan()
        else:
            await self._follow()

    async def _follow(self, stop: int = 0) -> None:
        async with self._exclusive:
            if not stop:
                await self._topics.check_incarnation()
            await follow(self._topics, self._meta, stop=stop or await self._topics.end())

    async def _catch_up(self) -> None:
        """Bring `meta` up to date while writes continue; an owner that lost its claim follows the log as a reader."""
        if self._group_commit is not None and self._group_commit.fenced is None:
            try:
                await self._group_commit.catch_up()
                return
            except Fenced:
                pass
        await self._follow()

    async def _pages(
        self, read: Callable[[RegionMeta], AsyncGenerator[list[reading.Run], None]]
    ) -> AsyncGenerator[EntryPage, None]:
        """Read as of now, and restart if a cleaner truncates the log before the first page; raise if data is lost."""
        for _ in range(RECOVERY_ATTEMPTS_MAX):
            await self._catch_up()
            meta = self._meta.frozen()
            begin, is_begun = meta.first_offset, False
            try:
                async with aclosing(read(meta)) as found:
                    async for runs in found:
                        is_begun = True
                        yield EntryPage(runs, runs[-1][-1].offset + 1 - begin, meta.next_offset - begin)
                return
            except Truncated:
                if is_begun:
                    raise
                start = await self._topics.start()
                await self._catch_up()
                missing = lost_entries(self._meta, start)
                if missing is not None:
                    raise self._topics.lost_error(missing) from None
        raise Unavailable(
            f"{self._topics.data}: cleaned {RECOVERY_ATTEMPTS_MAX} times in a row while it was read: read again"
        )

    # Deleting

    async def mark_deleted(self, table: int, seq: int, *, incarnation: int | None = None) -> None:
        """Mark a table's entries below `seq` as no longer needed; pass the table's `next_seq_num` to mark all.

        Marks only advance, need no claim, and let `clean` truncate the log. Raise `NotFound` if there is no such table,
        or if `incarnation` is given and the table was dropped and created again since; raise `InvalidInput` if `seq` is
        before the current mark or beyond what was written.
        """
        table = table_id(table)
        if type(seq) is not int:
            raise InvalidInput(f"seq is a whole number, not {type(seq).__name__}")
        for attempt in range(1, self._settings.attempts_max + 1):
            current = await self._current_table(table, seq)
            if incarnation is None:
                incarnation = current.incarnation  # a retry must not mark a table created again meanwhile
            elif current.incarnation != incarnation:
                raise NotFound(f"region {self.id}: table {table} was dropped and made again")
            if seq > current.next_seq_num:
                raise InvalidInput(
                    f"table {table}: {seq} is beyond what was written: mark up to {current.next_seq_num}, which is all"
                )
            if seq == current.latest_marked_deleted:
                return
            if seq < current.latest_marked_deleted:
                if attempt > 1:
                    return
                raise InvalidInput(
                    f"table {table}: already marked to {current.latest_marked_deleted}, not back to {seq}"
                )
            try:
                await self._append_control(MarkDeleted(table, current.incarnation, seq))
                return
            except OutcomeUnknown:
                if attempt == self._settings.attempts_max:
                    raise

    @property
    def topic_id(self) -> str:
        """The id of the data topic, which changes when the region is deleted and created again."""
        return self._topics.topic_id

    async def drop_table(self, table: int) -> None:
        """Drop a table; its next write starts again at sequence number 1. Raise `NotFound` if there is no such table.

        A snapshot without the table is written before this returns.
        """
        table = table_id(table)
        if self._group_commit is not None:
            await self._group_commit.wait_resolved()
        incarnation = (await self._current_table(table)).incarnation
        for attempt in range(1, self._settings.attempts_max + 1):
            try:
                await self._append_control(DropTable(table, incarnation))
                break
            except OutcomeUnknown:  # the record names the incarnation, so a duplicate has no effect
                if attempt == self._settings.attempts_max:
                    raise
        await self.snapshot()

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

    async def _append_control(self, record: MarkDeleted | DropTable) -> None:
        if self._group_commit is not None:
            await self._group_commit.append_control(record)
            return
        sent = await self._topics.append(record)
        await self._follow(sent.offset + 1)

    # Snapshots and cleaning

    async def snapshot(self) -> RegionSnapshot:
        """Write a snapshot of `meta` to the meta topic and return it; the snapshot is durable when this returns."""
        async with self._exclusive:
            return await self._cleaner.snapshot()

    async def clean(self) -> Cleaned:
        """Truncate the part of the log that no table needs any more, after writing snapshots that replace it.

        Tables that retain more than `force_flush_bytes` are passed to the `on_pinned` callback first.
        """
        await self.refresh()
        await self._cleaner.offer_pinned()
        async with self._exclusive:
            return await self._cleaner.clean()

    def pinned(self) -> list[Pinned]:
        """Return the tables with entries, oldest entry first: the first one keeps the log from being truncated."""
        return pinned_tables(self._meta)

    async def status(self) -> RegionStatus:
        """Return the region's size, owner term, snapshot age and the last error of the cleaner."""
        bounds = await self._topics.bounds()
        pinned = self.pinned()
        return RegionStatus(
            region=self.id,
            term=self._meta.term,
            tables=len(self._meta.tables),
            log_start=bounds.start,
            log_end=bounds.end,
            held_bytes=self._meta.held_bytes,
            pinned_by=pinned[0].table if pinned else None,
            snapshot_age_ms=self._cleaner.snapshot_age_ms,
            recovery_s=self.recovery_s,
            cleaner_error=None if self._cleaner_error is None else str(self._cleaner_error),
        )

    async def _clean_periodically(self) -> None:
        while True:
            await asyncio.sleep(self._settings.clean_every_s)
            try:
                await self.clean()
                if self._cleaner.is_snapshot_due:
                    await self.snapshot()
                self._cleaner_error = None
            except Exception as error:  # from a callback too; reported by status and metrics, retried next round
                self._cleaner_error = error
                self._metrics.count("wal_cleaner_failures", 1, **self._labels)
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
