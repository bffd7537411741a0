"""An event whose payload is an object of its declared class, with its journal and its position in the log."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar

import msgspec

from tidebook.core.bounds import DECODE_ERRORS
from tidebook.core.errors import Corrupt
from tidebook.core.event import EncodedEvent
from tidebook.core.payload import JSON, decode_payload
from tidebook.core.replication_plan import EventRow, TagRow
from tidebook.domain.event_type import EventTypes

E = TypeVar("E")

_decode = msgspec.msgpack.Decoder(EncodedEvent).decode
_NO_TAGS: frozenset[str] = frozenset()


class TypedEvent(msgspec.Struct, Generic[E], frozen=True, gc=False):
    """An event of a journal; `data` is the object that was appended, or a raw value if types are not declared."""

    topic: str
    id: str
    seq_nr: int
    data: E
    tags: frozenset[str]
    metadata: dict[str, Any] | None
    timestamp_ms: int
    partition: int
    offset: int
    #: The name of the event's type; None if it was appended without one.
    type: str | None
    #: The version of the type as it was appended, before its upcasters.
    version: int

    @property
    def timestamp(self) -> datetime:
        """The time at which the log accepted the event, in UTC."""
        return datetime.fromtimestamp(self.timestamp_ms / 1000, UTC)


def decode_row(types: EventTypes | None, topic: str, id: str, row: EventRow, partition: int) -> TypedEvent[Any]:
    """Return the event of a row; without `types`, its data is the payload."""
    try:
        event = _decode(row.encoded)
    except DECODE_ERRORS as error:
        raise Corrupt(f"{topic}/{id}: the bytes of event {row.seq_nr} are damaged: {error}") from error
    tags, metadata = event.tags, event.metadata
    return TypedEvent(
        topic,
        id,
        row.seq_nr,
        decode_payload(event.payload_type, event.payload)
        if types is None
        else types.decode(event, topic, id, row.seq_nr),
        frozenset(tags) if tags else _NO_TAGS,
        None if metadata is None else decode_payload(JSON, metadata),
        row.timestamp_ms,
        partition,
        row.position.offset,
        event.type,
        event.version,
    )


def tag_row_decoder(events: Iterable[type[Any]]) -> Callable[[TagRow], Any]:
    """Return a function that decodes the payloads of a stream by tag."""
    types = EventTypes(events)

    def decode(row: TagRow) -> Any:
        return decode_row(types, row.topic, row.id, row.event, row.partition).data

    return decode


def row_decoder(
    types: EventTypes | None, topic: str, id: str
) -> Callable[[Iterable[EventRow], int], list[TypedEvent[Any]]]:
    """Return a function that decodes the rows of one journal."""

    def decode_rows(rows: Iterable[EventRow], partition: int) -> list[TypedEvent[Any]]:
        return [decode_row(types, topic, id, row, partition) for row in rows]

    return decode_rows
