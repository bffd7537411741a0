"""Resolve and cancel futures whose awaiters may have been cancelled."""

from __future__ import annotations

import asyncio
from typing import TypeVar

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
    """Cancel a future that nobody will await; if it has already failed, mark its exception as retrieved."""
    if not future.cancel() and not future.cancelled():
        future.exception()
