"""Barriers of reads: a barrier is an offset at or after the last record of the log at the moment when a read begins.

Reads share marks. A read may only share a mark that was not yet sent when the read began: an append that was
acknowledged after the mark in flight would otherwise be missed by a read that starts after that acknowledgement. So
one mark is in flight, and the next one collects the reads that arrive meanwhile.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from tidebook.core.action import Mark
from tidebook.core.errors import OutcomeUnknown, Unavailable
from tidebook.journal.head_cache import HeadCache
from tidebook.journal.settings import BarrierKind
from tidebook.log.port import Log
from tidebook.runtime.futures import ignore_failure


class Barriers:
    """Fixes the barriers of reads in one partition."""

    def __init__(self, log: Log, cache: HeadCache) -> None:
        self._log = log
        self._cache = cache
        self._in_flight: asyncio.Task[int] | None = None
        self._next: asyncio.Task[int] | None = None

    async def fix(self, kind: BarrierKind) -> int:
        """Return an offset that is not below any record acknowledged before this call.

        Raise Unavailable if the end of the log cannot be read, and Corrupt if the log was recreated.
        """
        cache = self._cache
        cache.check_log()
        if kind == "offset" or self._log.end_is_linearizable:
            seen = cache.seen
            last = await self._log.end(cache.topic, cache.partition) - 1
            # Only a linearizable end proves anything: a partitioned leader may report an old one.
            if self._log.end_is_linearizable and last < seen:
                cache.is_recreated(last, seen)
                cache.check_log()
            return max(cache.seen, last)
        if self._next is None:
            self._next = asyncio.create_task(self._send(self._in_flight))
            self._next.add_done_callback(ignore_failure)
        return await asyncio.shield(self._next)

    async def _send(self, before: asyncio.Task[int] | None) -> int:
        if before is not None:
            await asyncio.wait([before])
        else:
            await asyncio.sleep(0)  # reads that start in the same loop iteration share the mark
        self._in_flight, self._next = self._next, None
        try:
            # The tail then takes the mark at its acknowledgement instead of reading it from the log.
            with suppress(Unavailable):  # a caller that needs the store gets the error itself
                await self._cache.begin()
            sent, _ = await self._cache.write(Mark(self._cache.config.epoch))
        except OutcomeUnknown as error:  # only the mark's outcome is unknown: a read writes nothing else
            raise Unavailable(f"the end of the log is unknown: {error}") from error
        finally:
            self._in_flight = None
        return sent.offset
