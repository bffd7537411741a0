"""Resolve and cancel futures and tasks, some of whose awaiters may have been cancelled."""

from __future__ import annotations

import asyncio
from typing import Any, Final, TypeVar

T = TypeVar("T")


def resolve_future(future: asyncio.Future[T], outcome: T | BaseException) -> None:
    """Set the result or the exception of a future, unless it is already done or cancelled."""
    if future.done():
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def ignore_failure(future: asyncio.Future[T]) -> None:
    """Mark an exception as retrieved. Use this as a done callback for shared work that may lose all its awaiters."""
    if not future.cancelled():
        future.exception()


def cancel_quietly(future: asyncio.Future[T]) -> None:
    """Cancel a future that no caller will await; if it has already failed, mark its exception as retrieved."""
    if not future.cancel() and not future.cancelled():
        future.exception()


#: How often `cancel_and_wait` repeats a cancellation.
REPEAT_S: Final = 0.5


async def cancel_and_wait(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel tasks and wait until they have ended; ignore their errors.

    Before Python 3.12 `wait_for`, which drivers use too, loses a cancellation that arrives together with a result.
    So the cancellation is repeated until the task ends.
    """
    pending = {task for task in tasks if task is not None}
    while pending:
        for task in pending:
            task.cancel()
        done, pending = await asyncio.wait(pending, timeout=REPEAT_S)
        for task in done:
            if not task.cancelled():
                task.exception()  # otherwise asyncio logs that it was never retrieved
