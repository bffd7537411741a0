"""An outcome, a value or an error, for whoever awaits it, or for nobody."""

from __future__ import annotations

import asyncio
from typing import TypeVar

T = TypeVar("T")


def settle(future: asyncio.Future[T], outcome: T | BaseException) -> None:
    """Give a future its outcome, unless its awaiter has gone."""
    if future.done():
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def give_up(future: asyncio.Future[T]) -> None:
    """Nobody will await it: it is cancelled, and if it has failed already, that is nobody's error."""
    if not future.cancel() and not future.cancelled():
        future.exception()
