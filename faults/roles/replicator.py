"""Replicators of an embedded book, of which only one is active."""

from __future__ import annotations

from faults.roles.context import Context


async def replicate(context: Context) -> None:
    """Replicate the log to the store until stopped."""
    async with context.open_book(replicate=True):
        await context.stopping.wait()
