"""A lease: one Spark task tails some log partitions for a limited time and replicates their records as they come.

The driver submits the next lease before one ends, but if all slots are busy it starts only when the current task has
ended. So that the partitions are always served, the tail of a lease continues in the worker process after its task:
until the next lease of these partitions is ready there, or for a bounded time. An overlap is harmless, because slices
are fenced by the store's pointers. The driver ends leases early through a setting of the store, which every task reads:
that needs no connection between driver and tasks beyond Spark's own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from tidebook.core.errors import TidebookError
from tidebook.core.topic_config import TopicConfig
from tidebook.pipeline.task_result import TaskResult
from tidebook.pipeline.worker import OpenStore, SparkWorker, open_settings_store
from tidebook.replication.partition import LogAndStore, Partition
from tidebook.replication.tail import ReplicationTail
from tidebook.runtime.futures import ignore_failure
from tidebook.store.port import StoreWriter
from tidebook.wiring.spark import clears_tags

#: The generation up to which the leases of recent runs have ended, by run.
REVOKED_SETTING = "pipeline/leases"
RUNS_MAX = 16
REVOKE_ATTEMPTS_MAX = 10
#: How often a task reads whether its lease was revoked.
CHECK_EVERY_S = 0.5


class Lease(msgspec.Struct, frozen=True):
    """The work of a task: the partitions to tail, for how long, and up to which offsets, if these are fixed."""

    run: str
    #: Leases of an earlier generation of the same run are revoked.
    generation: int
    partitions: tuple[Partition, ...]
    configs: dict[str, TopicConfig]
    seconds: float
    #: How long the tail continues after the task, unless another replicator is seen to serve the partitions.
    handover_s: float = 0.0
    #: With these, the lease ends when the records before them are replicated. One for each partition.
    stops: tuple[int, ...] | None = None


@dataclass(frozen=True)
class LeaseTask:
    """A function for `mapPartitions` that serves one lease and yields one encoded `TaskResult` for each partition."""

    settings: str
    lease: bytes
    wait_s: float
    opening: OpenStore = open_settings_store
    #: A parameter so that a benchmark can record when its partitions are served.
    new_tail: Callable[..., ReplicationTail] = ReplicationTail

    def __call__(self, rows: Iterable[Any]) -> Iterator[bytes]:
        list(rows)  # one number; Spark ends a worker that has not read its input
        worker = SparkWorker.of(self.settings, self.opening)
        lease = msgspec.json.decode(self.lease, type=Lease)
        new_tail = partial(self.new_tail, clear_tags=clears_tags(worker.settings), wait_s=self.wait_s)
        results = worker.run(serve(worker, lease, new_tail))
        yield from map(msgspec.json.encode, results)


async def serve(
    worker: LogAndStore, lease: Lease, new_tail: Callable[..., ReplicationTail] = ReplicationTail
) -> list[TaskResult]:
    """Tail the partitions of a lease until its end; return what was replicated of each.

    Unless the lease was revoked, its tail continues for a while; what it replicates is in the results of the next task.
    """
    continuing = _continuing.setdefault(worker, [])
    tail = LeasedTail(worker, lease, new_tail)
    await tail.serve([each for each in continuing if each.lease.run == lease.run and each.shares_partitions(lease)])
    results = [result for each in continuing for result in each.report() if result.records]
    continuing[:] = [each for each in (*continuing, tail) if each.runs]
    return results + tail.report()


class LeasedTail:
    """The tail of one lease, which may continue after its task. It starts immediately and ends on time."""

    def __init__(self, worker: LogAndStore, lease: Lease, new_tail: Callable[..., ReplicationTail]) -> None:
        self.lease = lease
        self._worker = worker
        self._tail = new_tail(worker, {partition: lease.configs[partition[0]] for partition in lease.partitions})
        stops = None if lease.stops is None else dict(zip(lease.partitions, lease.stops, strict=True))
        self._began_s = time.monotonic()
        self._reported: dict[Partition, tuple[int, int]] = {}
        self._revoked = False
        #: Done when the task must end; the tail continues for a while if the lease was not revoked.
        self._over = asyncio.get_running_loop().create_future()
        self._run = asyncio.create_task(self._tail.run(stops))
        self._ending = asyncio.create_task(self._end_in_time())
        self._run.add_done_callback(ignore_failure)  # the next lease encounters it too, if no task raises it
        self._run.add_done_callback(lambda run: self._ending.cancel())

    async def serve(self, predecessors: Sequence[LeasedTail]) -> None:
        """Wait until the task must end; end the predecessors as soon as this tail is ready. Raise the tail's error."""
        ready = asyncio.create_task(self._tail.ready.wait())
        await asyncio.wait((self._run, self._over, ready), return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        for each in predecessors:
            each.stop()
        await asyncio.wait((self._run, self._over), return_when=asyncio.FIRST_COMPLETED)
        # A partition that is stopped is retried by the next lease; it gets no records until then.
        if self._revoked or self._run.done() or any(each.stopped for each in self._tail.replicators.values()):
            self.stop()
            await self._run

    def stop(self) -> None:
        """End the tail after the slices in progress."""
        self._tail.stop()
        self._ending.cancel()

    @property
    def runs(self) -> bool:
        """Return whether the tail has not ended."""
        return not self._run.done()

    def shares_partitions(self, lease: Lease) -> bool:
        """Return whether another lease has one of these partitions."""
        return not set(lease.partitions).isdisjoint(self.lease.partitions)

    def report(self) -> list[TaskResult]:
        """Return what was replicated of each partition since the last report."""
        results, seconds = [], time.monotonic() - self._began_s
        for partition, each in self._tail.replicators.items():
            records, parked = self._reported.get(partition, (0, 0))
            self._reported[partition] = (each.records, each.parked)
            results.append(TaskResult(*partition, each.records - records, each.parked - parked, seconds, each.stopped))
        return results

    async def _end_in_time(self) -> None:
        self._revoked = await self._is_revoked_within(self.lease.seconds)
        self._over.set_result(None)
        for each in self._tail.replicators.values():
            each.overtaken = False
        if not self._revoked:
            await self._is_revoked_within(self.lease.handover_s, unless=self._is_overtaken)
        self._tail.stop()

    async def _is_revoked_within(self, seconds: float, unless: Callable[[], bool] = lambda: False) -> bool:
        """Return whether the lease is revoked in this time; return False early when `unless` is true."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + seconds
        while (left_s := deadline_s - loop.time()) > 0 and not unless():
            with suppress(TidebookError):  # the tail reports an unavailable store
                if await is_revoked(await self._worker.store(), self.lease):
                    return True
            await asyncio.sleep(min(left_s, CHECK_EVERY_S))
        return False

    def _is_overtaken(self) -> bool:
        return any(each.overtaken for each in self._tail.replicators.values())


#: The tails of this process whose tasks have ended, by worker; the process serves one task at a time.
_continuing: dict[LogAndStore, list[LeasedTail]] = {}


async def is_revoked(store: StoreWriter, lease: Lease) -> bool:
    """Return whether the driver has ended the leases of this generation."""
    return _decode(await store.setting(REVOKED_SETTING)).get(lease.run, 0) > lease.generation


async def revoke_leases(store: StoreWriter, run: str, generation: int) -> None:
    """End the run's leases of all generations before this one, within `CHECK_EVERY_S` and the slices in progress."""
    for _ in range(REVOKE_ATTEMPTS_MAX):
        text = await store.setting(REVOKED_SETTING)
        revoked = _decode(text)
        revoked.pop(run, None)
        recent = dict([*revoked.items(), (run, generation)][-RUNS_MAX:])
        if await store.set_setting(REVOKED_SETTING, msgspec.json.encode(recent).decode(), expected=text):
            return


def _decode(text: str | None) -> dict[str, int]:
    return {} if text is None else msgspec.json.decode(text, type=dict[str, int])
