"""A region: a log that many tables share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from inspect import isawaitable
from typing import Any

from tidebook.core.clock import Clock, Ids
from tidebook.core.errors import Fenced, InvalidInput, NotFound, OutcomeUnknown, TooLarge, Truncated, Unavailable
from tidebook.core.metrics import Metrics
from tidebook.wal import reading
from tidebook.wal.cleaner import Cleaned, Cleaner, OnPinned
from tidebook.wal.cleaning import Pinned, pinned_tables
from tidebook.wal.commit import Commits
from tidebook.wal.entry import Entry, Written
from tidebook.wal.meta import RegionMeta, TableMeta
from tidebook.wal.names import ID_MAX, RegionId, table_id, whole_number
from tidebook.wal.reading import Page
from tidebook.wal.record import Drop, Mark, Writes, pack_payloads, pack_writes, record_bytes_max
from tidebook.wal.recovery import lost_entries
from tidebook.wal.replay import Handler, OnProgress, Replay
from tidebook.wal.settings import WalSettings
from tidebook.wal.snapshot import Snapshot
from tidebook.wal.status import RegionStatus
from tidebook.wal.takeover import LOOKS_MAX, follow, recover, take_over
from tidebook.wal.topics import RegionTopics


class Region:
    """Open it with `book.wal(namespace).open_region(id)`."""

    def __init__(
        self,
        topics: RegionTopics,
        *,
        id: RegionId,
        meta: RegionMeta,
        commits: Commits | None,
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
        self._commits = commits
        self._cleaner = cleaner
        self._settings = settings
        self._metrics = metrics
        self._labels = labels
        self._payloads_bytes_max = settings.limit_bytes - record_bytes_max(0)
        self._one_at_a_time = asyncio.Lock()
        self._cleaning: asyncio.Task[None] | None = None
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
        """Recover the region; for writing, claim it too."""
        began = time.monotonic()
        meta = await recover(topics)
        commits = None
        if writable:
            await take_over(topics, meta, ids.new(), attempts_max=settings.attempts_max)
            commits = Commits(topics, meta, settings=settings, metrics=metrics, labels=labels)
        recovery_s = time.monotonic() - began
        metrics.time("wal_recovery", recovery_s, **labels)
        region = cls(
            topics,
            id=id,
            meta=meta,
            commits=commits,
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
            region._cleaning = asyncio.create_task(region._keep_clean())
        return region

    async def reopen(self, on_pinned: OnPinned | None) -> None:
        """Opened once more: a reader looks anew, a flush callback takes the place of the one before."""
        if on_pinned is not None:
            self._cleaner.on_pinned = on_pinned
        if self._commits is None:
            await self.refresh()

    async def is_there(self) -> bool:
        """Whether the region was not deleted since, nor deleted and made again."""
        return await self._topics.is_same()

    @property
    def meta(self) -> RegionMeta:
        """What is known of the tables: verified, never ahead of the log."""
        return self._meta

    @property
    def writable(self) -> bool:
        """Whether it was opened for writing and nobody has taken it over since."""
        return self._commits is not None and self._commits.fenced is None

    # Writing

    async def write(self, table: int, payloads: Sequence[Any]) -> Written:
        """Write payloads to a table, atomically and in order.

        >>> async def example(region):
        ...     return await region.write(table=1, payloads=[b"a", b"b"])   # Written(first=1, last=2, offset=1)
        """
        commits = self._commits
        if type(table) is not int or not 0 <= table <= ID_MAX:
            table_id(table)  # raises
        packed = pack_payloads(table, payloads)
        if commits is None or packed.size_bytes > self._payloads_bytes_max or not commits.has_room:
            commits = await self._taking(packed.size_bytes)
        return await commits.write(packed)

    async def write_many(self, writes: Writes) -> list[Written]:
        """Write to several tables in one call: all of it or nothing, in the order given.

        `writes` are pairs of table and payloads, or a mapping from table to payloads.
        """
        packed = pack_writes(writes)
        commits = await self._taking(sum(each.size_bytes for each in packed))
        return await commits.write_many(packed)

    async def _taking(self, payloads_bytes: int) -> Commits:
        """The owner's side, as soon as it takes so much."""
        if self._commits is None:
            raise InvalidInput(f"region {self.id} was opened with writable=False: open it for writing")
        if payloads_bytes > self._payloads_bytes_max:
            size_bytes = record_bytes_max(payloads_bytes)
            raise TooLarge("the write", size_bytes=size_bytes, limit_bytes=self._settings.limit_bytes)
        await self._commits.room()
        return self._commits

    # Reading

    async def read(self, *, from_offset: int = 0) -> AsyncIterator[Entry]:
        """All entries in the order they were written, those marked deleted left out, as of when the read begins."""
        start = whole_number(from_offset, "from_offset")
        async for page in self._pages(lambda meta: reading.read_region(self._topics, meta, from_offset=start)):
            for run in page.runs:
                for entry in run:
                    yield entry

    async def read_table(self, table: int, *, start: int = 1) -> AsyncIterator[Entry]:
        """One table's entries from a sequence number on; numbers that were marked deleted are gone."""
        id, first = table_id(table), whole_number(start, "start")
        async for page in self._pages(lambda meta: reading.read_table(self._topics, meta, table=id, start=first)):
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
        """Pass over the region once and give each entry to its table's handler; how many each table got.

        `other` takes the entries of tables that have no handler of their own.
        """
        replay = Replay(handlers, other=other, progress=progress)
        async for page in self.replaying():
            for handler, run in replay.take(page):
                for entry in run:
                    waiting = handler(entry)
                    if waiting is not None and isawaitable(waiting):
                        await waiting
        return replay.counts

    async def replaying(self) -> AsyncIterator[Page]:
        """What a replay passes over, page by page; the last one tells that all is done."""
        whole = 0
        async for page in self._pages(lambda meta: reading.read_region(self._topics, meta)):
            whole = page.whole
            yield page
        yield Page([], whole, whole)

    async def refresh(self) -> None:
        """Fold what others put into the data topic: a reader's view of the present, an owner's of foreign marks."""
        if self._commits is not None and self._commits.fenced is None:
            await self._commits.catch_up()
        else:
            await self._follow()

    async def _follow(self, stop: int = 0) -> None:
        async with self._one_at_a_time:
            if not stop:
                await self._topics.check_life()
            await follow(self._topics, self._meta, stop=stop or await self._topics.end())

    async def _present(self) -> None:
        """Bring the meta up to now. One that lost its claim looks as a reader does."""
        if self._commits is not None and self._commits.fenced is None:
            try:
                await self._commits.present()
                return
            except Fenced:
                pass
        await self._follow()

    async def _pages(self, read: Callable[[RegionMeta], AsyncIterator[list[reading.Run]]]) -> AsyncIterator[Page]:
        """Read as of now. What a cleaner took before anything was given is read anew, unless it was still needed."""
        for _ in range(LOOKS_MAX):
            await self._present()
            meta = self._meta.frozen()
            begin, is_begun = meta.first_offset, False
            try:
                async for runs in read(meta):
                    is_begun = True
                    yield Page(runs, runs[-1][-1].offset + 1 - begin, meta.next_offset - begin)
                return
            except Truncated:
                if is_begun:
                    raise
                start = await self._topics.start()
                await self._present()
                missing = lost_entries(self._meta, start)
                if missing is not None:
                    raise self._topics.lost(missing) from None
        raise Unavailable(f"{self._topics.data}: cleaned {LOOKS_MAX} times in a row while it was read: read again")

    # Deleting

    async def mark_deleted(self, table: int, seq: int, *, life: int | None = None) -> None:
        """Tell that the entries below `seq` are no longer needed; `next_seq_num` means all of them.

        With `life`, only of the table as it was made then: NotFound where it was dropped and made again since.
        """
        table = table_id(table)
        if type(seq) is not int:
            raise InvalidInput(f"seq is a whole number, not {type(seq).__name__}")
        for attempt in range(1, self._settings.attempts_max + 1):
            held = await self._known(table, seq)
            if life is None:
                life = held.life  # another attempt must not hit a table that was made again meanwhile
            elif held.life != life:
                raise NotFound(f"region {self.id}: table {table} was dropped and made again")
            if seq > held.next_seq_num:
                raise InvalidInput(
                    f"table {table}: {seq} is beyond what was written: mark up to {held.next_seq_num}, which means all"
                )
            if seq == held.latest_marked_deleted:
                return
            if seq < held.latest_marked_deleted:
                if attempt > 1:
                    return
                raise InvalidInput(f"table {table}: already marked to {held.latest_marked_deleted}, not back to {seq}")
            try:
                await self._control(Mark(table, held.life, seq))
                return
            except OutcomeUnknown:
                if attempt == self._settings.attempts_max:
                    raise

    @property
    def topic_id(self) -> str:
        """The life of the region's data topic: a region that is deleted and made again is another one."""
        return self._topics.topic_id

    async def drop_table(self, table: int) -> None:
        """Remove a table; the next write of it begins again at 1. The snapshot without it is synced at once."""
        table = table_id(table)
        if self._commits is not None:
            await self._commits.settled()
        life = (await self._known(table)).life
        for attempt in range(1, self._settings.attempts_max + 1):
            try:
                await self._control(Drop(table, life))
                break
            except OutcomeUnknown:  # it names the life, so a second one does no harm
                if attempt == self._settings.attempts_max:
                    raise
        await self.snapshot()

    async def _known(self, table: int, seq: int | None = None) -> TableMeta:
        """The table as it is. An owner looks at the log only before it refuses: others mark, drop, and take over."""
        if self._commits is None:
            await self._follow()
        elif self._commits.fenced is not None:
            raise Fenced(str(self._commits.fenced))
        elif (held := self._meta.tables.get(table)) is None or (
            seq is not None and not held.latest_marked_deleted <= seq <= held.next_seq_num
        ):
            await self._commits.present()
        found = self._meta.tables.get(table)
        if found is None:
            raise NotFound(f"region {self.id} has no table {table}")
        return found

    async def _control(self, record: Mark | Drop) -> None:
        if self._commits is not None:
            await self._commits.control(record)
            return
        sent = await self._topics.append(record)
        await self._follow(sent.offset + 1)

    # Snapshots and cleaning

    async def snapshot(self) -> Snapshot:
        """Write the meta, as verified, to the meta topic; acknowledged when this returns."""
        async with self._one_at_a_time:
            return await self._cleaner.snapshot()

    async def clean(self) -> Cleaned:
        """Remove what no table needs: snapshot, decide, sync it, cut the data topic, then old snapshots.

        Tables that hold more than `force_flush_bytes` are offered to the flush callback first.
        """
        await self.refresh()
        await self._cleaner.offer_pinned()
        async with self._one_at_a_time:
            return await self._cleaner.clean()

    def pinned(self) -> list[Pinned]:
        """The tables that keep the log from being cleaned, the oldest entry first."""
        return pinned_tables(self._meta)

    async def status(self) -> RegionStatus:
        """The region at a glance."""
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

    async def _keep_clean(self) -> None:
        while True:
            await asyncio.sleep(self._settings.clean_every_s)
            try:
                await self.clean()
                if self._cleaner.is_snapshot_due:
                    await self.snapshot()
                self._cleaner_error = None
            except Exception as error:  # a callback's too; told by status and metrics; the next round tries again
                self._cleaner_error = error
                self._metrics.count("wal_cleaner_failures", 1, **self._labels)
                if isinstance(error, Fenced):
                    return

    async def close(self) -> None:
        """Answer what was taken, stop the cleaner, and let go."""
        if self._cleaning is not None:
            self._cleaning.cancel()
            await asyncio.gather(self._cleaning, return_exceptions=True)
            self._cleaning = None
        if self._commits is not None:
            await self._commits.close()
