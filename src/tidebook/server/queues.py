"""Handlers of queues."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from datetime import datetime
from typing import Any, TypeVar, cast

import msgspec

from tidebook.api.payload import payload_from
from tidebook.api.queues import (
    ClaimBody,
    ClaimResponse,
    DeadLetterResponse,
    DeadLettersResponse,
    DueLine,
    EntriesResponse,
    EntryResponse,
    FailResponse,
    HeartbeatResponse,
    HeldJob,
    JobResponse,
    PutResponse,
    QueueResponse,
    QueuesResponse,
    WorkerResponse,
    WorkersResponse,
)
from tidebook.core.errors import InvalidInput, TidebookError
from tidebook.queue.job import Job, utc_datetime
from tidebook.queue.port import WorkerReport
from tidebook.queue.queue import Queue
from tidebook.queue.views import DeadLetter, EntryView, QueueStatus
from tidebook.runtime.futures import cancel_and_wait
from tidebook.server.call import Call, Handler
from tidebook.server.masking import Mask
from tidebook.server.responses import Chunk, Lines
from tidebook.server.streams import disconnected

Shown = TypeVar("Shown", EntryView, DeadLetter)

_encode = msgspec.json.Encoder().encode
_CLAIM = ClaimBody()
#: How often a listener checks for a queue that does not exist yet.
MISSING_POLL_S = 0.5


def _queue(call: Call) -> Queue:
    return call.book.queue(call.parameters[0])


def _jobs(call: Call, leases: Sequence[str]) -> list[Job]:
    """Return the jobs of the leases; a queue uses only the fields of a job that its lease contains."""
    jobs = [HeldJob(call.parameters[0], lease) for lease in leases]
    call.has_parts = len(jobs) > 1  # if one lease was lost, the other jobs are finished, extended or returned
    return cast(list[Job], jobs)


async def put(call: Call) -> PutResponse:
    """Put entries."""
    trace = call.trace
    done = await _queue(call).put_many([each.entry(trace) for each in call.body.entries])
    return PutResponse(done.inserted, done.merged)


async def claim(call: Call) -> ClaimResponse:
    """Claim due entries; with `wait_s`, wait for the first one."""
    body, queue = call.body or _CLAIM, _queue(call)
    jobs = await _claim(queue, body, _jobs(call, body.done))
    if not jobs and body.wait_s:
        try:
            jobs = await _claim_when_due(call, queue, body)
        except TidebookError:
            if not body.done:
                raise
            # The jobs are finished: a repeat of the request would fail, because their leases are lost.
    call.changed = bool(jobs or body.done)
    return ClaimResponse([JobResponse.of(job) for job in jobs])


async def _claim_when_due(call: Call, queue: Queue, body: ClaimBody) -> list[Job]:
    """Claim as soon as something is due; give up when time is up, the client disconnects or the server drains.

    A claim that has begun is not cancelled then: the queue would return its entries as if they had failed.
    """
    until_s = asyncio.get_running_loop().time() + min(body.wait_s, max(0.0, call.deadline_s - 1.0))
    disconnection = asyncio.create_task(disconnected(call.receive))
    draining = asyncio.create_task(call.state.draining.wait())
    try:
        async with aclosing(queue.listen()) as dues:
            while await _is_due(dues, until_s, disconnection, draining):
                call.require_current()
                if jobs := await _claim(queue, body):
                    return jobs
        return []
    finally:
        await cancel_and_wait(disconnection, draining)


async def _is_due(dues: AsyncGenerator[datetime, None], until_s: float, *ends: asyncio.Task[Any]) -> bool:
    """Return True as soon as work is due, and False at `until_s` of the event loop, or when one of `ends` is done."""
    due = asyncio.create_task(_next(dues))
    try:
        left_s = until_s - asyncio.get_running_loop().time()
        await asyncio.wait((due, *ends), timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        if not due.done() or any(each.done() for each in ends):
            return False
        due.result()
        return True
    finally:
        await cancel_and_wait(due)


async def _next(dues: AsyncGenerator[datetime, None]) -> datetime:
    return await anext(dues)


async def _claim(queue: Queue, body: ClaimBody, finished: Sequence[Job] = ()) -> list[Job]:
    worker = bytes.fromhex(body.worker)
    return await queue.claim(body.limit, body.lease_s, together=body.together, worker=worker, finished=finished)


async def heartbeat(call: Call) -> HeartbeatResponse:
    """Extend leases."""
    jobs = _jobs(call, call.body.leases)
    await _queue(call).heartbeat(jobs, call.body.lease_s)
    return HeartbeatResponse([utc_datetime(cast(Any, job).lease_until_ms) for job in jobs])


async def done(call: Call) -> None:
    """Finish jobs."""
    await _queue(call).done(_jobs(call, call.body.leases))


async def fail(call: Call) -> FailResponse:
    """Return the entries of failed jobs."""
    outcomes = await _queue(call).fail(_jobs(call, call.body.leases), delay=call.body.delay_s, reason=call.body.reason)
    return FailResponse(list(outcomes))


def _response(status: QueueStatus) -> QueueResponse:
    return QueueResponse(**msgspec.structs.asdict(status))


async def status(call: Call) -> QueueResponse:
    """Return the numbers of entries of a queue."""
    return _response(await _queue(call).status())


def _worker_id(text: str) -> bytes:
    if len(text) != 32 or not set(text) <= set("0123456789abcdef"):
        raise InvalidInput(f"a worker's id must be 32 digits of 0-9 and a-f, not {text[:40]!r}")
    return bytes.fromhex(text)


async def workers(call: Call) -> WorkersResponse:
    """List the workers of a queue."""
    found = await _queue(call).workers(call.query.limit)
    return WorkersResponse([WorkerResponse(**msgspec.structs.asdict(each)) for each in found])


async def report_worker(call: Call) -> None:
    """Record that a worker is alive; like a claim that finds nothing, it is not audited."""
    call.changed = False
    numbers = msgspec.structs.astuple(call.body)
    await _queue(call).report_worker(WorkerReport(_worker_id(call.parameters[1]), *numbers))


async def remove_worker(call: Call) -> None:
    """Forget a worker that has ended."""
    call.changed = False
    await _queue(call).remove_worker(_worker_id(call.parameters[1]))


async def pause(call: Call) -> None:
    """Let claims return nothing until the queue is resumed."""
    await _queue(call).pause()


async def resume(call: Call) -> None:
    """Allow claims again."""
    await _queue(call).resume()


async def list_queues(call: Call) -> QueuesResponse:
    """List the queues that the token may see."""
    found = await call.book.queues.status()
    return QueuesResponse([_response(each) for each in found if call.principal.may_see(each.queue)])


async def entries(call: Call) -> EntriesResponse:
    """List the first entries."""
    found = await _queue(call).entries(call.query.limit)
    return EntriesResponse([EntryResponse.of(each) for each in _masked(call, found)])


async def dead_letters(call: Call) -> DeadLettersResponse:
    """List dead letters."""
    found = await _queue(call).dead_letters(call.query.limit)
    return DeadLettersResponse([DeadLetterResponse.of(each) for each in _masked(call, found)])


def _masked(call: Call, found: list[Shown]) -> list[Shown]:
    mask = call.mask(call.parameters[0])
    return found if mask is None else [_hide(each, mask) for each in found]


def _hide(entry: Shown, mask: Mask) -> Shown:
    """Return the entry without its masked values, which the reason of a dead letter may repeat."""
    if isinstance(entry, DeadLetter):
        return msgspec.structs.replace(entry, data=mask(entry.data), reason=mask.text(entry.reason, entry.data))
    return msgspec.structs.replace(entry, data=mask(entry.data))


async def retry(call: Call) -> None:
    """Put a dead letter back."""
    await _queue(call).retry(call.number(1, "dead_letter"))


async def edit(call: Call) -> None:
    """Replace the data of a dead letter."""
    await _queue(call).edit(call.number(1, "dead_letter"), payload_from(call.body.data, call.body.data_base64, "data"))


async def drop(call: Call) -> None:
    """Delete a dead letter."""
    await _queue(call).drop(call.number(1, "dead_letter"))


async def listen(call: Call) -> Lines:
    """Follow when work becomes due."""
    return Lines(lambda _: _dues(call, _queue(call)), live=True, events=True)


async def _dues(call: Call, queue: Queue) -> AsyncGenerator[Chunk, None]:
    # A read does not create the queue, and nothing signals that it was created.
    while await call.book.queues.browser(queue.name) is None:  # noqa: ASYNC110
        await asyncio.sleep(MISSING_POLL_S)
    async with aclosing(queue.listen()) as dues:
        async for due in dues:
            yield [("", _encode(DueLine(due)))]


HANDLERS: dict[str, Handler] = {
    "queues.put": put,
    "queues.claim": claim,
    "queues.heartbeat": heartbeat,
    "queues.done": done,
    "queues.fail": fail,
    "queues.status": status,
    "queues.workers": workers,
    "queues.report_worker": report_worker,
    "queues.remove_worker": remove_worker,
    "queues.pause": pause,
    "queues.resume": resume,
    "queues.list": list_queues,
    "queues.entries": entries,
    "queues.dead_letters": dead_letters,
    "queues.retry": retry,
    "queues.edit": edit,
    "queues.drop": drop,
    "queues.listen": listen,
}
