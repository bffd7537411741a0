"""Logs that misbehave on purpose, around a log that does not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from tidebook.core.errors import LogLost, OutcomeUnknown, TidebookError, Unavailable
from tidebook.log.port import Batch, Log, OnSent, Outgoing, Record, Sent, TopicState
from tidebook.wal.record import read_record

Fault = Callable[[Outgoing], str | None]


class FaultyLog:
    """Sends go wrong as `fault` says of each: "refused", "lost", "unknown" (it lands, nobody is told), or None.

    "held": it lands, and the answer waits for `release`.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self.indexed_by_key = log.indexed_by_key
        self.end_is_linearizable = log.end_is_linearizable
        self.fault: Fault = lambda _: None
        self.reads_fail = False
        self._sending: dict[type, asyncio.Event] = {}
        #: Records that were "late": they land when `land` is called.
        self.late: list[Outgoing] = []
        self._answers: list[tuple[OnSent, Sent | TidebookError]] = []
        self._answer_came = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    def send(self, record: Outgoing, on_sent: OnSent) -> None:
        for kind, sent in self._sending.items():
            if isinstance(read_record(record.value), kind):
                sent.set()
        loop = asyncio.get_running_loop()
        match self.fault(record):
            case None:
                self._log.send(record, on_sent)
            case "refused":
                loop.call_soon(on_sent, Unavailable("refused on purpose"))
            case "lost":
                loop.call_soon(on_sent, OutcomeUnknown("lost on purpose"))
            case "late":
                self.late.append(record)
                loop.call_soon(on_sent, OutcomeUnknown("late on purpose"))
            case "unknown":
                self._log.send(record, lambda _: on_sent(OutcomeUnknown("landed, but untold on purpose")))
            case "twice":
                self._log.send(record, on_sent)
                self._log.send(record, lambda _: None)
            case "held":
                self._log.send(record, lambda outcome: self._hold(on_sent, outcome))
            case "told and gone":
                loop.call_soon(on_sent, Sent(0, 10_000, 0))
            case other:
                raise AssertionError(other)

    def _hold(self, on_sent: OnSent, outcome: Sent | TidebookError) -> None:
        self._answers.append((on_sent, outcome))
        self._answer_came.set()

    async def holds(self, count: int) -> None:
        """Wait until so many answers are held."""
        while len(self._answers) < count:
            self._answer_came.clear()
            await self._answer_came.wait()

    def release(self, told: Sequence[bool]) -> None:
        """Answer what was held; where `told` says no, say that nobody knows."""
        answers, self._answers = self._answers, []
        for (on_sent, outcome), is_told in zip(answers, told, strict=True):
            on_sent(outcome if is_told else OutcomeUnknown("landed, but untold on purpose"))

    async def sends(self, kind: type) -> None:
        """Wait until a record of this type is sent."""
        await self._sending.setdefault(kind, asyncio.Event()).wait()

    async def append(self, record: Outgoing) -> Sent:
        done: asyncio.Future[Sent | TidebookError] = asyncio.get_running_loop().create_future()
        self.send(record, done.set_result)
        outcome = await done
        if isinstance(outcome, TidebookError):
            raise outcome
        return outcome

    async def land(self) -> None:
        """Let the late records arrive."""
        for record in self.late:
            await self._log.append(record)
        self.late.clear()

    async def read(self, *arguments: Any, **named: Any) -> Batch:
        if self.reads_fail:
            raise Unavailable("no reads on purpose")
        return await self._log.read(*arguments, **named)


class SparseLog:
    """Shows every offset times `STRIDE` plus 3: holes everywhere, as transaction markers leave them."""

    STRIDE = 7

    def __init__(self, log: Log) -> None:
        self._log = log
        self.indexed_by_key = log.indexed_by_key
        self.end_is_linearizable = log.end_is_linearizable

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    async def create_topic(self, topic: str, partitions: int, **named: Any) -> TopicState:
        return await self._log.create_topic(topic, partitions, **named)

    def send(self, record: Outgoing, on_sent: OnSent) -> None:
        def shown(outcome: Sent | TidebookError) -> None:
            on_sent(self._sent(outcome) if isinstance(outcome, Sent) else outcome)

        self._log.send(record, shown)

    async def append(self, record: Outgoing) -> Sent:
        return self._sent(await self._log.append(record))

    def _sent(self, sent: Sent) -> Sent:
        return Sent(sent.partition, self._shown(sent.offset), sent.timestamp_ms)

    def _shown(self, offset: int) -> int:
        return offset * self.STRIDE + 3

    def _inner(self, shown: int) -> int:
        return max(0, -(-(shown - 3) // self.STRIDE))

    async def read(self, topic: str, partition: int, *, start: int, stop: int, **named: Any) -> Batch:
        inner_start, inner_stop = self._inner(start), self._inner(stop)
        if inner_start >= inner_stop:
            return Batch((), stop)
        try:
            batch = await self._log.read(topic, partition, start=inner_start, stop=inner_stop, **named)
        except LogLost as error:
            raise LogLost(topic=topic, partition=partition, first=start, last=self._shown(error.last)) from error
        records = tuple(Record(self._shown(r.offset), r.timestamp_ms, r.key, r.value, r.headers) for r in batch.records)
        return Batch(records, stop if batch.next_offset >= inner_stop else self._shown(batch.next_offset - 1) + 1)

    async def start(self, topic: str, partition: int) -> int:
        start = await self._log.start(topic, partition)
        return self._shown(start - 1) + 1 if start else 0

    async def end(self, topic: str, partition: int) -> int:
        end = await self._log.end(topic, partition)
        return self._shown(end - 1) + 2 if end else 0

    async def truncate(self, topic: str, partition: int, *, before: int) -> None:
        await self._log.truncate(topic, partition, before=self._inner(before))
