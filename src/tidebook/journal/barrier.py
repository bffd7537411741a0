"""Barriers: where the log ended, at some moment after the read began.

A read may share only a mark that had not been sent when the read began: one mark is in flight, one gathers. Else an
append that was acknowledged behind a mark already sent would be missed by a read that starts after it.
"""

from __future__ import annotations

import asyncio

from tidebook.core.action import Mark
from tidebook.core.errors import Unavailable
from tidebook.journal.head_cache import HeadCache
from tidebook.journal.settings import BarrierKind
from tidebook.log.port import Log


class Barriers:
    """The barriers of one partition."""

    def __init__(self, log: Log, cache: HeadCache) -> None:
        self._log = log
        self._cache = cache
        self._in_flight: asyncio.Task[int] | None = None
        self._gathering: asyncio.Task[int] | None = None

    async def fix(self, kind: BarrierKind) -> int:
        """The last offset of the log, or an earlier one where nothing lies between."""
        if kind == "offset" or self._log.end_is_linearizable:
            return max(self._cache.seen, await self._log.end(self._cache.topic, self._cache.partition) - 1)
        if self._gathering is None:
            self._gathering = asyncio.create_task(self._send(self._in_flight))
        return await asyncio.shield(self._gathering)

    async def _send(self, before: asyncio.Task[int] | None) -> int:
        if before is not None:
            await asyncio.wait([before])
        else:
            await asyncio.sleep(0)  # whoever asks in the same breath shares it
        self._in_flight, self._gathering = self._gathering, None
        try:
            if self._cache.next_offset < 0:
                await self._begin()
            sent = await self._cache.write(Mark(self._cache.facts.epoch))
        finally:
            self._in_flight = None
        return sent.offset

    async def _begin(self) -> None:
        """A tail that has begun takes the mark when it is acknowledged; else the log would be read for it alone."""
        try:
            await self._cache.begin()
        except Unavailable:
            pass  # whoever needs the store is told so
