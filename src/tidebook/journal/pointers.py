"""Through where the store has a partition of the log."""

from __future__ import annotations

import math
import time

from tidebook.core.replication import Pointer
from tidebook.store.port import StoreReader

#: How old a pointer may be that a read begins from: the tail that it folds grows with it.
RECENT_S_MAX = 1.0


class Pointers:
    """One partition's pointer: asked for, or known from a moment ago."""

    def __init__(self, store: StoreReader, topic: str, partition: int) -> None:
        self._store = store
        self._topic = topic
        self._partition = partition
        self._known: Pointer | None = None
        self._asked_at = -math.inf

    async def now(self) -> Pointer | None:
        """Ask for it."""
        began = time.monotonic()
        self._known = await self._store.pointer(self._topic, self._partition)
        self._asked_at = began
        return self._known

    async def recent(self, base: int) -> Pointer | None:
        """An older one is no worse for a read to begin from, if the tail, which begins at `base`, goes back so far."""
        known = self._known
        young = time.monotonic() - self._asked_at <= RECENT_S_MAX
        if known is None or not young or known.position.offset + 1 < base:
            return await self.now()
        return known
