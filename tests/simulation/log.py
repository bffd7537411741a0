"""A simulated log: a broker in memory with a client for each simulated process; every call may fail."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import msgspec

from tidebook.core.errors import LogLost, NotFound, OutcomeUnknown, TidebookError, TooLarge, Unavailable
from tidebook.log.port import (
    Acknowledged,
    OnSent,
    OnSentMany,
    Outgoing,
    Record,
    RecordColumns,
    RecordPage,
    TopicState,
    callback_for,
)
from tidebook.runtime.futures import resolve_future


class LogFaults(msgspec.Struct):
    """The probability of each fault of a call, and the longest duration of a call."""

    #: The call fails without an effect.
    refused: float = 0.0
    #: The record is written, or is written later, or never; the client gets no answer.
    unanswered: float = 0.0
    late_s_max: float = 0.0
    call_s_max: float = 0.01


CALM = LogFaults()


class _Partition:
    def __init__(self) -> None:
        self.start = 0
        self.records: list[Record] = []
        self.grown = asyncio.Event()

    @property
    def end(self) -> int:
        return self.records[-1].offset + 1 if self.records else self.start

    def append(self, outgoing: Outgoing, now_ms: int) -> Acknowledged:
        record = Record(self.end, now_ms, outgoing.key, outgoing.value, outgoing.headers)
        self.records.append(record)
        self.grown.set()
        self.grown = asyncio.Event()
        return Acknowledged(outgoing.partition, record.offset, now_ms)


class _Topic(msgspec.Struct):
    state: TopicState
    limit_bytes: int | None
    partitions: list[Any]


class SimulatedBroker:
    """The topics, which outlive every client."""

    def __init__(self, chance: random.Random, faults: LogFaults) -> None:
        self.chance = chance
        self.faults = faults
        self.topics: dict[str, _Topic] = {}
        self.made = 0

    def now_ms(self) -> int:
        return int(asyncio.get_running_loop().time() * 1000)

    def partition(self, topic: str, partition: int) -> _Partition:
        found = self.topics.get(topic)
        if found is None or partition >= len(found.partitions):
            raise NotFound(f"the log has no partition {partition} of topic {topic!r}")
        at: _Partition = found.partitions[partition]
        return at


class SimulatedLog:
    """The client of one process. A paused client gets its answers, and sends the waiting records, when it continues."""

    indexed_by_key = False
    end_is_linearizable = True

    def __init__(self, broker: SimulatedBroker) -> None:
        self._broker = broker
        self._chance = broker.chance
        self._paused_until_s = 0.0
        self._dead = False
        self._never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting: dict[tuple[str, int], list[tuple[Outgoing, OnSent]]] = {}
        self._answers_s: dict[tuple[str, int], float] = {}
        self._pumps: set[asyncio.Task[None]] = set()

    def pause(self, seconds: float) -> None:
        """Stop the process for a while."""
        self._paused_until_s = asyncio.get_running_loop().time() + seconds

    def kill(self) -> None:
        """End the process: it sends nothing more and gets no answer, but records in flight still arrive."""
        self._dead = True

    async def resumed(self) -> None:
        """Wait while the process is paused; a dead one waits forever."""
        while (left_s := self._paused_until_s - asyncio.get_running_loop().time()) > 0:  # noqa: ASYNC110
            await asyncio.sleep(left_s)

        if self._dead:
            await self._never

    async def _travel(self) -> None:
        await asyncio.sleep(self._chance.random() * self._broker.faults.call_s_max)

    async def _call(self, act: Callable[[], Any], *, writes: bool = False) -> Any:
        """Make a call: a delay, its effect at one moment, and another delay."""
        await self.resumed()
        await self._travel()
        faults = self._broker.faults
        if self._chance.random() < faults.refused:
            raise Unavailable("the log does not answer")
        result = act()
        await self._travel()
        await self.resumed()
        if writes and self._chance.random() < faults.unanswered:
            raise OutcomeUnknown("the log did not answer")
        if isinstance(result, TidebookError):
            raise result
        return result

    async def create_topic(
        self, topic: str, partitions: int, *, limit_bytes: int | None = None, keep_forever: bool = False
    ) -> TopicState:
        def act() -> TopicState:
            broker = self._broker
            if topic not in broker.topics:
                broker.made += 1
                state = TopicState(topic, f"id-{broker.made}", partitions)
                broker.topics[topic] = _Topic(state, limit_bytes, [_Partition() for _ in range(partitions)])
            return broker.topics[topic].state

        found: TopicState = await self._call(act)
        return found

    async def topic(self, topic: str) -> TopicState | None:
        found: _Topic | None = await self._call(lambda: self._broker.topics.get(topic))
        return None if found is None else found.state

    async def topics(self) -> list[str]:
        found: list[str] = await self._call(lambda: list(self._broker.topics))
        return found

    async def delete_topic(self, topic: str) -> None:
        await self._call(lambda: self._broker.topics.pop(topic), writes=True)

    def send(self, record: Outgoing, on_sent: OnSent) -> None:
        at = (record.topic, record.partition)
        waiting = self._waiting.setdefault(at, [])
        waiting.append((record, on_sent))
        if len(waiting) == 1:
            pump = asyncio.get_running_loop().create_task(self._pump(at))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    def send_many(self, columns: RecordColumns, on_sent: OnSentMany) -> None:
        for index in range(len(columns.values)):
            self.send(columns.record(index), callback_for(on_sent, index))

    async def _pump(self, at: tuple[str, int]) -> None:
        """Send the waiting records of a partition, in order, in batches of random size."""
        waiting = self._waiting[at]
        while waiting:
            await self.resumed()
            await self._travel()
            if self._dead:
                return
            for _ in range(self._chance.randrange(1, len(waiting) + 1)):
                record, on_sent = waiting.pop(0)
                self._deliver(at, record, on_sent)

    def _deliver(self, at: tuple[str, int], record: Outgoing, on_sent: OnSent) -> None:
        chance, faults, loop = self._chance, self._broker.faults, asyncio.get_running_loop()
        result: Acknowledged | TidebookError
        if chance.random() < faults.refused:
            result = Unavailable("the log does not answer")
        elif chance.random() < faults.unanswered:
            fate = chance.randrange(3)
            if fate == 0:
                self._write(record)
            elif fate == 1:
                loop.call_later(chance.random() * faults.late_s_max, self._write, record)
            result = OutcomeUnknown("the log did not answer")
        else:
            result = self._write(record)
        # Answers arrive in the order of the records; a paused process gets them when it continues.
        after_s = loop.time() + chance.random() * faults.call_s_max
        when_s = max(self._answers_s.get(at, 0.0), after_s, self._paused_until_s)
        self._answers_s[at] = when_s
        loop.call_at(when_s, self._answer, at, on_sent, result)

    def _answer(self, at: tuple[str, int], on_sent: OnSent, result: Acknowledged | TidebookError) -> None:
        loop = asyncio.get_running_loop()
        if self._dead:
            return
        if self._paused_until_s > loop.time():
            self._answers_s[at] = max(self._answers_s[at], self._paused_until_s)
            loop.call_at(self._answers_s[at], self._answer, at, on_sent, result)
            return
        on_sent(result)

    def _write(self, record: Outgoing) -> Acknowledged | TidebookError:
        topic = self._broker.topics.get(record.topic)
        if topic is None:
            return NotFound(f"the log has no topic {record.topic!r}")
        if topic.limit_bytes is not None and len(record.value) > topic.limit_bytes:
            return TooLarge("the record", size_bytes=len(record.value), limit_bytes=topic.limit_bytes)
        at: _Partition = topic.partitions[record.partition]
        return at.append(record, self._broker.now_ms())

    async def append(self, record: Outgoing) -> Acknowledged:
        done: asyncio.Future[Acknowledged] = asyncio.get_running_loop().create_future()
        self.send(record, lambda result: resolve_future(done, result))
        return await done

    async def read(
        self,
        topic: str,
        partition: int,
        *,
        start: int,
        stop: int,
        key: bytes | None = None,
        limit: int = 1000,
        limit_bytes: int = 4_000_000,
    ) -> RecordPage:
        def act() -> RecordPage | TidebookError:
            at = self._broker.partition(topic, partition)
            if start < at.start:
                return LogLost(topic=topic, partition=partition, first=start, last=at.start - 1)
            most = self._chance.randrange(1, 8) if limit > 1 else 1
            found = [each for each in at.records if start <= each.offset < stop][: min(limit, most)]
            end = found[-1].offset + 1 if found else start
            return RecordPage(tuple(each for each in found if key is None or each.key == key), end)

        page: RecordPage = await self._call(act)
        return page

    async def start(self, topic: str, partition: int) -> int:
        found: int = await self._call(lambda: self._broker.partition(topic, partition).start)
        return found

    async def end(self, topic: str, partition: int) -> int:
        found: int = await self._call(lambda: self._broker.partition(topic, partition).end)
        return found

    async def truncate(self, topic: str, partition: int, *, before: int) -> None:
        def act() -> None:
            at = self._broker.partition(topic, partition)
            at.start = max(at.start, min(before, at.end))
            end = at.end
            at.records = [each for each in at.records if each.offset >= at.start]
            assert at.end == end or not at.records

        await self._call(act, writes=True)

    async def wait(self, topic: str, partition: int, *, offset: int, timeout_s: float | None = None) -> bool:
        at = self._broker.partition(topic, partition)
        try:
            async with asyncio.timeout(timeout_s):
                while at.end <= offset:
                    await at.grown.wait()
        except TimeoutError:
            return False
        await self.resumed()
        return True

    async def close(self) -> None:
        await asyncio.gather(*self._pumps)
