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
    """The event loop reports an exception that nobody retrieved when its task is collected."""
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    yield
    await turns()
    gc.collect()
    await turns()
    assert [each["message"] for each in reported] == []


async def turns() -> None:
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


async def test_a_mark_that_fails_after_its_readers_left(rig: Rig) -> None:
    await rig.append("a", 1)
    held = hold_then_fail(rig.log_faults, "send")
    reads = [asyncio.create_task(rig.read("a")) for _ in range(2)]
    await held.reached()
    await cancel(*reads)
    held.release()


async def test_a_mark_that_was_gathering_and_fails_after_its_readers_left(rig: Rig) -> None:
    await rig.append("a", 1)
    first, second = hold_then_fail(rig.log_faults, "send"), hold_then_fail(rig.log_faults, "send")
    early = asyncio.create_task(rig.read("a"))
    await first.reached()
    late = asyncio.create_task(rig.read("a"))
    await turns()
    await cancel(early, late)
    first.release()
    await second.reached()
    second.release()


async def test_a_barrier_that_failed_before_its_reader_left(rig: Rig) -> None:
    await rig.append("a", 1)
    asked = rig.store_faults.hold("head")
    rig.log_faults.fail("send", Unavailable("it is gone"))
    reading = asyncio.create_task(rig.read("a"))
    await asked.reached()
    await turns()
    await cancel(reading)
    asked.release()


async def test_a_head_that_cannot_be_learned_after_its_appender_left(rig: Rig) -> None:
    await rig.append("a", 1)
    held = hold_then_fail(rig.store_faults, "head")
    appending = asyncio.create_task(rig.append("b", 1))
    await held.reached()
    await cancel(appending)
    held.release()


async def test_a_tail_that_cannot_be_read_after_its_reader_left(open_rig: OpenRig) -> None:
    rig = open_rig(follow_s=0)
    await rig.append("a", 1)
    await rig.write(None, Mark(1))
    held = hold_then_fail(rig.log_faults, "read")
    reading = asyncio.create_task(rig.read("a", barrier="offset"))
    await held.reached()
    await cancel(reading)
    held.release()
    await turns()
    assert await rig.read("a", barrier="offset") == [1]  # another task takes the place of the failed one
