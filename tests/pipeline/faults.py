"""Stores that fail on purpose inside Spark's workers, and a driver that is killed. Each fault happens once."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tidebook.core.errors import Unavailable
from tidebook.core.replication_plan import SliceWrites
from tidebook.runtime.metrics import Metrics
from tidebook.store.port import StoreWriter
from tidebook.wiring.adapters import open_store
from tidebook.wiring.settings import Settings


def once(folder: Path, name: str) -> bool:
    """Return True for the first call in any process."""
    try:
        (folder / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class KillAround(NamedTuple):
    """Opens a store whose worker is killed before and after the first slice of some partitions.

    With `rounds` it is killed between the writes of slices instead, after Cassandra's n-th batch of statements. With
    `executor` the JVM that runs the worker is killed as well: an executor of a cluster.
    """

    folder: str
    rounds: tuple[int, ...] = ()
    partitions: int = 2
    executor: bool = False

    async def __call__(self, settings: Settings) -> StoreWriter:
        store: Any = await open_store(settings, metrics=Metrics())
        folder = Path(self.folder)
        if self.rounds:
            self._between_writes(store, folder)
            return store
        apply = store.apply

        async def killing(writes: SliceWrites) -> None:
            killed = writes.partition < self.partitions
            if killed and once(folder, f"before-{writes.partition}"):
                self._kill()
            await apply(writes)
            if killed and once(folder, f"after-{writes.partition}"):
                self._kill()

        store.apply = killing
        return store

    def _between_writes(self, store: Any, folder: Path) -> None:
        """Die at the n-th batch of statements: between event rows, heads and the pointer."""
        write, seen = store.write, [0]

        async def killing(batch: Any) -> None:
            await write(batch)
            seen[0] += 1
            if seen[0] in self.rounds and once(folder, f"write-{seen[0]}"):
                self._kill()

        store.write = killing

    def _kill(self) -> None:
        if self.executor:
            os.kill(_parent_of_workers(), signal.SIGKILL)
        die()


class UnavailableAtFirst(NamedTuple):
    """Opens a store that does not answer the first few times."""

    folder: str
    times: int

    async def __call__(self, settings: Settings) -> StoreWriter:
        store: Any = await open_store(settings, metrics=Metrics())
        apply, folder = store.apply, Path(self.folder)

        async def failing(writes: SliceWrites) -> None:
            for n in range(self.times):
                if once(folder, f"away-{n}"):
                    raise Unavailable("the store is down")
            await apply(writes)

        store.apply = failing
        return store


class StopInSlice(NamedTuple):
    """Opens a store whose worker stops between the plan and the writes of one slice, until it gets SIGCONT.

    The file `stopped` then has its process id and the slice's partition; `tried` exists after the slice was written
    or rejected.
    """

    folder: str

    async def __call__(self, settings: Settings) -> StoreWriter:
        store: Any = await open_store(settings, metrics=Metrics())
        apply, folder = store.apply, Path(self.folder)

        async def stopping(writes: SliceWrites) -> None:
            stops = once(folder, "stopped")
            if stops:
                (folder / "stopped").write_text(f"{os.getpid()} {writes.partition}")
                os.kill(os.getpid(), signal.SIGSTOP)
            try:
                await apply(writes)
            finally:
                if stops:
                    (folder / "tried").touch()

        store.apply = stopping
        return store


class KillDriver(NamedTuple):
    """Opens a store that kills the driver, and its JVM with it, around the first slice that is applied."""

    pid: int
    point: str

    async def __call__(self, settings: Settings) -> StoreWriter:
        store: Any = await open_store(settings, metrics=Metrics())
        apply, write = store.apply, getattr(store, "write", None)

        async def killing(writes: SliceWrites) -> None:
            if self.point == "after":
                await apply(writes)
            self._kill()

        async def killing_within(batch: Any) -> None:
            assert write is not None
            await write(batch)
            self._kill()

        if self.point == "within":
            store.write = killing_within
        else:
            store.apply = killing
        return store

    def _kill(self) -> None:
        for pid in (self.pid, _parent_of_workers()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        die()


def _parent_of_workers() -> int:
    """Return the pid of the JVM, which is the parent of the daemon that forks the workers."""
    with open(f"/proc/{os.getppid()}/stat", encoding="ascii") as stat:
        return int(stat.read().rpartition(")")[2].split()[1])


def main() -> None:
    """Replicate a book: `faults.py BOOK TOPIC POINT LEASE_S`, or `faults.py BOOK TOPIC executor FOLDER ROUND…`.

    In the first form this driver is killed at a point of its first batch; in the second one its executors are, as
    `KillAround` describes, and it continues with the settings of the book.
    """
    where, topic, point, *more = sys.argv[1:]
    import tidebook
    from tidebook.pipeline.jobs.replicate import Replication
    from tidebook.pipeline.session import PipelineSettings, job_context
    from tidebook.pipeline.worker import OpenStore, open_settings_store
    from tidebook.runtime.blocking_portal import BlockingPortal

    portal = BlockingPortal()
    book = tidebook.open(where)
    portal.run(book.__aenter__())
    spark = job_context("tidebook fault", book.settings)
    if point == "executor":
        killing = KillAround(more[0], rounds=tuple(map(int, more[1:])), executor=True)
        Replication(spark, book, portal, topics=[topic], opening=killing.__call__).run()
        return
    opening: OpenStore = open_settings_store if point == "commit" else KillDriver(os.getpid(), point).__call__
    settings = PipelineSettings(lease_s=float(more[0]))
    Replication(
        spark, book, portal, topics=[topic], opening=opening, on_batch=lambda number, done: die(), settings=settings
    ).run()


if __name__ == "__main__":
    main()
