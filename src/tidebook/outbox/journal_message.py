"""An append to a journal, as a message of the outbox."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from hashlib import blake2b

import msgspec

from tidebook.core.action import NEVER
from tidebook.core.errors import Corrupt, InvalidInput
from tidebook.core.event import Event, decode_event, encode_event
from tidebook.core.key import journal_id, topic_name
from tidebook.core.payload import decode_json, decode_payload
from tidebook.outbox.message import Message

#: What the name of a journal's topic begins with in the outbox; no Kafka topic can have it.
PREFIX = "journal:"
EVENTS_MAX = 10_000


class JournalAppend(msgspec.Struct, frozen=True, array_like=True):
    """What is to be appended; events are encoded as the journal keeps them."""

    id: str
    events: tuple[bytes, ...]
    expected: int | None = None
    #: Milliseconds, or NEVER.
    expire_after: int | None = None

    def decoded_events(self) -> list[Event]:
        """The events as they were given."""
        return [_event(each) for each in self.events]

    def expiry(self) -> timedelta | int | None:
        """The expiry as `Journal.append` takes it."""
        if self.expire_after is None or self.expire_after == NEVER:
            return self.expire_after
        return timedelta(milliseconds=self.expire_after)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(JournalAppend).decode


def journal_message(
    topic: str,
    id: str,
    events: Sequence[Event],
    *,
    expected: int | None = None,
    expire_after: timedelta | int | None = None,
) -> Message:
    """Check an append and make a message of it, keyed by the journal's id."""
    given: object = events
    if isinstance(given, Event | str | bytes) or not isinstance(given, Sequence) or not given:
        raise InvalidInput("events are a list of at least one tidebook.Event object")
    if len(events) > EVENTS_MAX:
        raise InvalidInput(f"an append takes at most {EVENTS_MAX:,} events, not {len(events):,}: split it")
    if expected is not None and (type(expected) is not int or expected < 0):
        raise InvalidInput(f"expected is a number from 0, not {expected!r}")
    expiry = expire_after // timedelta(milliseconds=1) if isinstance(expire_after, timedelta) else expire_after
    append = JournalAppend(journal_id(id), tuple(encode_event(event) for event in events), expected, expiry)
    return Message(PREFIX + topic_name(topic), _encode(append), key=id.encode())


def read_journal_message(payload: bytes | None) -> JournalAppend:
    """Undo `journal_message`."""
    try:
        return _decode(payload or b"")
    except msgspec.MsgspecError as error:
        raise Corrupt(f"this is no append to a journal: {error}") from error


def append_id(outbox: bytes, id: int) -> bytes:
    """The same 16 bytes for the same row of the same outbox, however often it is relayed."""
    return blake2b(outbox + id.to_bytes(8, "big"), digest_size=16, person=b"tidebook-outbox").digest()


def _event(kept: bytes) -> Event:
    event = decode_event(kept)
    metadata = None if event.metadata is None else decode_json(event.metadata)
    return Event(decode_payload(event.payload_type, event.payload), tags=event.tags, metadata=metadata)
