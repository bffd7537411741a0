"""`tidebook up` with Spark on one machine: how soon it shows a replicated event, and what it uses when idle."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

import tidebook
from bench.pipeline_parts.processor_time import descendants, memory_mb, processor_s
from tidebook.core.event import Event

SETTLE_S = 20.0
MEASURE_S = 30.0
START_S_MAX = 60.0
POLL_S = 0.02


def idle(folder: Path) -> dict[str, float]:
    """Seconds to the first replicated event after the start, then cores and megabytes without any work."""
    folder.mkdir()
    book = folder / "tidebook.toml"
    book.write_text('folder = "book"\n[pipeline]\nengine = "spark"\n')  # by default it would be replicated inline
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "tidebook.cli", "up", "--json", "--book", str(book)],
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        json.loads(process.stdout.readline())  # it is open
        first_s = asyncio.run(_first_event(book)) - began
        time.sleep(SETTLE_S)
        everything = {process.pid, *descendants(process.pid)}
        before_s, at = processor_s(everything), time.monotonic()
        time.sleep(MEASURE_S)
        cores = (processor_s(everything) - before_s) / (time.monotonic() - at)
        return {"up_first_event_s": first_s, "idle_cores": cores, "idle_mb": memory_mb(everything)}
    finally:
        process.terminate()
        process.wait()


async def _first_event(where: Path) -> float:
    """Append an event and return when it is in the store."""
    async with tidebook.open(where) as book:
        done = await book.journal("orders").append("o-1", [Event(1)])
        async with asyncio.timeout(START_S_MAX):
            while True:
                at = await book.store.pointer("orders", done.partition)
                if at is not None and at.position.offset >= done.offset:
                    return time.monotonic()
                await asyncio.sleep(POLL_S)
