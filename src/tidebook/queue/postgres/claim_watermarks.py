"""Claim watermarks: dates before which no entry of a priority waits, so that claims skip dead rows (decision 0079)."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

import msgspec

from tidebook.queue.port import QueueRef
from tidebook.queue.postgres.statement_runner import StatementRunner
from tidebook.queue.postgres.statements import TableStatements

#: A new reading is taken after this many claimed entries.
CLAIMED_LEAST = 1_000
#: A claim ignores the watermarks at least this often. This bounds how long an entry may be out of order after the
#: server's clock was set back, or after another process merged it into one of a more urgent priority.
TRUSTED_S_MAX = 1.0


class WatermarkReading(msgspec.Struct, frozen=True):
    """What one snapshot showed of a queue."""

    #: The server's time before the snapshot was taken.
    began_ms: int
    #: Transactions with smaller ids had ended.
    ended: int
    #: Transactions from this id on had not begun.
    begun: int
    #: The first date of a waiting entry, by priority.
    firsts: Mapping[int, int]


def watermarks_of(
    earlier: WatermarkReading, later: WatermarkReading, priorities: Iterable[int]
) -> dict[int, int] | None:
    """Return, for each priority, the date before which no entry waits or will wait; None if that is not proven.

    An entry that the later snapshot does not show was put by a transaction that got its id after the earlier snapshot,
    and so has a later date, provided that all transactions with an earlier id have ended.
    """
    if not earlier.begun <= later.ended <= later.begun:
        return None
    all_priorities = {*priorities, *later.firsts}
    return {
        priority: min(later.firsts.get(priority, earlier.began_ms), earlier.began_ms)
        for priority in sorted(all_priorities)
    }


class _QueueState(msgspec.Struct):
    claimed: int = 0
    reading: WatermarkReading | None = None
    priorities: set[int] = msgspec.field(default_factory=set)
    watermarks: dict[int, int] = msgspec.field(default_factory=dict)
    scanned_at: float = 0.0


class ClaimWatermarks:
    """The claim watermarks of the queues that this process uses."""

    def __init__(self, runner: StatementRunner) -> None:
        self._runner = runner
        self._states: dict[int, _QueueState] = {}

    def for_claim(self, queue: QueueRef) -> Mapping[int, int]:
        """Return the watermark of each priority; empty if none is known, or if a full scan is due."""
        state = self._states.get(queue.id)
        if state is None or not state.watermarks:
            return {}
        now = time.monotonic()
        if now - state.scanned_at > TRUSTED_S_MAX:
            state.scanned_at = now
            return {}
        return state.watermarks

    def record_claim(self, queue: QueueRef, firsts: Mapping[int, int], count: int) -> None:
        """Record a claim: the first date of each priority, and the number of entries.

        An entry from before a watermark proves the watermark wrong, so it is reset.
        """
        state = self._states.get(queue.id)
        if state is None:
            state = self._states[queue.id] = _QueueState()
        state.claimed += count
        state.priorities.update(firsts)
        if any(date < state.watermarks.get(priority, 0) for priority, date in firsts.items()):
            self.reset(queue)

    def reset(self, queue: QueueRef) -> None:
        """Discard the watermarks of a queue: entries with earlier dates may be waiting."""
        state = self._states.get(queue.id)
        if state is not None:
            state.watermarks, state.reading = {}, None

    async def refresh(self, queue: QueueRef, sql: TableStatements) -> None:
        """Read new watermarks, if enough entries were claimed since the last reading."""
        state = self._states.get(queue.id)
        if state is None or state.claimed < CLAIMED_LEAST:
            return
        ((began_ms, ended, begun, priorities, firsts),) = await self._runner.rows(
            sql.watermarks, (queue.id,), writes=False
        )
        reading = WatermarkReading(began_ms, ended, begun, dict(zip(priorities, firsts, strict=True)))
        state.claimed = 0
        if state.reading is None:
            state.reading = reading
            return
        watermarks = watermarks_of(state.reading, reading, state.priorities)
        if watermarks is not None:
            state.watermarks, state.reading = watermarks, reading
        elif reading.begun < state.reading.begun:  # ids that decrease come from another server
            state.watermarks, state.reading = {}, reading
