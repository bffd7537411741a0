"""Fixtures of the log suite: opening a log, new topics, sending, reading a whole partition."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import ClassVar

import pytest
import pytest_asyncio

from tidebook.core.errors import TidebookError
from tidebook.log.port import Acknowledged, Log, Outgoing, Record, RecordColumns, read_all

#: Opens another log on the same data, as another process would.
OpenLog = Callable[[], AbstractAsyncContextManager[Log]]

PARTITIONS = 3
#: A test case that takes this long has failed; none needs nearly as much.
CASE_TIMEOUT_S = 60.0


class LogBase:
    """Fixtures for the test cases of a log."""

    indexed_by_key: ClassVar[bool]
    end_is_linearizable: ClassVar[bool]

    pytestmark: ClassVar = [pytest.mark.asyncio]

    @pytest.fixture
    def open_log(self) -> OpenLog:
        """Return a function that opens another instance on the same data; leaving its context closes it."""
        raise NotImplementedError("the subclass must provide open_log")

    @pytest_asyncio.fixture
    async def log(self, open_log: OpenLog) -> AsyncIterator[Log]:
        async with open_log() as log:
            yield log

    @pytest_asyncio.fixture
    async def topic(self, log: Log) -> AsyncIterator[str]:
        name = new_topic()
        await log.create_topic(name, PARTITIONS)
        yield name
        if await log.topic(name) is not None:
            await log.delete_topic(name)


class Sending:
    """Sends records and collects the results in the order of the callbacks."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._count = 0
        self._changed = asyncio.Event()
        #: The index of the record of each result.
        self.order: list[int] = []
        self.done: list[Acknowledged | TidebookError] = []
        self.threads: set[int] = set()

    def send(self, record: Outgoing) -> None:
        number = self._count
        self._count += 1
        self._log.send(record, partial(self._take, number))

    def send_many(self, many: RecordColumns) -> None:
        first = self._count
        self._count += len(many.values)

        def take(places: Sequence[int], results: Sequence[Acknowledged | TidebookError]) -> None:
            assert len({many.partitions[place] for place in places}) == 1
            for place, result in zip(places, results, strict=True):
                self._take(first + place, result)

        self._log.send_many(many, take)

    def _take(self, number: int, result: Acknowledged | TidebookError) -> None:
        self.order.append(number)
        self.done.append(result)
        self.threads.add(threading.get_ident())
        self._changed.set()

    async def results(self) -> list[Acknowledged | TidebookError]:
        async with asyncio.timeout(CASE_TIMEOUT_S):
            while len(self.done) < self._count:
                self._changed.clear()
                await self._changed.wait()
        return self.done


def new_topic() -> str:
    """Return a unique topic name, because the server may be shared."""
    return f"contract-{uuid.uuid4().hex}"


def outgoing(topic: str, value: bytes, *, partition: int = 0, key: bytes | None = b"key") -> Outgoing:
    return Outgoing(topic, partition, key, value)


async def fill(log: Log, topic: str, count: int, *, size_bytes: int = 10) -> list[int]:
    """Append `count` records to partition 0, and return their offsets."""
    return [
        s.offset for s in await asyncio.gather(*(log.append(outgoing(topic, b"x" * size_bytes)) for _ in range(count)))
    ]


async def all_records(log: Log, topic: str, *, partition: int = 0) -> Sequence[Record]:
    """Return all records of a partition."""
    start, stop = await log.start(topic, partition), await log.end(topic, partition)
    return list(await read_all(log, topic, partition, start=start, stop=stop))


async def begin_wait(log: Log, topic: str) -> asyncio.Task[bool]:
    """Start a wait for new records of partition 0."""
    end = await log.end(topic, 0)
    task = asyncio.create_task(log.wait(topic, 0, offset=end, timeout_s=CASE_TIMEOUT_S))
    await asyncio.sleep(0)
    return task
