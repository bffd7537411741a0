"""A lease: one Spark task tails some log partitions for a limited time and replicates their records as they come.

The driver starts the next lease before one ends, so that the partitions are always served; an overlap is harmless,
because slices are fenced by the store's pointers. It ends leases early through a setting of the store, which every
task reads: that needs no connection between driver and tasks beyond Spark's own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from tidebook.core.errors import TidebookError
from tidebook.core.topic_config import TopicConfig
from tidebook.pipeline.task_result import TaskResult
from tidebook.pipeline.worker import OpenStore, SparkWorker, open_settings_store
from tidebook.replication.tail import Partition, ReplicationTail
from tidebook.store.port import StoreWriter
from tidebook.wiring.spark import clears_tags

#: The generation up to which the leases of recent runs have ended, by run.
REVOKED_SETTING = "pipeline/leases"
RUNS_MAX = 16
REVOKE_TRIES_MAX = 10
#: How often a task reads whether its lease was revoked.
LOOK_EVERY_S = 0.5


class Lease(msgspec.Struct, frozen=True):
    """The order to a task: the partitions to tail, for how long, and until which offsets, if these are fixed."""

    run: str
    #: Leases of an earlier generation of the same run are revoked.
    generation: int
    partitions: tuple[Partition, ...]
    configs: dict[str, TopicConfig]
    seconds: float
    #: With these, the lease ends when the records before them are replicated. One for each partition.
    stops: tuple[int, ...] | None = None


@dataclass(frozen=True)
class LeaseTask:
    """A function for `mapPartitions` that serves one lease and yields one encoded `TaskResult` for each partition."""

    settings: str
    lease: bytes
    wait_s: float
    opening: OpenStore = open_settings_store

    def __call__(self, rows: Iterable[Any]) -> Iterator[bytes]:
        list(rows)  # one number; Spark ends a worker that has not read its input
        worker = SparkWorker.of(self.settings, self.opening)
        lease = msgspec.json.decode(self.lease, type=Lease)
        results = worker.run(serve(worker, lease, clear_tags=clears_tags(worker.settings), wait_s=self.wait_s))
        yield from map(msgspec.json.encode, results)


async def serve(worker: SparkWorker, lease: Lease, *, clear_tags: bool, wait_s: float) -> list[TaskResult]:
    """Tail the partitions of a lease until its end; return what was replicated of each."""
    began_s = time.monotonic()
    configs = {at: lease.configs[at[0]] for at in lease.partitions}
    tail = ReplicationTail(worker, configs, clear_tags=clear_tags, wait_s=wait_s)
    ending = asyncio.create_task(_end_in_time(worker, lease, tail))
    try:
        await tail.run(None if lease.stops is None else dict(zip(lease.partitions, lease.stops, strict=True)))
    finally:
        ending.cancel()
    seconds = time.monotonic() - began_s
    return [TaskResult(*at, each.records, each.parked, seconds, each.stopped) for at, each in tail.replicators.items()]


async def _end_in_time(worker: SparkWorker, lease: Lease, tail: ReplicationTail) -> None:
    """Stop the tail when its time is over or the lease was revoked."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + lease.seconds
    while (left_s := deadline_s - loop.time()) > 0:
        with suppress(TidebookError):  # the tail itself finds out whether the store answers
            if await is_revoked(await worker.store(), lease):
                break
        await asyncio.sleep(min(left_s, LOOK_EVERY_S))
    tail.stop()


async def is_revoked(store: StoreWriter, lease: Lease) -> bool:
    """Return whether the driver has ended the leases of this generation."""
    return _decode(await store.setting(REVOKED_SETTING)).get(lease.run, 0) > lease.generation


async def revoke_leases(store: StoreWriter, run: str, generation: int) -> None:
    """End the run's leases of all generations before this one, within `LOOK_EVERY_S` and the slices in progress."""
    for _ in range(REVOKE_TRIES_MAX):
        text = await store.setting(REVOKED_SETTING)
        revoked = _decode(text)
        revoked.pop(run, None)
        recent = dict([*revoked.items(), (run, generation)][-RUNS_MAX:])
        if await store.set_setting(REVOKED_SETTING, msgspec.json.encode(recent).decode(), expected=text):
            return


def _decode(text: str | None) -> dict[str, int]:
    return {} if text is None else msgspec.json.decode(text, type=dict[str, int])
