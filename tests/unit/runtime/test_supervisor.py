"""A supervisor runs the parts of a program, restarts and reports parts that fail, and drains."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable

import pytest

from tidebook.core.errors import InvalidInput, Unavailable
from tidebook.runtime import supervisor as module
from tidebook.runtime.clock import SystemClock
from tidebook.runtime.metrics import Metrics
from tidebook.runtime.supervisor import RunStatus, Supervisor
from tidebook.testing.clock import ManualClock

WITHIN_S = 10.0


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RESTART_FIRST_S", 0.001)


class Failing:
    """A part that fails a number of times, then runs until it is cancelled."""

    name = "failing"

    def __init__(self, times: int, error: BaseException | None = None) -> None:
        self.left = times
        self.error = error or RuntimeError("no luck")
        self.runs = asyncio.Event()

    async def run(self) -> None:
        if self.left:
            self.left -= 1
            raise self.error
        self.runs.set()
        await asyncio.Event().wait()


class Finishing:
    """A part that works until it is stopped, and finishes the work that it has begun."""

    def __init__(self) -> None:
        self.stops = 0
        self.finished = False
        self._stopped = asyncio.Event()
        self.may_finish = asyncio.Event()

    def stop(self) -> None:
        self.stops += 1
        self._stopped.set()

    async def run(self) -> None:
        await self._stopped.wait()
        await self.may_finish.wait()
        self.finished = True


def supervised(*parts: object, grace_s: float = 5.0, metrics: Metrics | None = None) -> Supervisor:
    return Supervisor(parts, clock=SystemClock(), grace_s=grace_s, metrics=metrics)


def only(running: Supervisor) -> RunStatus:
    (status,) = running.status()
    return status


async def reached(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_a_part_that_fails_is_restarted_and_reported() -> None:
    part, metrics = Failing(3), Metrics()
    async with supervised(part, metrics=metrics) as running:
        async with asyncio.timeout(WITHIN_S):
            await part.runs.wait()
        status = only(running)
        assert (status.name, status.state, status.failures) == ("failing", "running", 3)
        assert status.last_error == "RuntimeError: no luck"
    assert only(running).state == "stopped"
    assert metrics.counted("running_failures", part="failing") == 3


async def test_a_status_has_the_time_of_its_last_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RESTART_FIRST_S", 1000.0)
    clock = ManualClock(5_000)
    part = Failing(1)
    async with Supervisor([part], clock=clock) as running:
        await reached(lambda: only(running).state == "restarting")
        assert only(running).since.timestamp() == 5
        assert not only(running).healthy


async def test_one_part_does_not_affect_another() -> None:
    bad, good = Failing(1_000_000), Failing(0)
    async with supervised(bad, good) as running:
        async with asyncio.timeout(WITHIN_S):
            await good.runs.wait()
        await reached(lambda: running.status()[0].failures >= 2)
        assert running.status()[1].failures == 0


async def test_a_part_that_cancels_itself_is_restarted() -> None:
    part = Failing(1, asyncio.CancelledError())
    async with supervised(part) as running:
        async with asyncio.timeout(WITHIN_S):
            await part.runs.wait()
        assert only(running).failures == 1


async def test_a_part_that_ends_with_a_base_exception_has_failed_and_is_not_restarted() -> None:
    part, metrics = Failing(1, Ending("no more")), Metrics()
    async with supervised(part, metrics=metrics) as running:
        await reached(lambda: only(running).state == "failed")
        assert not only(running).healthy
        assert only(running).problem == "Ending: no more"
        with pytest.raises(Unavailable, match="failing failed and is not restarted: Ending: no more"):
            await running.settle()
    assert (only(running).state, part.runs.is_set()) == ("failed", False)
    assert metrics.counted("running_failures", part="failing") == 1


class Ending(BaseException):
    """An error that `except Exception` does not catch."""


async def test_a_part_that_returns_has_ended_and_is_not_restarted() -> None:
    runs = 0

    async def once() -> None:
        nonlocal runs
        runs += 1

    async with supervised(once) as running:
        await reached(lambda: only(running).state == "ended")
        assert only(running).healthy
    assert (runs, only(running).state) == (1, "ended")


async def test_draining_lets_a_part_finish_the_work_that_it_has_begun() -> None:
    part = Finishing()
    async with supervised(part):
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_later(0.01, part.may_finish.set)
    assert (part.stops, part.finished) == (1, True)


async def test_a_part_that_does_not_finish_is_cancelled_after_the_grace_period() -> None:
    part = Finishing()
    began_s = time.monotonic()
    async with supervised(part, grace_s=0.05) as running:
        await asyncio.sleep(0)
    assert not part.finished
    assert only(running).state == "stopped"
    assert time.monotonic() - began_s < 2


async def test_a_part_that_waits_for_its_restart_stops_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RESTART_FIRST_S", 1000.0)
    part = Failing(1)
    async with supervised(part) as running:
        await reached(lambda: only(running).state == "restarting")
        began_s = time.monotonic()
    assert time.monotonic() - began_s < 2
    assert only(running).state == "stopped"


async def test_an_error_of_the_block_drains_and_is_raised() -> None:
    part = Failing(0)
    with pytest.raises(ZeroDivisionError):
        async with supervised(part) as running:
            raise ZeroDivisionError
    assert only(running).state == "stopped"


async def test_parts_settle_in_the_order_in_which_they_were_given() -> None:
    settled = []

    class Settling(Failing):
        def __init__(self, number: int) -> None:
            super().__init__(0)
            self.number = number

        async def settle(self) -> None:
            settled.append(self.number)

    async with supervised(Settling(1), Failing(0), Settling(2)) as running:
        await running.settle()
    assert settled == [1, 2]


async def test_equal_names_get_different_numbers() -> None:
    async with supervised(Failing(0), Failing(0)) as running:
        assert [each.name for each in running.status()] == ["failing", "failing 2"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_the_wait_and_the_former_handlers_are_restored(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    async with supervised(Failing(0)) as running:
        asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), number)
        async with asyncio.timeout(WITHIN_S):
            await running.until_stopped()
        assert signal.getsignal(number) == before


async def test_signals_are_awaited_in_the_main_thread_only() -> None:
    found: list[Exception] = []

    def wait() -> None:
        try:
            asyncio.run(supervised().until_stopped())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    await asyncio.to_thread(thread.join)
    assert isinstance(found[0], InvalidInput)


def test_an_object_that_cannot_be_run_is_refused_with_the_remedy() -> None:
    async def part() -> None: ...

    class Blocking:
        def run(self) -> None: ...

    for wrong, reason in ((part(), "cannot be started twice"), (Blocking(), "async def run"), (3, "async def run")):
        with pytest.raises(InvalidInput, match=reason):
            supervised(wrong)
