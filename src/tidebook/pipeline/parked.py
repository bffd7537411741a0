"""Replaying a parked record: a new append at the log's end, for where it stands it is void for everybody, for ever."""

from __future__ import annotations

from contextlib import suppress
from hashlib import blake2b

import msgspec

from tidebook.core.action import Append, Delete, Mark, Purge, Seal
from tidebook.core.errors import (
    Corrupt,
    InvalidInput,
    LogLost,
    NotFound,
    OutcomeUnknown,
    TidebookError,
    Unavailable,
)
from tidebook.core.event import Event, decode_event, unpack_events
from tidebook.core.key import partition_of
from tidebook.core.payload import decode_json, decode_payload
from tidebook.core.record import decode_record
from tidebook.core.replication import Parked
from tidebook.wiring.book import Book

TRIES_MAX = 20


class Replayed(msgspec.Struct, frozen=True):
    """What a replay came to; `error` says why it was left where it is."""

    topic: str
    partition: int
    offset: int
    id: str | None
    first: int | None = None
    last: int | None = None
    error: str | None = None


async def replay_parked(book: Book, parked: Parked, *, raw: bool = False, id: str | None = None) -> Replayed:
    """Append what a parked record holds to its journal and forget the record. Running it again adds nothing: where the
    journal can no longer tell whether an earlier replay was taken, this one is left.

    `raw` takes the bytes as they are for one event's payload (JSON or text where they are that), for records that
    another program wrote. `id` names the journal where the record does not.
    """
    at = (parked.topic, parked.partition, parked.position.offset)
    id = id or parked.id
    try:
        if id is None:
            raise InvalidInput("the record names no journal: say which one is meant")
        first, last = await _replay(book, await _whole(book, parked), id, raw=raw)
    except TidebookError as error:
        return Replayed(*at, id, error=str(error))
    await book.store.unpark([parked])
    await _forget_begun(book, parked)
    return Replayed(*at, id, first, last)


async def _whole(book: Book, parked: Parked) -> Parked:
    """The whole record: from the log, where the store has kept only its first bytes."""
    if parked.whole_bytes is None:
        return parked
    facts, offset = await book.store.facts(parked.topic), parked.position.offset
    if facts is not None and facts.epoch == parked.position.epoch:
        with suppress(LogLost, NotFound):
            page = await book.log.read(parked.topic, parked.partition, start=offset, stop=offset + 1, limit=1)
            for record in page.records:
                if record.offset == offset and len(record.value or b"") == parked.whole_bytes:
                    return msgspec.structs.replace(parked, value=record.value, whole_bytes=None)
    raise InvalidInput(
        f"the store has kept {len(parked.value):,} of the record's {parked.whole_bytes:,} bytes, and the log no longer "
        "has it: what is left cannot be replayed"
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
            return await _append(book, parked, id, [_event(kept) for kept in unpack_events(action.body)])
        case Delete():
            await journal.delete(id, to=action.to)
        case Purge():
            await journal.purge(id)
        case Mark() | Seal():
            pass
    return None, None


async def _append(book: Book, parked: Parked, id: str, events: list[Event]) -> tuple[int | None, int | None]:
    # Numbered next, whatever it had expected: what it expected is past. The id is the record's own, for ever.
    epoch, floor = await _begun(book, parked, id)
    retry = OutcomeUnknown("a replay that began before", append_id=_append_id(parked), floor=floor, epoch=epoch)
    done = await book.journal(parked.topic).append(id, events, retry=retry)
    return done.first, done.last


def _place(parked: Parked) -> str:
    return f"{parked.topic}/{parked.partition}/{parked.position.epoch}/{parked.position.offset}"


def _append_id(parked: Parked) -> bytes:
    return blake2b(_place(parked).encode(), digest_size=16, person=b"tidebook-parked").digest()


#: Replays that have begun and not ended, by the record's place: the epoch, and the log's end before the first attempt.
#: A journal remembers its last appends alone, and by this it can tell that it has forgotten one.
BEGUN = "pipeline/replays"
_Begun = dict[str, tuple[int, int]]


async def _begun(book: Book, parked: Parked, id: str) -> tuple[int, int]:
    """When the first attempt of this replay began: now, unless there was one."""
    facts = await book.journal(parked.topic).facts()
    for _ in range(TRIES_MAX):
        before, begun = await _read_begun(book)
        if _place(parked) in begun:
            return begun[_place(parked)]
        now = facts.epoch, await book.log.end(parked.topic, partition_of(id, facts.partitions))
        if await _set_begun(book, before, begun | {_place(parked): now}):
            return now
    raise Unavailable("too many replays at once: try again")


async def _forget_begun(book: Book, parked: Parked) -> None:
    for _ in range(TRIES_MAX):
        before, begun = await _read_begun(book)
        left = {place: at for place, at in begun.items() if place != _place(parked)}
        if left == begun or await _set_begun(book, before, left):
            return


async def _read_begun(book: Book) -> tuple[str | None, _Begun]:
    text = await book.store.setting(BEGUN)
    return text, {} if text is None else msgspec.json.decode(text, type=_Begun)


async def _set_begun(book: Book, before: str | None, begun: _Begun) -> bool:
    return await book.store.set_setting(BEGUN, msgspec.json.encode(begun).decode(), expected=before)


def _event(kept: bytes) -> Event:
    event = decode_event(kept)
    metadata = None if event.metadata is None else decode_json(event.metadata)
    return Event(decode_payload(event.payload_type, event.payload), tags=event.tags, metadata=metadata)


def _payload(value: bytes) -> object:
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return value
    try:
        return decode_json(value)
    except ValueError:
        return text
