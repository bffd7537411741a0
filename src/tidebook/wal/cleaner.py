"""The cleaner: snapshot → decide → sync the snapshot → cut the data topic → cut old snapshots.

A crash between any two steps leaves a region that recovers to the same meta: the data topic is cut only where two
good snapshots, read back, no longer need it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from inspect import isawaitable

import msgspec

from tidebook.core.clock import Clock, Ids
from tidebook.core.metrics import Metrics
from tidebook.wal.cleaning import Pinned, copies_needed, decide_cut, pinned_tables
from tidebook.wal.meta import RegionMeta
from tidebook.wal.settings import WalSettings
from tidebook.wal.snapshot import Snapshot, take_snapshot
from tidebook.wal.topics import RegionTopics

#: Told of a table that holds more than `force_flush_bytes`: flush it, then `mark_deleted`.
OnPinned = Callable[[Pinned], Awaitable[None] | None]


class Cleaned(msgspec.Struct, frozen=True):
    """What a cleaning did."""

    #: Where the data topic begins now.
    truncated_to: int
    #: How many offsets went with it.
    removed: int
    pinned_by: int | None
    held_bytes: int


class Cleaner:
    """Takes snapshots of a region's meta, and removes what no table needs any more."""

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
        """How old the last snapshot is that was taken here, or restored; None before the first."""
        known = [taken for taken in (self._taken_ms, self._meta.snapshot_ms) if taken is not None]
        return self._clock.now_ms() - max(known) if known else None

    @property
    def is_snapshot_due(self) -> bool:
        """Whether a recovery would have much to scan."""
        return self._meta.meter.total_bytes - self._taken_bytes >= self._settings.snapshot_every_bytes

    async def snapshot(self, *, truncated_to: int = 0, copies: int = 1) -> Snapshot:
        """Write the meta to the meta topic, acknowledged."""
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
        """Remove what the meta, as it stands, does not need."""
        start = (await self._topics.bounds()).start
        wanted = self._meta.first_offset
        if wanted > start:
            stored = (await self._topics.snapshots()).stored
            copies = copies_needed(stored, topic_id=self._topics.topic_id, wanted=wanted)
            await self.snapshot(truncated_to=wanted, copies=copies)
        # From what the meta topic really holds: a snapshot that cannot be read back is never relied on.
        stored = (await self._topics.snapshots()).stored
        cut = decide_cut(stored, topic_id=self._topics.topic_id, wanted=wanted)
        now_at = start
        if cut is not None:
            await self._topics.cut(data_before=cut.data_before, meta_before=cut.meta_before)
            self._meta.truncated_to = max(self._meta.truncated_to, cut.data_before)
            self._meta.meter.remove_below(cut.data_before)
            now_at = max(start, cut.data_before)
        pinned = pinned_tables(self._meta)
        self._publish(pinned)
        return Cleaned(now_at, now_at - start, pinned[0].table if pinned else None, self._meta.held_bytes)

    async def offer_pinned(self) -> None:
        """Offer the tables that hold too much to the flush callback, the oldest first."""
        if self.on_pinned is None or not self._settings.force_flush_bytes or self._is_offering:
            return
        self._is_offering = True  # a callback that cleans must not be offered the same table by that
        try:
            for pinned in pinned_tables(self._meta):
                if pinned.held_bytes <= self._settings.force_flush_bytes:
                    break
                self._metrics.count("wal_forced_flushes", 1, **self._labels)
                waiting = self.on_pinned(pinned)
                if waiting is not None and isawaitable(waiting):
                    await waiting
        finally:
            self._is_offering = False

    def _publish(self, pinned: list[Pinned]) -> None:
        self._metrics.gauge("wal_held_bytes", self._meta.held_bytes, **self._labels)
        self._metrics.gauge("wal_tables", len(self._meta.tables), **self._labels)
        self._metrics.gauge("wal_pinned_by_table", pinned[0].table if pinned else -1, **self._labels)
        if self.snapshot_age_ms is not None:
            self._metrics.gauge("wal_snapshot_age_seconds", self.snapshot_age_ms / 1000, **self._labels)
