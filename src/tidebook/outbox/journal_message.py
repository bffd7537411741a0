"""Encode an append to a journal as a message of the outbox."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from hashlib import blake2b

import msgspec

from tidebook.core.action import NEVER, expiry_ms
from tidebook.core.bounds import DECODE_ERRORS, EVENTS_MAX
from tidebook.core.errors import Corrupt, InvalidInput
from tidebook.core.event import Event, decode_event, encode_event
from tidebook.core.key import journal_id, topic_name
from tidebook.core.payload import JSON, decode_payload
from tidebook.core.seq_nr import seq_nr
from tidebook.outbox.message import Message

#: The prefix of a journal's topic in the outbox; no Kafka topic name can contain it.
PREFIX = "journal:"


class JournalAppend(msgspec.Struct, frozen=True, array_like=True):
    """The append to make; its events are encoded as the journal stores them."""

    id: str
    events: tuple[bytes, ...]
    expected: int | None = None
    #: Milliseconds, or NEVER.
    expire_after: int | None = None

    def decoded_events(self) -> list[Event]:
        """Return the events as the caller gave them."""
        return [_event(each) for each in self.events]

    def expiry(self) -> timedelta | int | None:
        """Return the expiry in the form that `Journal.append` takes."""
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
    """Validate an append and return it as a message, keyed by the journal's id."""
    given: object = events
    if isinstance(given, Event | str | bytes) or not isinstance(given, Sequence) or not given:
        raise InvalidInput("events are a list of at least one tidebook.Event object")
    if len(events) > EVENTS_MAX:
        raise InvalidInput(f"an append takes at most {EVENTS_MAX:,} events, not {len(events):,}: split it")
    if expected is not None:
        seq_nr(expected, name="expected", least=0)
    encoded = tuple(encode_event(event) for event in events)
    append = JournalAppend(journal_id(id), encoded, expected, expiry_ms(expire_after))
    return Message(PREFIX + topic_name(topic), _encode(append), key=id.encode())


def read_journal_message(payload: bytes | None) -> JournalAppend:
    """Return the append of a payload; raise Corrupt if it is not one. The inverse of `journal_message`."""
    try:
        return _decode(payload or b"")
    except DECODE_ERRORS as error:
        raise Corrupt(f"the payload is not an append to a journal: {error}") from error


def append_id(outbox: bytes, id: int) -> bytes:
    """Return the append id of a row: the same 16 bytes each time the row is relayed."""
    return blake2b(outbox + id.to_bytes(8, "big"), digest_size=16, person=b"tidebook-outbox").digest()


def _event(encoded: bytes) -> Event:
    event = decode_event(encoded)
    metadata = None if event.metadata is None else decode_payload(JSON, event.metadata)
    return Event(decode_payload(event.payload_type, event.payload), tags=event.tags, metadata=metadata)
