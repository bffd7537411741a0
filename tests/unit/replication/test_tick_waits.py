"""How long a ticker waits, and what ends a wait: in virtual time, over a log and a store in memory.

All durations are binary fractions, so that sums of them are exact.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, cast

import pytest

from tests.unit.replication.memory import TOPIC, Run, now_s
from tidebook.core.errors import Unavailable
from tidebook.replication import ticks
from tidebook.replication.ticks import FOLLOWED_CHECK_S, Ticker, TickIntervals
from tidebook.runtime.metrics import Metrics


class ScriptedTicker(Ticker):
    """A ticker whose steps are recorded, and end as scripted."""

    def __init__(self, store: object, *script: float | Exception, intervals: TickIntervals) -> None:
        super().__init__(cast(Any, None), cast(Any, store), intervals=intervals, monotonic_s=now_s)
        self._script = list(script)
        self.steps_s: list[float] = []

    async def step(self) -> float:
        self.steps_s.append(now_s())
        outcome = self._script.pop(0) if self._script else FOLLOWED_CHECK_S
        if isinstance(outcome, Exception):
            raise outcome
        if outcome <= self._intervals.followed_s:
            self._ticked_s = now_s()
        return outcome


class WaitedStore:
    """A store in which nothing changes, and which records its waits with their time."""

    def __init__(self) -> None:
        self.waits: list[tuple[float, float, int]] = []

    async def wait_any(self, *, timeout_s: float, since: int) -> int:
        self.waits.append((now_s(), timeout_s, since))
        await asyncio.sleep(timeout_s)
        return len(self.waits)


INTERVALS = TickIntervals(followed_s=0.5, idle_s=4.0, pause_s=0.125, check_s=2.0)


async def for_a_while(running: Coroutine[Any, Any, None], seconds: float) -> None:
    task = asyncio.ensure_future(running)
    await asyncio.sleep(seconds)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_a_woken_ticker_rests_until_the_next_tick_is_allowed_and_then_waits_for_a_change(run: Run) -> None:
    async def program() -> None:
        store = WaitedStore()
        ticker = ScriptedTicker(store, 0.5, 0.5, 3.0, intervals=INTERVALS)
        await for_a_while(ticker.run_woken(Metrics()), 6.25)
        assert ticker.steps_s == [0.0, 1.5, 3.0, 6.125]
        # With live streams it waits for one check interval; without them, for as long as the step has returned.
        assert store.waits == [(0.5, FOLLOWED_CHECK_S, -1), (2.0, FOLLOWED_CHECK_S, 1), (3.125, 3.0, 2)]

    run(program())


def test_a_woken_ticker_continues_a_second_after_an_error(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def program() -> None:
        metrics = Metrics()
        ticker = ScriptedTicker(
            WaitedStore(), Unavailable("it is down"), ZeroDivisionError("a bug"), intervals=INTERVALS
        )
        await for_a_while(ticker.run_woken(metrics), 2.0625)
        assert ticker.steps_s == [0.0, 1.0, 2.0]
        assert metrics.counted("tags_tick_failures") == 2

    run(program())
    assert "ZeroDivisionError" in caplog.text
    assert "Unavailable" not in caplog.text, "the replication reports the error"


def test_a_ticker_replicates_its_ticks_and_rests_while_a_stream_is_followed(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    replicated: list[tuple[float, object]] = []

    async def replicate(log: object, store: object, alone: object) -> None:
        replicated.append((now_s(), alone))

    monkeypatch.setattr(ticks, "replicate_adjacent_ticks", replicate)

    async def program() -> None:
        store, metrics = WaitedStore(), Metrics()
        ticker = ScriptedTicker(store, 2.0, 0.5, 0.5, Unavailable("it is down"), intervals=INTERVALS)
        ticker.adjacent = {(TOPIC, 0): 7}
        await for_a_while(ticker.run(metrics), 5.5)
        assert ticker.steps_s == [1.0, 3.0, 3.5, 4.0, 5.0]
        assert replicated == [(3.0, {(TOPIC, 0): 7}), (3.5, {(TOPIC, 0): 7})]
        assert store.waits == [], "right after a tick no change is waited for"
        assert metrics.counted("tags_tick_failures") == 1

    run(program())


def test_a_rest_right_after_a_tick_or_without_followers_takes_its_whole_time(run: Run) -> None:
    async def program() -> None:
        store = WaitedStore()
        ticker = ScriptedTicker(store, 0.5, intervals=INTERVALS)
        await ticker.step()
        await ticker.pause(0.5)
        assert now_s() == 0.5
        await ticker.pause(2.0)
        assert (now_s(), store.waits) == (2.5, [])
        await ticker.pause(0.5)
        assert (now_s(), store.waits) == (3.0, [(2.625, 0.375, -1)])

    run(program())


@pytest.mark.parametrize(("after_s", "waits"), [(0.1875, 0), (0.25, 1)])
def test_a_pause_ends_at_a_change_only_in_the_second_half_of_the_interval_after_a_tick(
    run: Run, after_s: float, waits: int
) -> None:
    async def program() -> None:
        store = WaitedStore()
        ticker = ScriptedTicker(store, 0.5, intervals=INTERVALS)
        await ticker.step()
        await asyncio.sleep(after_s)
        await ticker.pause(0.5)
        assert (now_s(), len(store.waits)) == (after_s + 0.5, waits)

    run(program())
