"""Handlers of appends, to one journal and to many."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from hashlib import blake2b
from typing import Any

import msgspec

from tidebook.api.journals import AppendBody, AppendResponse
from tidebook.api.payload import payloads_need_no_check
from tidebook.api.problem import problem_of
from tidebook.core.action import NEVER
from tidebook.core.errors import InvalidInput, OutcomeUnknown, TidebookError
from tidebook.core.event import Event
from tidebook.journal.journal import Journal
from tidebook.journal.outcome import Appended
from tidebook.runtime import tracing
from tidebook.server.call import Call, Handler

#: How many appends of a batch are in flight at once.
BATCH_IN_FLIGHT_MAX = 256


async def append(call: Call) -> AppendResponse:
    """Append events to one journal."""
    topic, id = call.parameters
    is_checked, key = payloads_need_no_check(call.raw_body), call.append_key
    done = await _append(call.book.journal(topic), topic, id, call.body, key, call.trace, is_checked=is_checked)
    return _response(done)


def _events(body: AppendBody, trace: str | None, *, is_checked: bool = False) -> list[Event]:
    """Return the events of an append; those that name no trace carry that of the request."""
    events = [each.event(is_checked=is_checked) for each in body.events]
    if trace is not None:
        for event in events:
            event.metadata = {tracing.KEY: trace, **(event.metadata or {})}
    return events


def _response(done: Appended) -> AppendResponse:
    """Return the response of an append; a retry with the same append id gets the same one."""
    return AppendResponse(done.first, done.last, done.partition, done.offset)


async def _append(
    journal: Journal,
    topic: str,
    id: str,
    body: AppendBody,
    key: str | None,
    trace: str | None = None,
    *,
    is_checked: bool = False,
) -> Appended:
    events = _events(body, trace, is_checked=is_checked)
    if key is None and is_plain(body):
        return await journal.append(id, events)
    expire_after: timedelta | int | None = None
    if body.expire_after_s is not None:
        expire_after = NEVER if body.expire_after_s == "never" else _duration(body.expire_after_s)
    append_id, retry = body.append_id, None
    if body.retry is not None:
        fields = msgspec.structs.asdict(body.retry)
        retry = OutcomeUnknown("an earlier attempt", **fields)
    elif append_id is None and key is not None:
        append_id = derived_append_id(topic, id, key)
    return await journal.append(
        id,
        events,
        expected=body.expected,
        at=body.at,
        expire_after=expire_after,
        confirm=body.confirm,
        append_id=append_id,
        retry=retry,
    )


def is_plain(body: AppendBody) -> bool:
    """Return whether an append has events only, so that `append_many` takes it."""
    return (
        body.expected is None
        and body.at is None
        and body.append_id is None
        and body.retry is None
        and body.expire_after_s is None
        and body.confirm
    )


def _duration(seconds: Any) -> timedelta:
    try:
        return timedelta(seconds=float(seconds))
    except (OverflowError, ValueError) as error:
        raise InvalidInput(f"expire_after_s: {seconds} seconds is too long") from error


def derived_append_id(topic: str, id: str, key: str) -> bytes:
    """Return the append id of an Idempotency-Key: a repeat is recognized by the journal itself."""
    return blake2b(f"{topic}\0{id}\0{key}".encode(), digest_size=16, person=b"tidebook-idem").digest()


async def append_batch(call: Call) -> dict[str, Any]:
    """Append to many journals; each append has its own result or problem."""
    [topic] = call.parameters
    journal, appends, trace = call.book.journal(topic), call.body.appends, call.trace
    results: list[Any] = []
    if call.append_key is None and all(map(is_plain, appends)):
        results += await journal.append_many([(each.id, _events(each, trace)) for each in appends])
    else:
        for start in range(0, len(appends), BATCH_IN_FLIGHT_MAX):
            chunk = appends[start : start + BATCH_IN_FLIGHT_MAX]
            keys = [call.append_key and f"{call.append_key}\0{start + index}" for index in range(len(chunk))]
            calls = [_append(journal, topic, each.id, each, key, trace) for each, key in zip(chunk, keys, strict=True)]
            results += await asyncio.gather(*calls, return_exceptions=True)
    for index, result in enumerate(results):
        if isinstance(result, TidebookError):
            results[index] = {"problem": problem_of(result)}
            call.is_complete = False
        elif isinstance(result, BaseException):
            raise result
        else:
            results[index] = _response(result)
    return {"results": results}


HANDLERS: dict[str, Handler] = {"journals.append": append, "journals.append_batch": append_batch}
