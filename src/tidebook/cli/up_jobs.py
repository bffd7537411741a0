"""What `tidebook up` does beside showing a book: the replication in a process of its own, and purges by the clock."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path

from tidebook.core.errors import TidebookError
from tidebook.pipeline.jobs.purge import purge_expired
from tidebook.pipeline.prerequisites import missing_for_spark
from tidebook.wiring.book import Book

RESTART_FIRST_S = 1.0
RESTART_MAX_S = 60.0
STOP_S = 20.0
ERROR_CHARS_MAX = 300


class ReplicationChild:
    """`tidebook pipeline replicate` on local Spark, started again when it dies, ended with this process."""

    def __init__(self, where: str, folder: Path) -> None:
        self._where = where
        self._log = folder / "replicate.log"
        #: How it stands, in one line.
        self.state = "starting"

    async def run(self, stop: asyncio.Event) -> None:
        """Keep it running until `stop`."""
        if (missing := missing_for_spark()) is not None:
            self.state = f"off, while reads and appends go on: {missing}"
            await stop.wait()
            return
        wait_s = RESTART_FIRST_S
        while not stop.is_set():
            self.state = "starting Spark"
            code = await self._once(stop)
            if stop.is_set():
                return
            self.state = f"ended with code {code}, starts again in {wait_s:.0f} s: {self._last_words()}"
            if await wait_for(stop, wait_s):
                return
            wait_s = min(wait_s * 2, RESTART_MAX_S)

    async def _once(self, stop: asyncio.Event) -> int | None:
        command = ["pipeline", "replicate", "--until-input-ends", "--json", "--book", self._where]
        with self._log.open("ab") as errors:
            child = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tidebook.cli.app", *command),
                stdin=PIPE, stdout=PIPE, stderr=errors, start_new_session=True, limit=2**24,
            )  # fmt: skip
        reading = asyncio.create_task(self._read(child))
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait([reading, stopping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            await _end(child)
            reading.cancel()
        return child.returncode

    async def _read(self, child: Process) -> None:
        assert child.stdout is not None
        async for _ in child.stdout:
            self.state = "running"

    def _last_words(self) -> str:
        try:
            lines = self._log.read_text(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return lines[-1][:ERROR_CHARS_MAX] if lines else ""


async def _end(child: Process) -> None:
    """Its input ends, which is how it is asked to stop; past its time it is ended."""
    if child.stdin is not None:
        child.stdin.close()
    for act in (None, child.terminate, child.kill):
        if act is not None and child.returncode is None:
            act()
        try:
            await asyncio.wait_for(child.wait(), STOP_S)
            return
        except TimeoutError:
            continue


async def purge_by_the_clock(book: Book, stop: asyncio.Event, every_s: float) -> None:
    """Purge what has expired now, and again and again until `stop`."""
    while not stop.is_set():
        try:
            async for found in purge_expired(book):
                book.metrics.count("pipeline_expired_purged", int(found.purged), topic=found.topic)
        except TidebookError:
            book.metrics.count("pipeline_purge_failures")  # the next round finds the same journals again
        if await wait_for(stop, every_s):
            return


async def wait_for(stop: asyncio.Event, within_s: float) -> bool:
    """Wait for the end, at most so long; True when it came."""
    try:
        await asyncio.wait_for(stop.wait(), within_s)
    except TimeoutError:
        return False
    return True
