"""Background jobs of `tidebook up`: replication in a child process, and periodic purges of expired journals."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path

from tidebook.core.errors import TidebookError
from tidebook.pipeline.jars import missing_for_spark
from tidebook.pipeline.jobs.purge import purge_expired
from tidebook.runtime.backoff import Backoff
from tidebook.wiring.book import Book

RESTART_FIRST_S = 1.0
RESTART_MAX_S = 60.0
STOP_S = 20.0
ERROR_CHARS_MAX = 300


class ReplicationChild:
    """Runs `tidebook pipeline replicate` as a child process; restarts it when it dies, and stops it at the end."""

    def __init__(self, where: str, folder: Path) -> None:
        self._where = where
        self._log = folder / "replicate.log"
        #: The current state as one line of text.
        self.state = "starting"

    async def run(self, stop: asyncio.Event) -> None:
        """Run the child, and restart it with a growing pause, until `stop` is set."""
        if (missing := missing_for_spark()) is not None:
            self.state = f"off (reads and appends still work): {missing}"
            await stop.wait()
            return
        backoff = Backoff(first_s=RESTART_FIRST_S, max_s=RESTART_MAX_S)
        while not stop.is_set():
            self.state = "starting Spark"
            code = await self._run_child(stop)
            if stop.is_set():
                return
            pause_s = backoff.next_s()
            self.state = f"ended with code {code}, restarts in {pause_s:.0f} s: {self._last_log_line()}"
            if await wait_for(stop, pause_s):
                return

    async def _run_child(self, stop: asyncio.Event) -> int | None:
        command = ["pipeline", "replicate", "--until-input-ends", "--json", "--book", self._where]
        with self._log.open("ab") as errors:
            child = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tidebook.cli", *command),
                stdin=PIPE, stdout=PIPE, stderr=errors, start_new_session=True, limit=2**24,
            )  # fmt: skip
        reading = asyncio.create_task(self._read(child))
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait([reading, stopping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            await _stop_child(child)
            reading.cancel()
        return child.returncode

    async def _read(self, child: Process) -> None:
        assert child.stdout is not None
        async for _ in child.stdout:
            self.state = "running"

    def _last_log_line(self) -> str:
        try:
            lines = self._log.read_text(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return lines[-1][:ERROR_CHARS_MAX] if lines else ""


async def _stop_child(child: Process) -> None:
    """Close the child's input, which asks it to stop; after a timeout terminate it, and then kill it."""
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


async def purge_periodically(book: Book, stop: asyncio.Event, every_s: float) -> None:
    """Purge expired journals now and then every `every_s` seconds, until `stop` is set."""
    while not stop.is_set():
        try:
            async for found in purge_expired(book):
                book.metrics.count("pipeline_expired_purged", int(found.purged), topic=found.topic)
        except TidebookError:
            book.metrics.count("pipeline_purge_failures")  # the next round retries the same journals
        if await wait_for(stop, every_s):
            return


async def wait_for(stop: asyncio.Event, within_s: float) -> bool:
    """Wait at most `within_s` seconds for `stop`; return True if it is set."""
    try:
        await asyncio.wait_for(stop.wait(), within_s)
    except TimeoutError:
        return False
    return True
