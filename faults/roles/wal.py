"""Owners of a region of a write-ahead log, which claim it from one another."""

from __future__ import annotations

from typing import Any

from faults.plan import NAMESPACE, REGION
from faults.roles.context import WITHOUT_EFFECT, Context
from tidebook.core.errors import Fenced, NotFound, TidebookError, Truncated

TABLES = (1, 2)
#: The number of entries that a table keeps; older ones are marked deleted, so that replays stay short.
KEPT = 60
REGION_NAME = f"{NAMESPACE}/{REGION}"


async def own(context: Context) -> None:
    """Claim the region, and write, mark and replay until another owner claims it; then wait, and repeat."""
    async with context.open_book() as book:
        while not context.stopping.is_set():
            try:
                region = await book.wal(NAMESPACE).open_region(REGION, create=True)
                await replay(context, region)
                while region.writable and not context.stopping.is_set():
                    await _step(context, region)
                    await context.rest()
            except (TidebookError, OSError):
                pass
            await context.pause(2.0)


async def _step(context: Context, region: Any) -> None:
    table = context.chance.choice(TABLES)
    match context.chance.randrange(20):
        case 0:
            await replay(context, region)
        case 1:
            known = region.meta.tables.get(table)
            if known is not None and known.next_seq_num - KEPT > max(known.latest_marked_deleted, 1):
                seq = known.next_seq_num - KEPT
                await context.record(
                    "wal_mark",
                    lambda: region.mark_deleted(table, seq),
                    failures=(*WITHOUT_EFFECT, NotFound),
                    region=REGION_NAME,
                    table=table,
                    seq=seq,
                )
        case 2:
            await region.clean()
        case 3:
            await region.snapshot()
        case _:
            values = [context.value() for _ in range(context.chance.choice((1, 2)))]
            await context.record(
                "wal_write",
                lambda: region.write(table, [value.encode() for value in values]),
                lambda written: {"first": written.first, "last": written.last},
                failures=(*WITHOUT_EFFECT, Fenced),
                region=REGION_NAME,
                table=table,
                values=values,
            )


async def replay(context: Context, region: Any) -> None:
    """Replay the region and record the result."""

    async def collect() -> list[list[Any]]:
        return [[entry.table, entry.seq, entry.payload.decode()] async for entry in region.read()]

    await context.record(
        "wal_replay", collect, lambda found: found, failures=(*WITHOUT_EFFECT, Truncated), region=REGION_NAME
    )
