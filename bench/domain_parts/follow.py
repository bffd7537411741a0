"""Measure the time from an append to a follower of its tag, with replication by the same process and fsync."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

import tidebook
from bench.timing import percentile, timed
from tidebook.core.event import Event

EVENTS, WARM_UP, EVERY_S = 200, 20, 0.02
TARGETS = {"follow_p50_ms": 20.0}


def measure(quick: bool) -> tuple[dict[str, float], dict[str, float]]:
    """Return percentiles of the milliseconds from the call of `append` to the delivery of the event."""
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(_measure(Path(folder) / "follow", EVENTS // 4 if quick else EVENTS))
    return {"follow_p50_ms": figures.pop("follow_p50_ms")}, figures


async def _measure(folder: Path, events: int) -> dict[str, float]:
    appended: list[float] = []
    followed: list[float] = []
    async with tidebook.open(folder, replicate=True) as book:
        journal = book.journal("orders")
        stream = book.tags.read("paid", follow=True)
        with timed(f"{events} events, each followed before the next"):
            for number in range(WARM_UP + events):
                began = time.perf_counter()
                await journal.append(f"o-{number % 50}", [Event(number, tags={"paid"})])
                at = time.perf_counter()
                await anext(stream)
                if number >= WARM_UP:
                    appended.append((at - began) * 1000)
                    followed.append((time.perf_counter() - began) * 1000)
                await asyncio.sleep(EVERY_S)
        await stream.aclose()  # type: ignore[attr-defined]
    return {
        "follow_p50_ms": percentile(followed, 0.5),
        "follow_p95_ms": percentile(followed, 0.95),
        "follow_append_p50_ms": percentile(appended, 0.5),
    }
