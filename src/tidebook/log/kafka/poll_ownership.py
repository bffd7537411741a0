"""Which thread polls a producer's client: the producer's own or the event loop's, and never both.

The thread polls while there is little to do, because it can block. The loop polls under load, and for acknowledgements
that arrive so soon that busy polling costs less than a wake-up from the thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, Final

#: This many acknowledgements in one poll count as load.
LOAD_RESULTS: Final = 8
#: While batches are in flight the loop polls at this interval, and hands over after so many empty polls.
_RETRY_S: Final = 0.0005
_EMPTY_POLLS_MAX: Final = 20
#: How long the loop keeps polling after a lone record, in case another one follows.
_IDLE_S: Final = 0.005
#: How soon the waiting thread notices that its loop was closed.
_LOOP_CHECK_S: Final = 1.0
#: The average latency of a lone record below which the loop polls: two thread wake-ups would be a third of it.
LOW_LATENCY_S: Final = 0.0006
#: How long the loop busy-polls for one acknowledgement.
BUSY_POLL_S: Final = 0.001
#: The weight of the newest sample in the moving average.
_WEIGHT: Final = 0.25


class AckLatencyEstimator:
    """Estimates the acknowledgement latency of lone records, to choose busy polling or a thread wake-up.

    Times are those of the event loop's clock.

    >>> latency = AckLatencyEstimator()
    >>> latency.sent(1.0)
    >>> latency.acknowledged(1.0003)
    >>> latency.low_latency, latency.should_busy_poll(1.0005), latency.should_busy_poll(1.002)
    (True, True, False)
    """

    __slots__ = ("_average_s", "_measuring", "low_latency", "sent_at")

    def __init__(self) -> None:
        self.sent_at = 0.0
        self.low_latency = False
        self._measuring = False
        self._average_s = -1.0

    def sent(self, now: float) -> None:
        """Start a sample: a record was sent while none was in flight."""
        self.sent_at = now
        self._measuring = True

    def discard_sample(self) -> None:
        """Discard the sample: other records were sent after it, so the next acknowledgement may be another one's."""
        self._measuring = False

    def acknowledged(self, now: float) -> None:
        """Complete the sample, if there is one."""
        if not self._measuring:
            return
        self._measuring = False
        took_s = now - self.sent_at
        self._average_s = took_s if self._average_s < 0 else self._average_s + _WEIGHT * (took_s - self._average_s)
        self.low_latency = self._average_s < LOW_LATENCY_S

    def should_busy_poll(self, now: float) -> bool:
        """Return whether the loop should still busy-poll for the record that was sent last."""
        return self.low_latency and now < self.sent_at + BUSY_POLL_S


class PollOwnership:
    """Decides which thread polls. The state belongs to the event loop; the thread only asks, and waits."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.ack_latency = AckLatencyEstimator()
        #: The loop polls, and the thread waits.
        self.loop_owns = False
        self._thread_may_poll = threading.Lock()
        self._thread_may_poll.acquire()
        self._idle_timer: asyncio.TimerHandle | None = None
        self._retry_timer: asyncio.TimerHandle | None = None
        self._empty_polls = 0

    def should_hand_to_loop(self, completed: list[Any]) -> bool:
        """Return whether the loop polls after these results, and the thread waits; called in the thread.

        `completed` is a flat list [callback, result, …]; the result of a batch is None, and a batch counts as load.
        """
        return len(completed) >= 2 * LOAD_RESULTS or (
            len(completed) > 0 and (completed[-1] is None or self.ack_latency.low_latency)
        )

    def wait_for_turn(self) -> bool:
        """Block until the loop has handed polling back; return False if the loop was closed. Called in the thread."""
        while not self._thread_may_poll.acquire(timeout=_LOOP_CHECK_S):
            if self._loop.is_closed():
                return False
        return True

    def take(self) -> None:
        """Make the loop the poller: the thread waits, or is about to."""
        self.loop_owns = True

    def reset_empty_polls(self) -> None:
        """Record that a poll of the loop had results."""
        self._empty_polls = 0

    def retry_soon(self, retry: Callable[[], None]) -> bool:
        """After an empty poll with batches in flight, return whether the loop keeps polling, and schedule `retry`.

        The thread would need the GIL for every single report, and take it from the code that makes the next records.
        """
        self._empty_polls += 1
        if self._empty_polls > _EMPTY_POLLS_MAX:
            self._empty_polls = 0
            return False
        if self._retry_timer is None:
            self._retry_timer = self._loop.call_later(_RETRY_S, self._retry, retry)
        return True

    def _retry(self, retry: Callable[[], None]) -> None:
        self._retry_timer = None
        if self.loop_owns:
            retry()

    def should_keep(self, in_flight: int) -> bool:
        """After an empty poll, return whether the loop keeps polling, for a low latency or for the next lone record."""
        if not self.ack_latency.low_latency or in_flight >= LOAD_RESULTS:
            return False
        if in_flight:
            return self.ack_latency.should_busy_poll(self._loop.time())
        if self._idle_timer is None:
            self._idle_timer = self._loop.call_later(_IDLE_S, self._idle_expired)
        return True

    def _idle_expired(self) -> None:
        self._idle_timer = None
        idle_s = self.ack_latency.sent_at + _IDLE_S - self._loop.time()
        if not self.loop_owns or idle_s <= 0:
            self.release()
        else:
            self._idle_timer = self._loop.call_later(idle_s, self._idle_expired)

    def release(self) -> None:
        """Hand polling back to the thread."""
        if self.loop_owns:
            self.loop_owns = False
            self._thread_may_poll.release()
