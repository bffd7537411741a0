"""`tidebook up` with Spark on one machine: the time to the first replicated event, and the resources used when idle."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tidebook
from bench.pipeline_parts.processor_time import descendants, memory_mb, processor_s
from bench.timing import timed
from tidebook.core.event import Event

SETTLE_S = 20.0
MEASURE_S = 30.0
START_S_MAX = 60.0
POLL_S = 0.02


def idle(folder: Path) -> dict[str, float]:
    """Return the seconds to the first replicated event, the cores and megabytes without work, and the seconds to stop.

    The first start on a machine has no archive of Spark's classes; later starts read the archive of a run.
    """
    folder.mkdir()
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    with _up(folder / "first", environment) as (_, opened_s, first_s):
        found = {"up_first_open_s": opened_s, "up_first_start_event_s": first_s}
    with timed("writing the archive of Spark's classes") as watch:
        command = [sys.executable, "-m", "tidebook.pipeline.class_archive", ""]
        with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as writer:
            assert writer.wait(START_S_MAX * 5) == 0  # its standard input stays open: it ends early otherwise
    found["write_archive_s"] = watch.seconds
    with _up(folder / "second", environment) as (process, opened_s, first_s):
        time.sleep(SETTLE_S)
        everything = {process.pid, *descendants(process.pid)}
        before_s, at = processor_s(everything), time.monotonic()
        time.sleep(MEASURE_S)
        cores = (processor_s(everything) - before_s) / (time.monotonic() - at)
        found |= {"up_open_s": opened_s, "up_first_event_s": first_s}
        found |= {"idle_cores": cores, "idle_mb": memory_mb(everything)}
        with timed("until all processes have ended") as watch:
            process.terminate()
            process.wait()
        return found | {"up_stop_s": watch.seconds}


@contextmanager
def _up(folder: Path, environment: dict[str, str]) -> Iterator[tuple[subprocess.Popen[bytes], float, float]]:
    """Run `tidebook up` on Spark; yield its process, and the seconds until it was open and had replicated an event."""
    folder.mkdir()
    book = folder / "tidebook.toml"
    book.write_text('folder = "book"\n[pipeline]\nengine = "spark"\n')  # the default would replicate within the process
    began = time.monotonic()
    command = [sys.executable, "-m", "tidebook.cli", "up", "--json", "--book", str(book)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
    try:
        assert process.stdout is not None
        json.loads(process.stdout.readline())  # the book is open
        opened_s = time.monotonic() - began
        yield process, opened_s, asyncio.run(_first_event(book)) - began
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
