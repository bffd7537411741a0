"""A short-lived cache of one partition's replication pointer."""

from __future__ import annotations

import math
import time

from tidebook.core.replication_plan import Pointer
from tidebook.store.port import StoreReader

#: The age up to which a read may start from a cached pointer: the older it is, the longer the tail that is folded.
RECENT_S_MAX = 1.0


class PointerCache:
    """Reads one partition's pointer from the store, and remembers it for a moment."""

    def __init__(self, store: StoreReader, topic: str, partition: int) -> None:
        self._store = store
        self._topic = topic
        self._partition = partition
        self._cached: Pointer | None = None
        self._fetched_at = -math.inf

    async def fetch(self) -> Pointer | None:
        """Read the pointer from the store."""
        began = time.monotonic()
        self._cached = await self._store.pointer(self._topic, self._partition)
        self._fetched_at = began
        return self._cached

    async def recent(self, base: int) -> Pointer | None:
        """Return the cached pointer if it is fresh and not before the tail, which starts at `base`; else fetch it.

        An older pointer is correct for a read: the read only folds more of the tail.
        """
        cached = self._cached
        fresh = time.monotonic() - self._fetched_at <= RECENT_S_MAX
        if cached is None or not fresh or cached.position.offset + 1 < base:
            return await self.fetch()
        return cached
