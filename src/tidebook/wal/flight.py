"""What is on its way to the log: calls, the records that carry them, and what a scan finds of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tidebook.core.errors import TidebookError
from tidebook.log.port import Sent
from tidebook.wal.entry import Written
from tidebook.wal.meta import Verdict
from tidebook.wal.record import Damaged, DataRecord, Drop, Mark, Payloads, Write


class Call:
    """One write on its way: its payloads share a record, with those of other calls where they wait together."""

    __slots__ = ("answer", "attempts", "firsts", "payloads", "size_bytes")

    def __init__(self, payloads: Sequence[Payloads], size_bytes: int, answer: asyncio.Future[list[Written]]) -> None:
        self.payloads = payloads
        self.size_bytes = size_bytes
        self.answer = answer
        #: The number that each one's first payload gets, once it is sent.
        self.firsts: list[int] = []
        self.attempts = 0

    def settle(self, offset: int) -> None:
        """It counts."""
        if not self.answer.done():
            pairs = zip(self.firsts, self.payloads, strict=True)
            self.answer.set_result([Written(first, first + len(each.values) - 1, offset) for first, each in pairs])


class Flight:
    """A record that was sent. `outcome` is set by the log's answer."""

    __slots__ = ("answer", "calls", "outcome", "record", "size_bytes")

    def __init__(
        self, record: Write | Mark | Drop, size_bytes: int, calls: list[Call], answer: asyncio.Future[int] | None
    ) -> None:
        self.record = record
        self.size_bytes = size_bytes
        self.calls = calls
        #: Of a control record: its offset.
        self.answer = answer
        self.outcome: Sent | TidebookError | None = None

    def settle(self, offset: int) -> None:
        """It counts: answer all who wait for it."""
        for call in self.calls:
            call.settle(offset)
        if self.answer is not None and not self.answer.done():
            self.answer.set_result(offset)

    def fail(self, error: TidebookError) -> None:
        """It does not count, or nobody knows."""
        for answer in (*(call.answer for call in self.calls), self.answer):
            if answer is not None and not answer.done():
                answer.set_exception(error)


class Found:
    """What a scan saw of our own records."""

    def __init__(self, writer: bytes) -> None:
        self._writer = writer
        self._writes: dict[tuple[int, int, int], int] = {}
        self._seen: set[int] = set()

    def __call__(self, offset: int, record: DataRecord | Damaged, verdict: Verdict) -> None:
        self._seen.add(offset)
        if isinstance(record, Write) and verdict is Verdict.VALID and record.writer == self._writer:
            self._writes[_identity(record)] = offset

    def offset_of(self, flight: Flight) -> int | None:
        """Where the record lies and counts; None if it does not."""
        if isinstance(flight.record, Write):
            return self._writes.get(_identity(flight.record))
        if isinstance(flight.outcome, Sent) and flight.outcome.offset in self._seen:
            return flight.outcome.offset
        return None


def _identity(write: Write) -> tuple[int, int, int]:
    """What tells a record from all others of its writer: under one claim a number is given out once."""
    return write.term, write.parts[0].table, write.parts[0].first
