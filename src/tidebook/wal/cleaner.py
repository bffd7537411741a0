"""Clean a region: write snapshots, read them back, truncate the data topic, then truncate old snapshots.

A crash between any two steps leaves a region that recovers to the same state: the data topic is truncated only below
what two snapshots, read back from the meta topic, still need.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from inspect import isawaitable

import msgspec

from tidebook.runtime.clock import Clock, Ids
from tidebook.runtime.metrics import Metrics
from tidebook.wal.cleaning import Pinned, copies_needed, pinned_tables, plan_truncation
from tidebook.wal.meta import RegionMeta
from tidebook.wal.settings import WalSettings
from tidebook.wal.snapshot import RegionSnapshot, take_snapshot
from tidebook.wal.topics import RegionTopics

#: Called with a table that retains more than `force_flush_bytes`: flush it, then call `mark_deleted`.
OnPinned = Callable[[Pinned], Awaitable[None] | None]


class Cleaned(msgspec.Struct, frozen=True):
    """The result of a cleaning."""

    #: The first offset of the data topic after the cleaning.
    truncated_to: int
    #: How many offsets were removed.
    removed: int
    #: The table that keeps the log from being truncated further; None if no table has entries.
    pinned_by: int | None
    #: How many bytes of the log the tables still need.
    held_bytes: int


class Cleaner:
    """Write snapshots of a region's state, and truncate the records that no table needs any more."""

    def __init__(
        self,
        topics: RegionTopics,
        meta: RegionMeta,
        *,
        settings: WalSettings,
        clock: Clock,
        ids: Ids,
        metrics: Metrics,
        labels: dict[str, object],
        on_pinned: OnPinned | None,
    ) -> None:
        self._topics = topics
        self._meta = meta
        self._settings = settings
        self._clock = clock
        self._ids = ids
        self._metrics = metrics
        self._labels = labels
        self.on_pinned = on_pinned
        self._is_offering = False
        self._taken_ms: int | None = None
        self._taken_bytes = meta.meter.total_bytes

    @property
    def snapshot_age_ms(self) -> int | None:
        """The age of the newest snapshot that this object wrote or was restored from; None before the first."""
        known = [taken for taken in (self._taken_ms, self._meta.snapshot_ms) if taken is not None]
        return self._clock.now_ms() - max(known) if known else None

    @property
    def is_snapshot_due(self) -> bool:
        """Whether `snapshot_every_bytes` were written since the last snapshot."""
        return self._meta.meter.total_bytes - self._taken_bytes >= self._settings.snapshot_every_bytes

    async def snapshot(self, *, truncated_to: int = 0, copies: int = 1) -> RegionSnapshot:
        """Write `copies` snapshots of the current state to the meta topic; return it once all are acknowledged."""
        total_bytes = self._meta.meter.total_bytes
        snapshot = take_snapshot(
            self._meta, topic_id=self._topics.topic_id, truncated_to=truncated_to, taken_ms=self._clock.now_ms()
        )
        for _ in range(copies):
            await self._topics.put_snapshot(snapshot, snapshot_id=self._ids.new())
        self._taken_ms, self._taken_bytes = snapshot.taken_ms, total_bytes
        self._metrics.count("wal_snapshots", copies, **self._labels)
        return snapshot

    async def clean(self) -> Cleaned:
        """Truncate the records that the current state does not need."""
        start = (await self._topics.bounds()).start
        wanted = self._meta.first_offset
        if wanted > start:
            stored = (await self._topics.snapshots()).stored
            copies = copies_needed(stored, topic_id=self._topics.topic_id, wanted=wanted)
            await self.snapshot(truncated_to=wanted, copies=copies)
        # Decide from the snapshots read back from the meta topic: one that is unreadable must not count.
        stored = (await self._topics.snapshots()).stored
        truncation = plan_truncation(stored, topic_id=self._topics.topic_id, wanted=wanted)
        new_start = start
        if truncation is not None:
            await self._topics.truncate(data_before=truncation.data_before, meta_before=truncation.meta_before)
            self._meta.truncated_to = max(self._meta.truncated_to, truncation.data_before)
            self._meta.meter.remove_below(truncation.data_before)
            new_start = max(start, truncation.data_before)
        pinned = pinned_tables(self._meta)
        self._publish(pinned)
        return Cleaned(new_start, new_start - start, pinned[0].table if pinned else None, self._meta.held_bytes)

    async def offer_pinned(self) -> None:
        """Call the flush callback for each table that retains more than `force_flush_bytes`, oldest first."""
        if self.on_pinned is None or not self._settings.force_flush_bytes or self._is_offering:
            return
        self._is_offering = True  # a callback that calls `clean` must not be called again for the same table
        try:
            for pinned in pinned_tables(self._meta):
                if pinned.held_bytes <= self._settings.force_flush_bytes:
                    break
                self._metrics.count("wal_forced_flushes", 1, **self._labels)
                result = self.on_pinned(pinned)
                if result is not None and isawaitable(result):
                    await result
        finally:
            self._is_offering = False

    def _publish(self, pinned: list[Pinned]) -> None:
        self._metrics.gauge("wal_held_bytes", self._meta.held_bytes, **self._labels)
        self._metrics.gauge("wal_tables", len(self._meta.tables), **self._labels)
        self._metrics.gauge("wal_pinned_by_table", pinned[0].table if pinned else -1, **self._labels)
        if self.snapshot_age_ms is not None:
            self._metrics.gauge("wal_snapshot_age_seconds", self.snapshot_age_ms / 1000, **self._labels)
