"""Floors: from which date on a claim need look, priority by priority, where finished entries lie below (0079)."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

import msgspec

from tidebook.sql.port.queue import QueueRef
from tidebook.sql.postgres.queue_calls import Calls
from tidebook.sql.queries.queue.statements import TableStatements

#: After this many claimed entries of a queue it is worth a look how far its claims may skip.
CLAIMED_LEAST = 1_000
#: A claim looks at everything at least this often: a server's clock that is set back, or an entry that another process
#: merged into one of a more urgent priority, is out of order for no longer.
TRUSTED_S_MAX = 1.0


class Reading(msgspec.Struct, frozen=True):
    """What one snapshot showed of a queue."""

    #: What the clock said before it was taken.
    began_ms: int
    #: Transactions with smaller numbers had ended.
    ended: int
    #: Transactions from this number on had not begun.
    begun: int
    #: The first date at which something waits, by priority.
    firsts: Mapping[int, int]


def floors_of(earlier: Reading, later: Reading, priorities: Iterable[int]) -> dict[int, int] | None:
    """The dates below which nothing waits, nor ever will; None where that cannot be known yet.

    What the later snapshot does not show is put by transactions that got their numbers after the earlier one was taken,
    and so with dates after it: provided that all which had a number then have ended.
    """
    if not earlier.begun <= later.ended <= later.begun:
        return None
    known = {*priorities, *later.firsts}
    return {each: min(later.firsts.get(each, earlier.began_ms), earlier.began_ms) for each in sorted(known)}


class _Known(msgspec.Struct):
    claimed: int = 0
    reading: Reading | None = None
    priorities: set[int] = msgspec.field(default_factory=set)
    floors: dict[int, int] = msgspec.field(default_factory=dict)
    walked_at: float = 0.0


class Floors:
    """What this process knows of the floors of its queues."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._known: dict[int, _Known] = {}

    def of(self, queue: QueueRef) -> Mapping[int, int]:
        """By priority; empty where nothing is known, or where it is time to look at everything."""
        known = self._known.get(queue.id)
        if known is None or not known.floors:
            return {}
        now = time.monotonic()
        if now - known.walked_at > TRUSTED_S_MAX:
            known.walked_at = now
            return {}
        return known.floors

    def claimed(self, queue: QueueRef, firsts: Mapping[int, int], count: int) -> None:
        """So many entries were claimed, from these dates on, by priority. One below a floor is not alone there."""
        known = self._known.get(queue.id)
        if known is None:
            known = self._known[queue.id] = _Known()
        known.claimed += count
        known.priorities.update(firsts)
        if any(date < known.floors.get(priority, 0) for priority, date in firsts.items()):
            self.forget(queue)

    def forget(self, queue: QueueRef) -> None:
        """Entries may have come to wait with earlier dates."""
        known = self._known.get(queue.id)
        if known is not None:
            known.floors, known.reading = {}, None

    async def look(self, queue: QueueRef, sql: TableStatements) -> None:
        """Learn how far claims may skip, where enough was claimed since it was last known."""
        known = self._known.get(queue.id)
        if known is None or known.claimed < CLAIMED_LEAST:
            return
        ((began_ms, ended, begun, priorities, firsts),) = await self._calls.rows(sql.floor, (queue.id,), writes=False)
        reading = Reading(began_ms, ended, begun, dict(zip(priorities, firsts, strict=True)))
        known.claimed = 0
        if known.reading is None:
            known.reading = reading
            return
        floors = floors_of(known.reading, reading, known.priorities)
        if floors is not None:
            known.floors, known.reading = floors, reading
        elif reading.begun < known.reading.begun:  # numbers that fall are those of another server
            known.floors, known.reading = {}, reading
