"""A task that fetches what Spark did not bring stops where the log became shorter."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tidebook.log.port import Outgoing
from tidebook.log.sqlite import SqliteLog
from tidebook.pipeline import task
from tidebook.store.sqlite.store import SqliteStore
from tidebook.testing.conformance.journal_records import append, records_of, topic_config

TOPIC = "orders"


class FakeWorker:
    """A worker over a log and a store that are open."""

    settings = SimpleNamespace()

    def __init__(self, log: SqliteLog, store: SqliteStore) -> None:
        self._log, self._store = log, store

    async def log(self) -> SqliteLog:
        return self._log

    async def store(self) -> SqliteStore:
        return self._store


@pytest.fixture
async def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    monkeypatch.setattr(task, "clears_tags", lambda _: True)
    log, store = SqliteLog(tmp_path), SqliteStore(tmp_path)
    yield FakeWorker(log, store)
    await store.close()
    await log.close()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("there", [0, 2])
async def test_a_log_that_became_shorter_stops_the_partition_and_is_not_read_for_ever(worker: Any, there: int) -> None:
    """Spark brought offsets 5 and 6; what lies between the pointer and those is no longer in the log."""
    log, store = await worker.log(), await worker.store()
    config = await store.set_topic_config(TOPIC, topic_config(TOPIC), expected=None)
    await log.create_topic(TOPIC, config.partitions)
    for record in records_of([("a", append())] * there):
        await log.append(Outgoing(TOPIC, 0, record.key, record.value or b""))
    brought = records_of([("a", append()), ("a", append())], start=5)
    running = task.PartitionTask(worker, TOPIC, 0, config, wait_s=1)
    await running.replicate(brought)
    stopped = running.done().stopped
    assert stopped is not None
    assert f"the log ends at {there}" in stopped
