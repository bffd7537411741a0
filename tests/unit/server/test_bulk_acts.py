"""An act on many entries: its progress, its end, and what is recorded of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from tidebook.core.errors import NotFound, Unavailable
from tidebook.runtime.clock import SystemClock
from tidebook.server.console.bulk import ENDED_MAX, RUNNING_MAX, BulkAct, BulkActs


class Recorder:
    """Records the acts that have ended; until `may_write` is set it waits, like an audit that cannot be written."""

    def __init__(self) -> None:
        self.ended: list[tuple[str, int]] = []
        self.begun = asyncio.Event()
        self.may_write = asyncio.Event()

    async def __call__(self, act: BulkAct) -> None:
        self.begun.set()
        await self.may_write.wait()
        self.ended.append((act.state, act.changed))


async def pages(*counts: int) -> AsyncGenerator[int, None]:
    for count in counts:
        yield count


async def endless() -> AsyncGenerator[int, None]:
    while True:
        yield 5


async def until(act: BulkAct, changed: int) -> None:
    while act.changed < changed:  # noqa: ASYNC110
        await asyncio.sleep(0)


async def test_a_second_cancellation_does_not_keep_the_first_from_being_recorded() -> None:
    acts, recorder = BulkActs(SystemClock()), Recorder()
    act = acts.start("Drop", "mail", 9, endless(), recorder)
    await until(act, 5)
    first = asyncio.create_task(act.cancel())
    await recorder.begun.wait()
    second = asyncio.create_task(act.cancel())
    await asyncio.sleep(0)
    recorder.may_write.set()
    await asyncio.gather(first, second)
    assert recorder.ended == [("cancelled", act.changed)]


async def test_a_cancelled_act_finishes_its_page_so_that_all_its_changes_are_counted() -> None:
    acts, recorder, begun, may_end = BulkActs(SystemClock()), Recorder(), asyncio.Event(), asyncio.Event()
    recorder.may_write.set()

    async def steps() -> AsyncGenerator[int, None]:
        begun.set()
        await may_end.wait()
        yield 5
        yield 4

    act = acts.start("Drop", "mail", 9, steps(), recorder)
    await begun.wait()
    cancelling = asyncio.create_task(act.cancel())
    await asyncio.sleep(0)
    may_end.set()
    await cancelling
    assert recorder.ended == [("cancelled", 5)]


async def test_a_page_that_does_not_end_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidebook.server.console.bulk.STOP_S", 0.0)
    acts, recorder, begun = BulkActs(SystemClock()), Recorder(), asyncio.Event()
    recorder.may_write.set()

    async def steps() -> AsyncGenerator[int, None]:
        begun.set()
        await asyncio.Event().wait()
        yield 5

    act = acts.start("Drop", "mail", 9, steps(), recorder)
    await begun.wait()
    await act.cancel()
    assert recorder.ended == [("cancelled", 0)]


async def test_an_act_counts_what_it_changed_and_reports_its_error() -> None:
    acts, recorder = BulkActs(SystemClock()), Recorder()
    recorder.may_write.set()

    async def failing() -> AsyncGenerator[int, None]:
        yield 3
        raise Unavailable("the queue does not answer")

    done, failed = (acts.start("Drop", "mail", 9, steps, recorder) for steps in (pages(4, 5), failing()))
    await until(done, 9)
    while len(recorder.ended) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert recorder.ended == [("done", 9), ("failed", 3)] or recorder.ended == [("failed", 3), ("done", 9)]
    assert acts.response(failed).error == "the queue does not answer"
    assert acts.find(done.id, "mail") is done
    with pytest.raises(NotFound):
        acts.find(done.id, "other")


async def test_an_act_that_fails_unexpectedly_is_recorded_and_refers_to_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    acts, recorder = BulkActs(SystemClock()), Recorder()
    recorder.may_write.set()

    async def failing() -> AsyncGenerator[int, None]:
        yield 3
        raise ZeroDivisionError

    act = acts.start("Drop", "mail", 9, failing(), recorder)
    while not recorder.ended:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert recorder.ended == [("failed", 3)]
    assert "log has the cause" in str(acts.response(act).error)
    assert "ZeroDivisionError" in caplog.text


async def test_the_acts_that_run_and_the_ended_ones_that_are_remembered_are_bounded() -> None:
    acts, recorder = BulkActs(SystemClock()), Recorder()
    recorder.may_write.set()
    first = acts.start("Drop", "mail", 1, pages(1), recorder)
    for _ in range(ENDED_MAX + 1):
        latest = acts.start("Drop", "mail", 1, pages(1), recorder)
        await until(latest, 1)
        await latest.cancel()
    with pytest.raises(NotFound):
        acts.find(first.id, "mail")
    running = [acts.start("Drop", "mail", 9, endless(), recorder) for _ in range(RUNNING_MAX)]
    with pytest.raises(Unavailable, match="are running"):
        acts.start("Drop", "mail", 9, endless(), recorder)
    assert [each.id for each in acts.running("mail")] == [each.id for each in running]
    await acts.close()
    assert acts.running("mail") == []
