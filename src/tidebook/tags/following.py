"""The hint of live streams to the pipeline: while it is renewed, idle partitions get ticks often."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from tidebook.core.errors import OutcomeUnknown, Unavailable
from tidebook.runtime.clock import Clock
from tidebook.store.port import StoreWriter

#: The store's setting that live streams renew. Its value is a time, but a ticker only watches whether it changes.
FOLLOWED_SETTING = "tags/followed"
RENEW_S = 3.0


class Following:
    """Renews the setting that announces a live stream, at most every `RENEW_S` seconds."""

    def __init__(self, store: StoreWriter, clock: Clock, *, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._now_s = monotonic_s
        self._renewed_s = -RENEW_S

    async def renew(self) -> None:
        """Renew the setting unless that was done recently.

        If two streams renew it at the same time, one of them succeeds, which is enough. The setting is only a hint, so
        errors of the store are ignored: a store that rejects writes may still serve reads.
        """
        now_s = self._now_s()
        if now_s - self._renewed_s < RENEW_S:
            return
        self._renewed_s = now_s
        with suppress(Unavailable, OutcomeUnknown):
            if not await self._store.topics():  # nothing can be ticked, and a reader must not create the book
                self._renewed_s = -RENEW_S
                return
            before = await self._store.setting(FOLLOWED_SETTING)
            value = str(self._clock.now_ms())
            if value != before:
                await self._store.set_setting(FOLLOWED_SETTING, value, expected=before)
