"""Replaying a parked record: a new append at the log's end, for where it stands it is void for everybody, for ever."""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from tidebook.core.action import Append, Delete, Mark, Purge, Seal
from tidebook.core.errors import Corrupt, InvalidInput, TidebookError
from tidebook.core.event import Event, decode_event, unpack_events
from tidebook.core.payload import decode_json, decode_payload
from tidebook.core.record import decode_record
from tidebook.core.replication import Parked
from tidebook.wiring.book import Book


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
    """Append what a parked record holds to its journal and forget the record. Running it again adds nothing.

    `raw` takes the bytes as they are for one event's payload (JSON or text where they are that), for records that
    another program wrote. `id` names the journal where the record does not.
    """
    at = (parked.topic, parked.partition, parked.position.offset)
    id = id or parked.id
    try:
        if id is None:
            raise InvalidInput("the record names no journal: say which one is meant")
        first, last = await _replay(book, parked, id, raw=raw)
    except TidebookError as error:
        return Replayed(*at, id, error=str(error))
    await book.store.unpark([parked])
    return Replayed(*at, id, first, last)


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
    done = await book.journal(parked.topic).append(id, events, append_id=_append_id(parked))
    return done.first, done.last


def _append_id(parked: Parked) -> bytes:
    place = f"{parked.topic}/{parked.partition}/{parked.position.epoch}/{parked.position.offset}"
    return blake2b(place.encode(), digest_size=16, person=b"tidebook-parked").digest()


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
