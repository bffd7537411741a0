"""Stores that fail on purpose inside Spark's workers, and a driver that dies. Each fault happens once."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any, NamedTuple

from tidebook.core.errors import Unavailable
from tidebook.core.metrics import Metrics
from tidebook.core.replication import SliceWrites
from tidebook.store.port import StoreWriter
from tidebook.wiring.adapters import open_store
from tidebook.wiring.settings import Settings


def once(folder: Path, name: str) -> bool:
    """True for the first who asks, over all processes."""
    try:
        (folder / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class KillAround(NamedTuple):
    """Opens a store whose worker is killed before, and after, the first slices; `rounds` names Cassandra's writes."""

    folder: str
    rounds: tuple[int, ...] = ()

    async def __call__(self, settings: Settings) -> StoreWriter:
        store: Any = await open_store(settings, metrics=Metrics())
        folder = Path(self.folder)
        apply = store.apply

        async def killing(writes: SliceWrites) -> None:
            if once(folder, f"before-{writes.partition}"):
                die()
            await apply(writes)
            if once(folder, f"after-{writes.partition}"):
                die()

        store.apply = killing
        if self.rounds:
            self._between_writes(store, folder)
        return store

    def _between_writes(self, store: Any, folder: Path) -> None:
        """Die at the n-th batch of statements: between event rows, heads and the pointer."""
        write, seen = store.write, [0]

        async def killing(batch: Any) -> None:
            await write(batch)
            seen[0] += 1
            if seen[0] in self.rounds and once(folder, f"write-{seen[0]}"):
                die()

        store.write = killing


class AwayAtFirst(NamedTuple):
    """Opens a store that does not answer the first few times."""

    folder: str
    times: int

    async def __call__(self, settings: Settings) -> StoreWriter:
        store: Any = await open_store(settings, metrics=Metrics())
        apply, folder = store.apply, Path(self.folder)

        async def failing(writes: SliceWrites) -> None:
            for n in range(self.times):
                if once(folder, f"away-{n}"):
                    raise Unavailable("the store is away")
            await apply(writes)

        store.apply = failing
        return store


def main() -> None:
    """A driver that replicates a folder and is killed: `python -m tests.pipeline.faults FOLDER POINT`."""
    folder, point = sys.argv[1:]
    import tidebook
    from tidebook.core.portal import Portal
    from tidebook.pipeline.jobs.replicate import Replication
    from tidebook.pipeline.session import job_session

    portal = Portal()
    book = tidebook.open(folder)
    portal.run(book.__aenter__())
    spark = job_session("tidebook fault", book.settings)
    job = Replication(spark, book, portal, on_batch=lambda number, done: die() if point == "batch" else None)
    if point == "stop":
        import threading

        threading.Timer(3.0, die).start()
    job.run()


if __name__ == "__main__":
    main()
