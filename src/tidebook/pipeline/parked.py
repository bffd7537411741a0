"""Replay a parked record at the log's end, as a new append, delete or purge; at its own offset it stays void."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b

import msgspec

from tidebook.core.action import Append, Delete, Mark, Purge, Seal
from tidebook.core.errors import Corrupt, InvalidInput, LogLost, NotFound, OutcomeUnknown, TidebookError, Unavailable
from tidebook.core.event import Event, restore_event, unpack_events
from tidebook.core.key import partition_of
from tidebook.core.payload import decode_json
from tidebook.core.record import decode_record
from tidebook.core.replication_plan import Parked
from tidebook.wiring.book import Book

ATTEMPTS_MAX = 20


class ReplayResult(msgspec.Struct, frozen=True):
    """The result of a replay; `error` is the reason why the record stays parked."""

    topic: str
    partition: int
    offset: int
    id: str | None
    first: int | None = None
    last: int | None = None
    error: str | None = None


async def replay_parked(book: Book, parked: Parked, *, raw: bool = False, id: str | None = None) -> ReplayResult:
    """Apply a parked record to its journal as a new append, delete or purge, then remove the parked record.

    Repeating a replay appends nothing twice: if the journal no longer knows whether an earlier attempt succeeded, the
    record stays parked. With `raw` the bytes become the payload of one event (JSON or text if they are valid as such),
    for records of another program. `id` names the journal if the record does not.
    """
    record = (parked.topic, parked.partition, parked.position.offset)
    id = id or parked.id
    try:
        if id is None:
            raise InvalidInput("the record names no journal: pass its id")
        first, last = await _replay(book, await _whole_record(book, parked), id, raw=raw)
    except TidebookError as error:
        return ReplayResult(*record, id, error=str(error))
    await book.store.unpark([parked])
    position = _position_text(parked)
    await _change_started(book, lambda started: {name: each for name, each in started.items() if name != position})
    return ReplayResult(*record, id, first, last)


async def _whole_record(book: Book, parked: Parked) -> Parked:
    """Return the complete record; read it from the log if the store holds only its first bytes."""
    if parked.whole_bytes is None:
        return parked
    config, offset = await book.store.topic_config(parked.topic), parked.position.offset
    if config is not None and config.epoch == parked.position.epoch:
        with suppress(LogLost, NotFound):
            page = await book.log.read(parked.topic, parked.partition, start=offset, stop=offset + 1, limit=1)
            for record in page.records:
                if record.offset == offset and len(record.value or b"") == parked.whole_bytes:
                    return msgspec.structs.replace(parked, value=record.value, whole_bytes=None)
    raise InvalidInput(
        f"the store holds {len(parked.value):,} of the record's {parked.whole_bytes:,} bytes, and the log no longer "
        "has it: the first bytes alone cannot be replayed"
    )


async def _replay(book: Book, parked: Parked, id: str, *, raw: bool) -> tuple[int | None, int | None]:
    journal = book.journal(parked.topic)
    if raw:
        return await _append(book, parked, id, [Event(_payload(parked.value))])
    try:
        action = decode_record(parked.value)
    except Corrupt as error:
        raise Corrupt(f"{error}: it can be replayed only as raw bytes") from error
    match action:
        case Append():
            return await _append(book, parked, id, [restore_event(encoded) for encoded in unpack_events(action.body)])
        case Delete():
            await journal.delete(id, to=action.to)
        case Purge():
            await journal.purge(id)
        case Mark() | Seal():
            pass
    return None, None


async def _append(book: Book, parked: Parked, id: str, events: list[Event]) -> tuple[int | None, int | None]:
    # The original `expected` no longer applies. The append id depends only on the record's position, so that a
    # repeated replay is recognized.
    epoch, floor = await _replay_start(book, parked, id)
    append_id = blake2b(_position_text(parked).encode(), digest_size=16, person=b"tidebook-parked").digest()
    retry = OutcomeUnknown("an earlier replay", append_id=append_id, floor=floor, epoch=epoch)
    done = await book.journal(parked.topic).append(id, events, retry=retry)
    return done.first, done.last


def _position_text(parked: Parked) -> str:
    return f"{parked.topic}/{parked.partition}/{parked.position.epoch}/{parked.position.offset}"


#: Unfinished replays by the record's position: the epoch, and the log's end before the first attempt. A journal
#: remembers only its most recent appends; the log's end shows whether it may have forgotten this one.
STARTED_REPLAYS = "pipeline/replays"
_Started = dict[str, tuple[int, int]]


async def _replay_start(book: Book, parked: Parked, id: str) -> tuple[int, int]:
    """Return the epoch and the log's end at the first attempt of this replay; record them if this is the first."""
    config = await book.journal(parked.topic).topic_config()
    now = config.epoch, await book.log.end(parked.topic, partition_of(id, config.partitions))
    position = _position_text(parked)
    started = await _change_started(book, lambda started: {position: now} | started)
    if started is None:
        raise Unavailable("too many concurrent replays: try again")
    return started[position]


async def _change_started(book: Book, change: Callable[[_Started], _Started]) -> _Started | None:
    """Change the unfinished replays and return them; None if concurrent changes prevented every attempt."""
    for _ in range(ATTEMPTS_MAX):
        before = await book.store.setting(STARTED_REPLAYS)
        started = {} if before is None else msgspec.json.decode(before, type=_Started)
        changed = change(started)
        if changed == started or await book.store.set_setting(
            STARTED_REPLAYS, msgspec.json.encode(changed).decode(), expected=before
        ):
            return changed
    return None


def _payload(value: bytes) -> object:
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return value
    try:
        return decode_json(value)
    except ValueError:
        return text
