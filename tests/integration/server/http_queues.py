"""A queue store whose entries go over HTTP, so that the suite of queue stores runs against a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tidebook import Book, LeaseLost
from tidebook.api.queues import HeldJob, encode_lease
from tidebook.core.errors import NotFound
from tidebook.core.payload import decode_payload, encode_payload
from tidebook.queue.entry import Entry
from tidebook.queue.job import Job, utc_datetime
from tidebook.queue.port import (
    NEVER_MS,
    Claimed,
    Counts,
    DeadLetterRow,
    Failure,
    LeasedEntry,
    NewEntry,
    Outcome,
    Put,
    QueueRef,
    WaitingEntry,
    WorkerReport,
)
from tidebook.queue.queue import Queue
from tidebook.queue.sqlite.store import SqliteQueues
from tidebook.runtime.clock import SystemClock
from tidebook.testing.conformance.queue_base import START_MS


class HandClock(SystemClock):
    """A clock that moves only when a test sets it."""

    def __init__(self) -> None:
        self.ms = START_MS

    def now_ms(self) -> int:
        return self.ms


class HttpQueues(SqliteQueues):
    """Puts, claims, leases and lists over HTTP; settings, sweeps and wake-ups are those of the store itself."""

    def __init__(self, book: Book, puts: HandClock, **options: Any) -> None:
        super().__init__(**options)
        self._book = book
        #: The clock by which the server dates puts.
        self._puts = puts

    def _remote(self, queue: QueueRef) -> Queue:
        return self._book.queue(queue.name)

    async def put(self, queue: QueueRef, entries: Sequence[NewEntry], *, inserted_at: int) -> Put:
        self._puts.ms = inserted_at
        put = await self._remote(queue).put_many([_entry(each) for each in entries])
        return Put(put.inserted, put.merged, self._clock.now_ms())

    async def claim(
        self, queue: QueueRef, claims: Mapping[bytes, int], *, lease_ms: int, together: bool = False
    ) -> list[Claimed]:
        found: list[Claimed] = []
        for limit in claims.values():
            found += [job._claimed for job in await self._remote(queue).claim(limit, lease_ms / 1000)]
        return found

    async def heartbeat(self, queue: QueueRef, held: Sequence[LeasedEntry], *, lease_ms: int) -> dict[LeasedEntry, int]:
        extended: dict[LeasedEntry, int] = {}
        for each in held:
            job = _job(queue, each)
            try:
                await self._remote(queue).heartbeat(job, lease_ms / 1000)
            except LeaseLost:
                continue
            extended[each] = job.lease_until_ms  # type: ignore[attr-defined]
        return extended

    async def finish(self, queue: QueueRef, held: Sequence[LeasedEntry]) -> set[LeasedEntry]:
        finished: set[LeasedEntry] = set()
        for each in held:
            try:
                await self._remote(queue).done(_job(queue, each))
            except LeaseLost:
                continue
            finished.add(each)
        return finished

    async def fail(self, queue: QueueRef, failures: Sequence[Failure]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for each in failures:
            job = _job(queue, each.held)
            try:
                outcomes += await self._remote(queue).fail(job, delay=each.delay_ms / 1000, reason=each.reason)
            except LeaseLost:
                outcomes.append("lost")
        return outcomes

    async def entries(self, queue: QueueRef, *, limit: int) -> list[WaitingEntry]:
        found = await self._remote(queue).entries(limit)
        return [WaitingEntry(**_row(each, WaitingEntry)) for each in found]

    async def counts(self, queue: QueueRef) -> Counts:
        found = await self._remote(queue).status()
        next_at = NEVER_MS if found.next_at is None else _ms(found.next_at)
        oldest = round(found.oldest_due_s * 1000)
        paused_at = None if found.paused_at is None else _ms(found.paused_at)
        return Counts(found.due, found.later, found.processing, found.dead, oldest, next_at, found.tables, paused_at)

    async def report_worker(self, queue: QueueRef, report: WorkerReport) -> None:
        await self._remote(queue).report_worker(report)

    async def remove_worker(self, queue: QueueRef, id: bytes) -> None:
        await self._remote(queue).remove_worker(id)

    async def pause(self, queue: QueueRef) -> int:
        await self._remote(queue).pause()
        paused_at = (await self._remote(queue).status()).paused_at
        assert paused_at is not None
        return _ms(paused_at)

    async def resume(self, queue: QueueRef) -> bool:
        was_paused = (await self._remote(queue).status()).paused_at is not None
        await self._remote(queue).resume()
        return was_paused

    async def dead_letters(self, queue: QueueRef | None = None, *, limit: int = 100) -> list[DeadLetterRow]:
        source = self._book.queues if queue is None else self._remote(queue)
        return [DeadLetterRow(**_row(each, DeadLetterRow)) for each in await source.dead_letters(limit)]

    async def retry(self, queue: QueueRef, id: int) -> bool:
        return await _found(self._remote(queue).retry(id))

    async def edit(self, queue: QueueRef, id: int, kind: int, data: bytes) -> bool:
        return await _found(self._remote(queue).edit(id, decode_payload(kind, data)))

    async def drop(self, queue: QueueRef, id: int) -> bool:
        return await _found(self._remote(queue).drop(id))


async def _found(call: Any) -> bool:
    try:
        await call
    except NotFound:
        return False
    return True


def _entry(new: NewEntry) -> Entry:
    return Entry(
        data=decode_payload(new.kind, new.data),
        key=new.key,
        priority=new.priority,
        process_at=None if new.process_at is None else utc_datetime(new.process_at),
        expires_at=None if new.expires_at == NEVER_MS else utc_datetime(new.expires_at),
    )


def _job(queue: QueueRef, held: LeasedEntry) -> Job:
    job: Any = HeldJob(queue.name, encode_lease(held, 0, None))
    return job


def _ms(date: Any) -> int:
    return round(date.timestamp() * 1000)


def _row(view: Any, row: type) -> dict[str, Any]:
    """Return the fields of a stored row: dates in milliseconds, data in encoded form."""
    kind, data = encode_payload(view.data)
    found: dict[str, Any] = {"kind": kind, "data": data}
    for name in row.__struct_fields__:  # type: ignore[attr-defined]
        if name not in found:
            value = getattr(view, name)
            found[name] = _ms(value) if hasattr(value, "timestamp") else value
    if found.get("expires_at") is None:
        found["expires_at"] = NEVER_MS
    return found
