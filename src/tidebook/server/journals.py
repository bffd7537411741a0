"""Handlers of journals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from datetime import timedelta
from hashlib import blake2b
from typing import Any
from zlib import crc32

import msgspec

from tidebook.api.journals import AppendAnswer, AppendBody, EventLine, IdLine, PointerAnswer, SnapshotAnswer
from tidebook.api.payload import needs_no_check, payload_from, payload_to
from tidebook.api.problem import problem_of
from tidebook.core.action import NEVER
from tidebook.core.errors import InvalidInput, NotFound, OutcomeUnknown, TidebookError, Truncated
from tidebook.core.event import Event, ReadEvent
from tidebook.core.key import Key, journal_id
from tidebook.core.seq_nr import FIRST
from tidebook.journal.journal import Journal
from tidebook.journal.outcome import Appended
from tidebook.journal.view import read_events
from tidebook.runtime import tracing
from tidebook.server.answers import Chunk, Lines, name_chunks
from tidebook.server.broadcast import Line, Place
from tidebook.server.call import Call, Handler
from tidebook.server.masking import Mask
from tidebook.server.state import ServerState

#: How many events are encoded and sent together; the first chunks are smaller, so that the first byte is sent early.
CHUNK_EVENTS, FIRST_CHUNK_EVENTS = 256, 16
#: How many appends of a batch are in flight at once.
BATCH_IN_FLIGHT_MAX = 256

_encoder = msgspec.json.Encoder()
_encode, _encode_lines = _encoder.encode, _encoder.encode_lines


async def append(call: Call) -> AppendAnswer:
    """Append events to one journal."""
    topic, id = call.parameters
    is_checked, key = needs_no_check(call.raw_body), call.append_key
    done = await _append(call.book.journal(topic), topic, id, call.body, key, call.trace, is_checked=is_checked)
    return _answer(done)


def _events(body: AppendBody, trace: str | None, *, is_checked: bool = False) -> list[Event]:
    """Return the events of an append; those that name no trace carry that of the request."""
    events = [each.event(is_checked=is_checked) for each in body.events]
    if trace is not None:
        for event in events:
            event.metadata = {tracing.KEY: trace, **(event.metadata or {})}
    return events


def _answer(done: Appended) -> AppendAnswer:
    """Return the answer of an append, which is the same for a repetition."""
    return AppendAnswer(done.first, done.last, done.partition, done.offset)


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
        raise InvalidInput(f"expire_after_s: {seconds} seconds are too many") from error


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
            results[index] = _answer(result)
    return {"results": results}


async def ids(call: Call) -> Lines:
    """List the ids of a topic's journals."""
    journal = call.book.journal(call.parameters[0])
    prefix, limit = call.query.prefix, call.query.limit
    return Lines(lambda _: name_chunks(journal.ids(), lambda id: _encode(IdLine(id)), prefix=prefix, limit=limit))


async def pointer(call: Call) -> PointerAnswer:
    """Return the last number of a journal."""
    topic, id = call.parameters
    found = await call.book.journal(topic).pointer(id, barrier=call.query.barrier)
    if found is None:
        raise NotFound(f"{Key(topic, id)}: there is no such journal")
    return PointerAnswer(found)


async def purge(call: Call) -> None:
    """Remove a journal."""
    topic, id = call.parameters
    await call.book.journal(topic).purge(id)


async def delete(call: Call) -> None:
    """Delete events."""
    topic, id = call.parameters
    await call.book.journal(topic).delete(id, to=call.query.to)


async def read(call: Call) -> Lines:
    """Read events, or follow the journal."""
    topic, id = call.parameters
    query, journal = call.query, call.book.journal(topic)
    if query.follow:
        start, after = query.start, None
        if call.headers.last_event_id is not None:
            start, after = after_event_id(call.headers.last_event_id, Key(topic, journal_id(id)))
            start, after = await resumed(call.state, journal, id, start, after)
        mask = call.mask(topic)

        def encode(event: ReadEvent) -> bytes:
            return _encode(_event_line(event, mask))

        followed = follow_journal(call.state, journal, id, ("api", mask is None), encode, start=start, after=after)
        return Lines(lambda _: followed, live=True, events=True)
    events = journal.read(id, start=query.start, end=query.end, barrier=query.barrier)
    return Lines(lambda lines: _chunks(lines, events, query.limit, call.mask(topic), with_ids=call.wants_events))


async def resumed(
    state: ServerState, journal: Journal, id: str, start: int, after: Place | None
) -> tuple[int, Place | None]:
    """Return where a follower continues: at the beginning if its topic was deleted, since offsets start again then."""
    if after is None:
        return start, None
    head = await journal.head(id)
    if head is None:
        is_deleted = await state.book.store.topic_config(journal.topic) is None
    else:
        is_deleted = head.position.offset < after[0]
    return (FIRST, None) if is_deleted else (start, after)


def follow_journal(
    state: ServerState, journal: Journal, id: str, form: tuple[Any, ...], encode: Callable[[ReadEvent], bytes], *,
    start: int, after: Place | None,
) -> AsyncGenerator[Chunk, None]:  # fmt: skip
    """Follow a journal from number `start`, or from the event after a place.

    All followers that want the same `form` share one reader and what `encode` returns for an event.
    """
    key = Key(journal.topic, journal_id(id))

    async def begin() -> AsyncIterator[ReadEvent]:
        return journal.tail(id, start=(await journal.pointer(id) or 0) + 1)

    def line(event: ReadEvent) -> Line:
        # All records of a journal are in one partition, so offsets grow also over a purge.
        return Line((event.offset, event.seq_nr), journal.topic, _event_id(event, key), encode(event))

    is_begun = False

    def wanted(each: Line) -> bool:
        if after is not None:
            return each.place > after
        # Events before `start` are left out until the first one is delivered: after a purge numbers start again.
        nonlocal is_begun
        is_begun = is_begun or each.place[1] >= start
        return is_begun

    return state.broadcasts.follow(
        ("journal", *key, *form),
        begin,
        line,
        lambda last: _read_after(journal, id, start, last or after),
        wanted,
    )


async def _read_after(journal: Journal, id: str, start: int, after: Place | None) -> AsyncIterator[ReadEvent]:
    """Read what comes after a place: the rest of its incarnation, or all of a later one, whose numbers start again."""
    while (head := await journal.head(id)) is not None:
        if after is not None:
            start = FIRST if head.incarnation.offset > after[0] else after[1] + 1
        start = max(start, head.delete_to + 1)  # a read of one incarnation refuses to begin before what was deleted
        try:
            read = journal.read_decoded(id, read_events, start=start, incarnation=head.incarnation)
            async with aclosing(read) as events:  # type: ignore[type-var]
                async for event in events:
                    after = (event.offset, event.seq_nr)
                    yield event
            return
        except Truncated:
            continue  # deleted or purged during the read: continue with what is left


def _event_line(event: ReadEvent, mask: Mask | None) -> EventLine:
    line = EventLine.of(event)
    return line if mask is None else mask.line(line, event.payload, event.metadata)


def _event_id(event: ReadEvent, key: Key) -> str:
    """Return the id of a server-sent event: number and offset, which shows a purge, and a checksum of the journal."""
    return f"{event.seq_nr}-{event.offset}-{_checksum(key)}"


def after_event_id(text: str, key: Key) -> tuple[int, Place | None]:
    """Return the number that follows an event, and its place; a number alone is taken too, and has no place."""
    seq_nr, *more = text.split("-")
    numbers = [seq_nr, *more[:1]]
    if len(more) not in (0, 2) or not all(each.isascii() and each.isdecimal() and len(each) < 17 for each in numbers):
        raise InvalidInput(f"Last-Event-ID is the id of an event of this stream, not {text[:40]!r}")
    if not more:
        return int(seq_nr) + 1, None
    if more[1] != _checksum(key):
        raise InvalidInput(f"Last-Event-ID {text[:40]!r} is of another journal: leave it out to start at the beginning")
    return int(seq_nr) + 1, (int(more[0]), int(seq_nr))


def _checksum(key: Key) -> str:
    return f"{crc32(f'{key.topic}/{key.id}'.encode()):08x}"


async def _chunks(
    lines: Lines, events: AsyncIterator[ReadEvent], limit: int | None, mask: Mask | None, *, with_ids: bool
) -> AsyncGenerator[Chunk, None]:
    """Yield encoded events in chunks; after `limit` events, set the number that continues the read."""
    chunk: list[ReadEvent | EventLine] = []
    numbers: list[int] = []
    count, chunk_max = 0, FIRST_CHUNK_EVENTS

    def encode() -> Chunk:
        if with_ids:
            return [(str(number), _encode(each)) for number, each in zip(numbers, chunk, strict=True)]
        return _encode_lines(chunk)

    async with aclosing(events):  # type: ignore[type-var]
        async for event in events:
            if count == limit:
                lines.next = event.seq_nr
                break
            count += 1
            # An event whose payload is a JSON value or text is its own line.
            plain = mask is None and type(event.payload) is not bytes and len(event.tags) < 2
            chunk.append(event if plain else _event_line(event, mask))
            numbers.append(event.seq_nr)
            if len(chunk) >= chunk_max:
                yield encode()
                chunk, numbers = [], []
                chunk_max = min(2 * chunk_max, CHUNK_EVENTS)
    if chunk:
        yield encode()


async def load_snapshot(call: Call) -> SnapshotAnswer:
    """Return the newest snapshot."""
    topic, id = call.parameters
    found = await call.book.journal(topic).load_snapshot(id, to=call.query.to)
    if found is None:
        raise NotFound(f"{Key(topic, id)}: there is no snapshot")
    mask = call.mask(topic)
    payload = found.payload if mask is None else mask(found.payload)
    return SnapshotAnswer(found.seq_nr, found.timestamp_ms, *payload_to(payload))


async def save_snapshot(call: Call) -> None:
    """Save a snapshot."""
    topic, id, _ = call.parameters
    payload = payload_from(call.body.payload, call.body.payload_base64)
    await call.book.journal(topic).save_snapshot(id, seq_nr=call.number(2, "seq_nr"), payload=payload)


async def delete_snapshots(call: Call) -> None:
    """Delete snapshots."""
    topic, id = call.parameters
    await call.book.journal(topic).delete_snapshots(id, to=call.query.to)


HANDLERS: dict[str, Handler] = {
    "journals.append": append,
    "journals.append_batch": append_batch,
    "journals.ids": ids,
    "journals.pointer": pointer,
    "journals.purge": purge,
    "journals.delete": delete,
    "journals.read": read,
    "journals.load_snapshot": load_snapshot,
    "journals.save_snapshot": save_snapshot,
    "journals.delete_snapshots": delete_snapshots,
}
