"""A log and a store in memory, for tests in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import pytest

from tidebook.core.action import Mark
from tidebook.core.errors import Fenced, TidebookError
from tidebook.core.record import encode_record
from tidebook.core.replication_plan import Pointer, SliceWrites
from tidebook.core.topic_config import TopicConfig
from tidebook.log.port import Record, RecordPage, TopicState
from tidebook.replication.partition import LogAndStore
from tidebook.testing.faults import Faults

TOPIC = "orders"
CONFIG = TopicConfig(topic_id="t", partitions=2)
MARK = encode_record(Mark(1), limit_bytes=1_000)


def now_s() -> float:
    return asyncio.get_running_loop().time()


class Memory:
    """The records of a topic's partitions, and how far each is replicated."""

    def __init__(self) -> None:
        self.records: dict[int, list[Record]] = {0: [], 1: []}
        self.replicated: dict[int, Pointer] = {}
        #: The time, partition and last offset of each applied slice.
        self.applied: list[tuple[float, int, int]] = []
        #: The time and start offset of each read.
        self.reads: list[tuple[float, int]] = []
        self.configs = {TOPIC: CONFIG}
        self.settings: dict[str, str] = {}
        self.faults = Faults()
        self._news = asyncio.Condition()

    @property
    def parts(self) -> LogAndStore:
        port: Any = self.faults.around(self)
        return LogAndStore(port, port)

    async def put(self, partition: int = 0, value: bytes = MARK) -> None:
        records = self.records[partition]
        records.append(Record(len(records), 0, None, value))
        async with self._news:
            self._news.notify_all()

    async def read(
        self, topic: str, partition: int, *, start: int, stop: int, key: bytes | None = None, limit: int
    ) -> RecordPage:
        self.reads.append((now_s(), start))
        records = tuple(self.records[partition][start : min(stop, start + limit)])
        return RecordPage(records, start + len(records))

    async def wait(self, topic: str, partition: int, *, offset: int, timeout_s: float | None = None) -> bool:
        try:
            async with asyncio.timeout(timeout_s), self._news:
                await self._news.wait_for(lambda: len(self.records[partition]) > offset)
        except TimeoutError:
            return False
        return True

    async def topic(self, topic: str) -> TopicState:
        return TopicState(topic, CONFIG.topic_id, CONFIG.partitions)

    async def start(self, topic: str, partition: int) -> int:
        return 0

    async def end(self, topic: str, partition: int) -> int:
        return len(self.records[partition])

    async def topics(self) -> list[str]:
        return list(self.configs)

    async def topic_config(self, topic: str) -> TopicConfig | None:
        return self.configs.get(topic)

    async def tags(self) -> AsyncIterator[str]:
        for tag in list[str]():
            yield tag

    async def setting(self, name: str) -> str | None:
        return self.settings.get(name)

    async def set_setting(self, name: str, value: str, *, expected: str | None) -> bool:
        self.settings[name] = value
        return True

    async def wait_any(self, *, timeout_s: float, since: int) -> int:
        await asyncio.sleep(timeout_s)
        return since

    async def pointers(self, topic: str) -> dict[int, Pointer]:
        return self.replicated

    async def pointer(self, topic: str, partition: int) -> Pointer | None:
        return self.replicated.get(partition)

    async def heads(self, topic: str, ids: list[str]) -> dict[str, Any]:
        return {}

    async def apply(self, writes: SliceWrites) -> None:
        if self.replicated.get(writes.partition) != writes.began:
            raise Fenced("another replicator has moved the pointer")
        self.replicated[writes.partition] = writes.pointer
        self.applied.append((now_s(), writes.partition, writes.pointer.position.offset))


#: Runs a program in virtual time: the fixture `run`.
Run = Callable[[Coroutine[Any, Any, None]], None]


async def ended_at(running: Awaitable[None], error: type[TidebookError] | None = None) -> float:
    """Return the time at which something ends, with an error if one is given."""
    if error is None:
        await running
    else:
        with pytest.raises(error):
            await running
    return now_s()
