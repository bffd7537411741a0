"""Work queues on a server."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from typing import Any, overload

import msgspec

from tidebook.api.payload import encoded_payload_to
from tidebook.api.queues import (
    CLAIM_MAX,
    ClaimBody,
    DataBody,
    DeadLetterResponse,
    DoneBody,
    DueLine,
    EntryBody,
    EntryResponse,
    FailBody,
    HeartbeatBody,
    JobResponse,
    PutBody,
    WorkerBody,
    decode_lease,
    encode_lease,
)
from tidebook.core.errors import InvalidInput, NotFound
from tidebook.core.payload import encode_payload
from tidebook.queue import port
from tidebook.queue.browse import BrowsableStore
from tidebook.queue.entry import Entry, check_worker, chunks, duration_ms, encode_data, with_trace
from tidebook.queue.fields import fields_of
from tidebook.queue.job import D, Decode, Job
from tidebook.queue.port import NEVER_MS, Claimed, NewEntry, Outcome, Put, QueueSettings
from tidebook.queue.queue import Queue
from tidebook.queue.queues import Queues, queue_name
from tidebook.queue.runtime import QueueRuntime
from tidebook.queue.views import DeadLetter, EntryView, QueueStatus, WorkerView, check_list_limit
from tidebook.remote.connection import Connection
from tidebook.runtime import tracing
from tidebook.runtime.clock import Clock, Ids
from tidebook.runtime.metrics import Metrics

#: The longest listing that a server returns.
LISTED_MAX = 10_000

_decode_due = msgspec.json.Decoder(DueLine).decode


async def _no_store() -> BrowsableStore:
    raise InvalidInput("a remote book has no queue store")


class RemoteQueue(Queue):
    """One queue of a server's book, created at its first use. `Queue` documents the methods."""

    def __init__(self, name: str, connection: Connection, runtime: QueueRuntime) -> None:
        self.name = name
        self._connection = connection
        #: Validates entries and decodes declared fields; its store is never opened.
        self._runtime = runtime

    async def put_many(self, entries: Iterable[Entry | Any], *, transaction: object = None) -> Put:
        if transaction is not None:
            raise InvalidInput("a remote book cannot put in your transaction: open the book with the same database")
        inserted = merged = 0
        new = self._runtime.new_entries(self.name, entries)
        with tracing.span("queue.put", **self._put_attributes(new)) as span:
            trace = None if span is None else span.carried
            for chunk in chunks(with_trace(new, trace)):
                body = PutBody(tuple(map(_entry_body, chunk)))
                response = await self._connection.call("queues.put", self.name, body=body, trace=trace)
                inserted, merged = inserted + response.inserted, merged + response.merged
        return Put(inserted, merged, self._runtime.clock.now_ms())

    async def put_once(self, entries: Iterable[Entry | Any], *, source: str, steps: Sequence[port.Step]) -> Put | None:
        """Raise `InvalidInput`: feeds need direct access to the queue store."""
        raise InvalidInput("a remote book has no feeds: run the feed where the folder or .toml of the book is open")

    async def marks(self, source: str) -> dict[int, str]:
        """Raise `InvalidInput`: feeds need direct access to the queue store."""
        raise InvalidInput("a remote book has no feeds: run the feed where the folder or .toml of the book is open")

    def put_many_in(self, transaction: object, entries: Iterable[Entry | Any]) -> Put:
        """Raise `InvalidInput`: your own transaction needs the same database."""
        raise InvalidInput("a remote book cannot put in your transaction: open the book with the same database")

    async def open(self) -> Queue:
        """Return the queue; the server creates it at its first use."""
        return self

    async def claim(
        self,
        limit: int = 1,
        lease: timedelta | float | None = None,
        *,
        together: bool = True,
        worker: bytes = b"",
        finished: Job | Sequence[Job] = (),
        wait_s: float = 0.0,
    ) -> list[Job]:
        """Claim as `Queue.claim` does; if nothing is due, the server waits up to `wait_s` seconds for an entry."""
        if type(limit) is not int or not 1 <= limit <= CLAIM_MAX:
            raise InvalidInput(f"a claim must be for 1 to {CLAIM_MAX:,} entries, not {limit!r}")
        done = _leases(self._own_jobs(finished)) if finished else ()
        body = ClaimBody(limit, _lease_s(lease), wait_s, together, worker.hex(), done)
        response = await self._connection.call("queues.claim", self.name, body=body, wait_s=wait_s)
        decode = self._runtime.decoder(self.name)
        return [_job(self.name, each, decode) for each in response.jobs]

    async def heartbeat(self, jobs: Job | Sequence[Job], lease: timedelta | float | None = None) -> None:
        own = self._own_jobs(jobs)
        body = HeartbeatBody(_leases(own), _lease_s(lease))
        response = await self._connection.call("queues.heartbeat", self.name, body=body)
        for job, until in zip(own, response.lease_until, strict=True):
            job.extended(_ms(until))

    async def done(self, jobs: Job | Sequence[Job]) -> None:
        await self._connection.call("queues.done", self.name, body=DoneBody(_leases(self._own_jobs(jobs))))

    async def fail(
        self, jobs: Job | Sequence[Job], *, delay: timedelta | float = 0, reason: str = "it failed"
    ) -> list[Outcome]:
        delay_s = duration_ms(delay, "delay") / 1000
        body = FailBody(_leases(self._own_jobs(jobs)), delay_s, str(reason).encode(errors="replace").decode())
        response = await self._connection.call("queues.fail", self.name, body=body)
        outcomes: list[Outcome] = response.outcomes
        return outcomes

    async def listen(self) -> AsyncGenerator[datetime, None]:
        async with aclosing(self._connection.events("queues.listen", self.name, query={})) as events:
            async for event in events:
                yield datetime.now(UTC) if event is None else _decode_due(event.data).due_at

    async def entries(self, limit: int = 100) -> list[EntryView]:
        query = {"limit": min(check_list_limit(limit), LISTED_MAX)}
        if limit == 0:
            return []
        response = await self._connection.call("queues.entries", self.name, query=query)
        return [_entry_view(each) for each in response.entries]

    async def status(self) -> QueueStatus:
        try:
            response = await self._connection.call("queues.status", self.name)
        except NotFound:
            return QueueStatus(self.name, 0, 0, 0, 0, 0.0, None, 0)
        return QueueStatus(**msgspec.structs.asdict(response))

    async def workers(self, limit: int = 100) -> list[WorkerView]:
        if check_list_limit(limit) == 0:
            return []
        response = await self._connection.call("queues.workers", self.name, query={"limit": min(limit, LISTED_MAX)})
        return [WorkerView(**msgspec.structs.asdict(each)) for each in response.workers]

    async def report_worker(self, report: port.WorkerReport) -> None:
        id, name, *numbers = msgspec.structs.astuple(check_worker(report))
        await self._connection.call("queues.report_worker", self.name, id.hex(), body=WorkerBody(name, *numbers))

    async def remove_worker(self, id: bytes) -> None:
        await self._connection.call("queues.remove_worker", self.name, id.hex())

    async def pause(self) -> None:
        await self._connection.call("queues.pause", self.name)

    async def resume(self) -> None:
        await self._connection.call("queues.resume", self.name)

    async def dead_letters(self, limit: int = 100) -> list[DeadLetter]:
        if check_list_limit(limit) == 0:
            return []
        query = {"limit": min(limit, LISTED_MAX)}
        response = await self._connection.call("queues.dead_letters", self.name, query=query)
        return [_dead_letter(each) for each in response.dead_letters]

    async def retry(self, id: int) -> None:
        await self._connection.call("queues.retry", self.name, self._checked(id))

    async def edit(self, id: int, data: Any) -> None:
        body = DataBody(*encoded_payload_to(*encode_data(self._runtime.check(self.name, data))))
        await self._connection.call("queues.edit", self.name, self._checked(id), body=body)

    async def drop(self, id: int) -> None:
        await self._connection.call("queues.drop", self.name, self._checked(id))

    async def close(self) -> None:
        """Do nothing: the book closes the connection."""


class RemoteQueues(Queues):
    """The queues of a server's book, by name."""

    def __init__(self, connection: Connection, *, clock: Clock, ids: Ids, metrics: Metrics) -> None:
        super().__init__(QueueRuntime(_no_store, clock=clock, ids=ids, metrics=metrics))
        self._connection = connection

    @overload
    def queue(self, name: str, *, settings: QueueSettings | None = None, fields: type[D]) -> Queue[D]: ...
    @overload
    def queue(self, name: str, *, settings: QueueSettings | None = None, fields: object = None) -> Queue[Any]: ...
    def queue(self, name: str, *, settings: QueueSettings | None = None, fields: object = None) -> Queue[Any]:
        """Return a queue by name; declared fields are checked and decoded in this process."""
        if settings is not None:
            raise InvalidInput("a remote book cannot store settings of a queue: open the folder or .toml of the book")
        found = self._queues.find(queue_name(name))
        if found is None:
            found = self._queues.add(name, RemoteQueue(name, self._connection, self._runtime))
        if fields is not None:
            self._runtime.declare(name, fields_of(fields))
        return found

    async def names(self) -> list[str]:
        return [each.queue for each in await self.status()]

    async def status(self) -> list[QueueStatus]:
        response = await self._connection.call("queues.list")
        return [QueueStatus(**msgspec.structs.asdict(each)) for each in response.queues]

    async def dead_letters(self, limit: int = 100) -> list[DeadLetter]:
        check_list_limit(limit)
        found = [letter for name in await self.names() for letter in await self.queue(name).dead_letters(limit)]
        return sorted(found, key=lambda letter: (letter.raised_at, letter.id), reverse=True)[:limit]

    async def close(self) -> None:
        """Do nothing: the book closes the connection."""


def _entry_body(entry: NewEntry) -> EntryBody:
    return EntryBody(
        *encoded_payload_to(entry.kind, entry.data),
        entry.key,
        entry.priority,
        _date(entry.process_at),
        _date(entry.expires_at),
        entry.trace,
    )


def _date(ms: int | None) -> datetime | None:
    return None if ms is None or ms == NEVER_MS else datetime.fromtimestamp(ms / 1000, UTC)


def _ms(date: datetime) -> int:
    return round(date.timestamp() * 1000)


def _lease_s(lease: timedelta | float | None) -> float | None:
    return None if lease is None else duration_ms(lease, "lease", least_ms=1) / 1000


def _leases(jobs: Sequence[Job]) -> tuple[str, ...]:
    return tuple(encode_lease(job.held, job.id, job.key) for job in jobs)


def _value(response: JobResponse | EntryResponse | DeadLetterResponse) -> Any:
    return response.data if response.data_base64 is msgspec.UNSET else response.data_base64


def _job(queue: str, response: JobResponse, decode: Decode) -> Job:
    held, id, key = decode_lease(response.lease)
    kind, data = encode_payload(_value(response))
    claimed = Claimed(
        slot=held.slot, id=id, keyhash=held.keyhash, key=key, priority=response.priority, timeouts=response.timeouts,
        format=0, inserted_at=_ms(response.inserted_at), process_at=_ms(response.process_at),
        expires_at=NEVER_MS if response.expires_at is None else _ms(response.expires_at),
        started_at=_ms(response.started_at), lease_until=_ms(response.lease_until), kind=kind, data=data,
        token=held.token, together=held.together, trace=response.traceparent,
    )  # fmt: skip
    return Job(queue, claimed, decode)


def _entry_view(response: EntryResponse) -> EntryView:
    fields = {name: getattr(response, name) for name in EntryView.__struct_fields__ if name != "data"}
    return EntryView(**fields, data=_value(response))


def _dead_letter(response: DeadLetterResponse) -> DeadLetter:
    fields = {name: getattr(response, name) for name in DeadLetter.__struct_fields__ if name != "data"}
    return DeadLetter(**fields, data=_value(response))
