"""Ending tasks for certain."""

from __future__ import annotations

import asyncio
from typing import Any, Final

AGAIN_S: Final = 0.5


async def end(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel tasks and wait until they have ended; what they raise is dropped.

    Before Python 3.12 a cancellation that comes together with a result is lost inside `wait_for`, which drivers use
    too: it is said again until it was heard.
    """
    pending = {task for task in tasks if task is not None}
    while pending:
        for task in pending:
            task.cancel()
        done, pending = await asyncio.wait(pending, timeout=AGAIN_S)
        for task in done:
            if not task.cancelled():
                task.exception()  # else it is reported as never retrieved
