"""What is on its way to the log: calls, the records that carry them, and what a scan finds of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tidebook.core.errors import TidebookError, Unavailable
from tidebook.log.port import Sent
from tidebook.wal.entry import Written
from tidebook.wal.meta import Verdict
from tidebook.wal.record import Damaged, DataRecord, Drop, Mark, Payloads, Write


class Call:
    """A write to one table on its way: those that wait together share a record."""

    __slots__ = ("answer", "attempts", "first", "payloads", "size_bytes", "turn")

    def __init__(self, payloads: Payloads, answer: asyncio.Future[Written]) -> None:
        self.payloads = payloads
        self.size_bytes = payloads.size_bytes
        self.answer = answer
        #: The number of its first payload, once it is sent.
        self.first = 0
        self.attempts = 0
        #: Its place among all that was taken.
        self.turn = 0

    def settle(self, offset: int) -> None:
        """It counts."""
        if not self.answer.done():
            first = self.first
            self.answer.set_result(Written(first, first + len(self.payloads.values) - 1, offset))


class Bundle:
    """A write to several tables: all of it is in one record, in its order."""

    __slots__ = ("answer", "attempts", "firsts", "payloads", "size_bytes", "turn")

    def __init__(self, payloads: Sequence[Payloads], answer: asyncio.Future[list[Written]]) -> None:
        self.payloads = payloads
        self.size_bytes = sum([each.size_bytes for each in payloads])
        self.answer = answer
        #: The number of each one's first payload, once it is sent.
        self.firsts: list[int] = []
        self.attempts = 0
        self.turn = 0

    def settle(self, offset: int) -> None:
        """It counts."""
        if not self.answer.done():
            pairs = zip(self.firsts, self.payloads, strict=True)
            self.answer.set_result([Written(first, first + len(each.values) - 1, offset) for first, each in pairs])


class Flight:
    """A record that was sent. `outcome` is set by the log's answer."""

    __slots__ = ("answer", "calls", "outcome", "record", "size_bytes", "turn")

    def __init__(
        self,
        record: Write | Mark | Drop,
        size_bytes: int,
        calls: Sequence[Call | Bundle],
        answer: asyncio.Future[int] | None,
        *,
        turn: int,
    ) -> None:
        self.record = record
        self.size_bytes = size_bytes
        self.calls = calls
        #: Of a control record: its offset.
        self.answer = answer
        self.outcome: Sent | TidebookError | None = None
        #: The place of the first that it carries.
        self.turn = turn

    def settle(self, offset: int) -> None:
        """It counts: answer all who wait for it."""
        for call in self.calls:
            call.settle(offset)
        if self.answer is not None and not self.answer.done():
            self.answer.set_result(offset)

    def fail(self, error: TidebookError) -> None:
        """It does not count, or nobody knows."""
        for call in self.calls:
            if not call.answer.done():
                call.answer.set_exception(error)
        if self.answer is not None and not self.answer.done():
            self.answer.set_exception(error)


class Found:
    """What a scan saw of our own records."""

    def __init__(self, writer: bytes) -> None:
        self._writer = writer
        self._writes: dict[tuple[int, int, int], int] = {}
        self._seen: set[int] = set()
        #: Where the scan had to begin anew, because a cleaner had cut the log: what lies before was not seen.
        self.seen_from = 0

    def __call__(self, offset: int, record: DataRecord | Damaged, verdict: Verdict) -> None:
        self._seen.add(offset)
        if verdict is Verdict.VALID:
            self.add(offset, record)

    def add(self, offset: int, record: DataRecord | Damaged) -> None:
        """A record that counts, ours or not."""
        if isinstance(record, Write) and record.writer == self._writer:
            self._writes[_identity(record)] = offset

    def offset_of(self, flight: Flight) -> int | None:
        """Where the record lies and counts; None if it does not."""
        if isinstance(flight.record, Write):
            return self._writes.get(_identity(flight.record))
        if isinstance(flight.outcome, Sent):
            offset = flight.outcome.offset
            return offset if offset < self.seen_from or offset in self._seen else None
        return None

    def may_have_missed(self, flight: Flight) -> bool:
        """Whether the record may lie where the scan could not look any more."""
        if not self.seen_from or self.offset_of(flight) is not None:
            return False
        match flight.outcome:
            case Sent(offset=offset):
                return offset < self.seen_from
            case Unavailable():
                return False
            case _:
                return True


def _identity(write: Write) -> tuple[int, int, int]:
    """What tells a record from all others of its writer: under one claim a number is given out once."""
    return write.term, write.parts[0].table, write.parts[0].first
