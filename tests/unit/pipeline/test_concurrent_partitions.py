"""The log partitions of one task run concurrently, within limits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tidebook.core.errors import Unavailable
from tidebook.core.topic_config import TopicConfig
from tidebook.log.port import Record
from tidebook.pipeline import task
from tidebook.pipeline.task import ConcurrentPartitions
from tidebook.runtime.blocking_portal import BlockingPortal

CONFIG = {"t": TopicConfig(topic_id="t", partitions=4, segment_size=10, segments=4)}


class Stage:
    """Creates fake partition tasks, and records their slices and how many run concurrently."""

    def __init__(self) -> None:
        self.done: list[tuple[int, int]] = []
        self.running = self.most = 0
        self.held = threading.Event()
        self.fails: int | None = None

    def partition(self, worker: Any, topic: str, partition: int, config: Any, **more: Any) -> Partition:
        return Partition(self, topic, partition)


class Partition:
    pointer = stopped = None
    records = parked = 0

    def __init__(self, stage: Stage, topic: str, partition: int) -> None:
        self._stage = stage
        self.topic = topic
        self.partition = partition

    async def replicate(self, records: Sequence[Record]) -> None:
        stage = self._stage
        stage.running += 1
        stage.most = max(stage.most, stage.running)
        await asyncio.to_thread(stage.held.wait, 30)
        stage.running -= 1
        if stage.fails == self.partition:
            raise Unavailable("the store is down")
        stage.done.append((self.partition, records[0].offset))


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    stage = Stage()
    monkeypatch.setattr(task, "PartitionReplicator", stage.partition)
    monkeypatch.setattr(task, "clears_tags", lambda _: True)
    return stage


@pytest.fixture
def partitions(stage: Stage) -> Iterator[ConcurrentPartitions]:
    portal = BlockingPortal()
    worker: Any = portal
    worker.settings = None
    yield ConcurrentPartitions(worker, CONFIG, wait_s=1)
    stage.held.set()
    portal.close()


def records(first: int, n: int = 1, size: int = 1) -> list[Record]:
    return [Record(first + i, 0, b"k", b"v" * size) for i in range(n)]


def test_partitions_run_concurrently_and_each_in_offset_order(partitions: ConcurrentPartitions, stage: Stage) -> None:
    for partition in range(4):
        partitions.begin("t", partition, records(0))
    threading.Timer(0.05, stage.held.set).start()
    for first in (1, 2):
        for partition in range(4):
            partitions.begin("t", partition, records(first))
    assert len(partitions.finish()) == 4
    assert stage.most == 4
    for partition in range(4):
        assert [offset for of, offset in stage.done if of == partition] == [0, 1, 2]


@pytest.mark.parametrize(("n", "size"), [(60, 1), (1, 600)])
def test_slices_in_flight_stay_within_the_limits(
    partitions: ConcurrentPartitions, stage: Stage, monkeypatch: pytest.MonkeyPatch, n: int, size: int
) -> None:
    """By records and by value bytes; a slice that exceeds the limits runs alone."""
    monkeypatch.setattr(task, "RECORDS_IN_FLIGHT_MAX", 100)
    monkeypatch.setattr(task, "VALUE_BYTES_IN_FLIGHT_MAX", 1_000)
    partitions.begin("t", 3, records(0, n=3, size=2_000))
    threading.Timer(0.05, stage.held.set).start()
    partitions.begin("t", 0, records(0, n=n, size=size))
    assert stage.done[0] == (3, 0)
    partitions.begin("t", 1, records(0, n=n, size=size))
    assert (0, 0) in stage.done
    partitions.finish()
    assert stage.most == 1


def test_when_one_slice_fails_the_others_finish(partitions: ConcurrentPartitions, stage: Stage) -> None:
    stage.fails = 1
    for partition in range(4):
        partitions.begin("t", partition, records(0))
    stage.held.set()
    with pytest.raises(Unavailable):
        partitions.finish()
    assert sorted(stage.done) == [(0, 0), (2, 0), (3, 0)]
