"""A demo of a write-ahead log: measurements are durable when `write` returns; a job moves them to Parquet later."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tidebook

NAMESPACE = "shop-metrics"
REGION = 1
#: The tables that share the region.
ORDER_SECONDS, MAILS = 1, 2
FLUSH_EVERY_S = 60.0


class Measurements:
    """Writes measurements to a region, which this process claims at its first write.

    A process that only looks at the shop, as `tidebook projection list` does, does not take the region from its owner.
    """

    def __init__(self, book: tidebook.Book, folder: Path) -> None:
        self._book = book
        self._folder = folder
        self._region: Any = None
        self._claiming = asyncio.Lock()

    async def aclose(self) -> None:
        """Close the region, if it was claimed."""
        if self._region is not None:
            await self._region.close()

    async def write(self, table: int, **fields: float | str) -> None:
        """Write one measurement."""
        async with self._claiming:
            if self._region is None:
                self._region = await self._book.wal(NAMESPACE).open_region(REGION, create=True)
        await self._region.write(table=table, payloads=[json.dumps(fields).encode()])

    async def flush_periodically(self) -> None:
        """Move the measurements to Parquet with Spark every minute; without Spark or Java they stay in the log."""
        if find_spec("pyspark") is None or shutil.which("java") is None:
            await asyncio.Event().wait()
        while True:
            await asyncio.sleep(FLUSH_EVERY_S)
            await self.flush()

    async def flush(self) -> int:
        """Move the measurements to Parquet once, and return the exit code of the job; `flush.log` has its messages."""
        args = ["pipeline", "flush-wal", NAMESPACE, "--to", str(self._folder / "lake"), "--book", str(self._folder)]
        with (self._folder / "flush.log").open("wb") as log:
            job = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tidebook.cli", *args, "--json"), stdout=log, stderr=log
            )
            try:
                return await job.wait()
            finally:
                if job.returncode is None:  # the shop is stopping; the next flush completes this one
                    job.terminate()
                    await job.wait()
