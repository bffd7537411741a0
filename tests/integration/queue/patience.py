"""Poll for conditions that no event signals, such as those of another process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

CASE_TIMEOUT_S = 60


async def until(condition: Callable[[], bool], patience_s: float = CASE_TIMEOUT_S) -> None:
    """Wait until the condition holds; fail after a time limit."""
    async with asyncio.timeout(patience_s):
        while not condition():  # noqa: ASYNC110  there is no event to await
            await asyncio.sleep(0.01)
