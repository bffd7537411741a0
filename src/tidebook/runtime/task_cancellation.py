"""Cancel tasks reliably."""

from __future__ import annotations

import asyncio
from typing import Any, Final

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
