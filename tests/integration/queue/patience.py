"""Waiting for what tells no event of itself: another process, a counter."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

PATIENCE_S = 60


async def until(condition: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
    """Wait until it is so; fail when it does not come true."""
    async with asyncio.timeout(patience_s):
        while not condition():  # noqa: ASYNC110  nothing else tells
            await asyncio.sleep(0.01)
