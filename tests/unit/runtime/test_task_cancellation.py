"""`cancel_and_wait` ends tasks reliably, even those that lose a cancellation."""

from __future__ import annotations

import asyncio

from tidebook.runtime.futures import cancel_and_wait


async def test_a_task_that_loses_a_cancellation_is_cancelled_again() -> None:
    lost = 0

    async def forgetful() -> None:
        nonlocal lost
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                lost += 1
                if lost == 2:
                    raise

    task = asyncio.create_task(forgetful())
    await asyncio.sleep(0)
    await asyncio.wait_for(cancel_and_wait(task, None), 30)
    assert task.cancelled()


async def test_errors_of_a_task_while_it_ends_are_ignored() -> None:
    async def fails() -> None:
        raise ValueError

    await cancel_and_wait(asyncio.create_task(fails()))


async def test_the_list_of_tasks_may_be_empty() -> None:
    await cancel_and_wait(None)
