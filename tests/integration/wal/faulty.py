"""Wrap a log to inject faults."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from tidebook.core.errors import LogLost, OutcomeUnknown, TidebookError, Unavailable
from tidebook.log.port import Acknowledged, Log, OnSent, Outgoing, Record, RecordPage, TopicState
from tidebook.wal.record import read_record

Fault = Callable[[Outgoing], str | None]


class FaultyLog:
    """A log that injects the fault that `fault` returns for each record; None sends it normally.

    "refused": not written, reported as failed. "lost": not written, outcome unknown. "late": written by `land`, outcome
    unknown. "unknown": written, outcome unknown. "twice": written twice. "held": written, the acknowledgement waits for
    `release`. "acknowledged and lost": acknowledged, but not written.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self.indexed_by_key = log.indexed_by_key
        self.end_is_linearizable = log.end_is_linearizable
        self.fault: Fault = lambda _: None
        self.reads_fail = False
        self._sending: dict[type, asyncio.Event] = {}
        #: The records with the fault "late": `land` writes them.
        self.late: list[Outgoing] = []
        self._answers: list[tuple[OnSent, Acknowledged | TidebookError]] = []
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
                self._log.send(record, lambda _: on_sent(OutcomeUnknown("written, but not acknowledged on purpose")))
            case "twice":
                self._log.send(record, on_sent)
                self._log.send(record, lambda _: None)
            case "held":
                self._log.send(record, lambda outcome: self._hold(on_sent, outcome))
            case "acknowledged and lost":
                loop.call_soon(on_sent, Acknowledged(0, 10_000, 0))
            case other:
                raise AssertionError(other)

    def _hold(self, on_sent: OnSent, outcome: Acknowledged | TidebookError) -> None:
        self._answers.append((on_sent, outcome))
        self._answer_came.set()

    async def holds(self, count: int) -> None:
        """Wait until this many acknowledgements are held."""
        while len(self._answers) < count:
            self._answer_came.clear()
            await self._answer_came.wait()

    def release(self, answered: Sequence[bool]) -> None:
        """Deliver the held acknowledgements; report an unknown outcome where `answered` is False."""
        answers, self._answers = self._answers, []
        for (on_sent, outcome), is_acknowledged in zip(answers, answered, strict=True):
            on_sent(outcome if is_acknowledged else OutcomeUnknown("written, but not acknowledged on purpose"))

    async def sends(self, kind: type) -> None:
        """Wait until a record of this type is sent."""
        await self._sending.setdefault(kind, asyncio.Event()).wait()

    async def append(self, record: Outgoing) -> Acknowledged:
        done: asyncio.Future[Acknowledged | TidebookError] = asyncio.get_running_loop().create_future()
        self.send(record, done.set_result)
        outcome = await done
        if isinstance(outcome, TidebookError):
            raise outcome
        return outcome

    async def land(self) -> None:
        """Write the late records to the log."""
        for record in self.late:
            await self._log.append(record)
        self.late.clear()

    async def read(self, *arguments: Any, **named: Any) -> RecordPage:
        if self.reads_fail:
            raise Unavailable("no reads on purpose")
        return await self._log.read(*arguments, **named)


class SparseLog:
    """Map every offset to `STRIDE` times it plus 3: gaps everywhere, like those of Kafka's transaction markers."""

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
        def shown(outcome: Acknowledged | TidebookError) -> None:
            on_sent(self._sent(outcome) if isinstance(outcome, Acknowledged) else outcome)

        self._log.send(record, shown)

    async def append(self, record: Outgoing) -> Acknowledged:
        return self._sent(await self._log.append(record))

    def _sent(self, sent: Acknowledged) -> Acknowledged:
        return Acknowledged(sent.partition, self._shown(sent.offset), sent.timestamp_ms)

    def _shown(self, offset: int) -> int:
        return offset * self.STRIDE + 3

    def _inner(self, shown: int) -> int:
        return max(0, -(-(shown - 3) // self.STRIDE))

    async def read(self, topic: str, partition: int, *, start: int, stop: int, **named: Any) -> RecordPage:
        inner_start, inner_stop = self._inner(start), self._inner(stop)
        if inner_start >= inner_stop:
            return RecordPage((), stop)
        try:
            batch = await self._log.read(topic, partition, start=inner_start, stop=inner_stop, **named)
        except LogLost as error:
            raise LogLost(topic=topic, partition=partition, first=start, last=self._shown(error.last)) from error
        records = tuple(Record(self._shown(r.offset), r.timestamp_ms, r.key, r.value, r.headers) for r in batch.records)
        return RecordPage(records, stop if batch.next_offset >= inner_stop else self._shown(batch.next_offset - 1) + 1)

    async def start(self, topic: str, partition: int) -> int:
        start = await self._log.start(topic, partition)
        return self._shown(start - 1) + 1 if start else 0

    async def end(self, topic: str, partition: int) -> int:
        end = await self._log.end(topic, partition)
        return self._shown(end - 1) + 2 if end else 0

    async def truncate(self, topic: str, partition: int, *, before: int) -> None:
        await self._log.truncate(topic, partition, before=self._inner(before))
