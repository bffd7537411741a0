"""Work that several callers share may fail after all of them were cancelled: such an error is not reported."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tests.unit.journal.rig import Rig
from tidebook.core.action import Mark
from tidebook.core.errors import Unavailable
from tidebook.testing.faults import Faults, HeldCall

pytestmark = pytest.mark.parametrize("kind", ["like kafka"])

OpenRig = Callable[..., Rig]


@pytest.fixture(autouse=True)
async def nothing_is_reported() -> AsyncIterator[None]:
    """Fail if the event loop reports an exception that was never retrieved, which it does when a task is collected."""
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    yield
    await let_tasks_run()
    gc.collect()
    await let_tasks_run()
    assert [each["message"] for each in reported] == []


async def let_tasks_run() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def hold_then_fail(faults: Faults, call: str) -> HeldCall:
    held = faults.hold(call)
    faults._faults[call][-1].error = Unavailable("it is gone")
    return held


async def cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_mark_may_fail_after_its_readers_left(rig: Rig) -> None:
    await rig.append("a", 1)
    held = hold_then_fail(rig.log_faults, "send")
    reads = [asyncio.create_task(rig.read("a")) for _ in range(2)]
    await held.reached()
    await cancel(*reads)
    held.release()


async def test_a_mark_that_waits_to_be_sent_may_fail_after_its_readers_left(rig: Rig) -> None:
    await rig.append("a", 1)
    first, second = hold_then_fail(rig.log_faults, "send"), hold_then_fail(rig.log_faults, "send")
    early = asyncio.create_task(rig.read("a"))
    await first.reached()
    late = asyncio.create_task(rig.read("a"))
    await let_tasks_run()
    await cancel(early, late)
    first.release()
    await second.reached()
    second.release()


async def test_a_barrier_may_fail_before_its_reader_leaves(rig: Rig) -> None:
    await rig.append("a", 1)
    head_read = rig.store_faults.hold("head")
    rig.log_faults.fail("send", Unavailable("it is gone"))
    reading = asyncio.create_task(rig.read("a"))
    await head_read.reached()
    await let_tasks_run()
    await cancel(reading)
    head_read.release()


async def test_a_read_of_a_head_may_fail_after_its_appender_left(rig: Rig) -> None:
    await rig.append("a", 1)
    held = hold_then_fail(rig.store_faults, "head")
    appending = asyncio.create_task(rig.append("b", 1))
    await held.reached()
    await cancel(appending)
    held.release()


async def test_a_read_of_a_tail_may_fail_after_its_reader_left(open_rig: OpenRig) -> None:
    rig = open_rig(follow_s=0)
    await rig.append("a", 1)
    await rig.write(None, Mark(1))
    held = hold_then_fail(rig.log_faults, "read")
    reading = asyncio.create_task(rig.read("a", barrier="offset"))
    await held.reached()
    await cancel(reading)
    held.release()
    await let_tasks_run()
    assert await rig.read("a", barrier="offset") == [1]  # a new task replaces the failed one
