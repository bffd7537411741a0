"""Requests and responses of journals and topics."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from tidebook.api.payload import checked_payload, payload_from, payload_to
from tidebook.core.bounds import EVENTS_MAX, NUMBER_MAX
from tidebook.core.event import Event, ReadEvent
from tidebook.core.seq_nr import FIRST, LAST
from tidebook.core.topic_config import TopicConfig

#: How many appends one batch may contain.
BATCH_APPENDS_MAX = 1_000
PAGE_EVENTS_MAX = 10_000
LIST_MAX = 10_000

SeqNr = Annotated[int, Meta(ge=0, le=NUMBER_MAX)]
Ordinal = Annotated[int, Meta(ge=1, le=NUMBER_MAX)]
AppendId = Annotated[bytes, Meta(min_length=16, max_length=16, description="16 bytes in base64")]


class EventBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An event to append: `payload` (a JSON value or text) or `payload_base64` (bytes), tags and metadata."""

    payload: Any = UNSET
    payload_base64: bytes | UnsetType = UNSET
    tags: tuple[str, ...] = ()
    metadata: dict[str, Any] | None = None
    #: The name of the event's type, and its version.
    type: str | None = None
    version: int = 1

    def event(self, *, is_checked: bool = False) -> Event:
        """Return the event that a journal appends; `is_checked` says that its payload needs no check."""
        payload = payload_from(self.payload, self.payload_base64)
        if is_checked:
            payload = checked_payload(payload)
        return Event(payload, tags=self.tags, metadata=self.metadata, type=self.type, version=self.version)


class RetryBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The fields of the `outcome-unknown` problem of an earlier attempt, so that the retry makes no duplicate."""

    append_id: AppendId
    floor: Annotated[int, Meta(ge=-1)] | None = None
    epoch: int | None = None
    partition: int | None = None
    offset: int | None = None


class AppendBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Events to append atomically; `expected` is the last number that the journal must have, `at` the first new one."""

    events: Annotated[tuple[EventBody, ...], Meta(min_length=1, max_length=EVENTS_MAX)]
    expected: SeqNr | None = None
    at: Ordinal | None = None
    #: Seconds after its last append at which the journal expires; "never" removes the expiry.
    expire_after_s: Annotated[float, Meta(gt=0)] | Literal["never"] | None = None
    confirm: bool = True
    append_id: AppendId | None = None
    retry: RetryBody | None = None


class BatchAppendBody(AppendBody, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """One append of a batch."""

    id: str


class AppendBatchBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Appends to many journals of one topic; each append is atomic."""

    appends: Annotated[tuple[BatchAppendBody, ...], Meta(min_length=1, max_length=BATCH_APPENDS_MAX)]


class AppendResponse(msgspec.Struct, frozen=True):
    """The numbers of the appended events; null if the outcome was not awaited."""

    first: int | None
    last: int | None
    partition: int
    offset: int


class BatchAppendResponse(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The result of one append of a batch: the numbers, or the problem."""

    first: int | None = None
    last: int | None = None
    partition: int | None = None
    offset: int | None = None
    problem: dict[str, Any] | None = None


class AppendBatchResponse(msgspec.Struct, frozen=True):
    """One result for each append, in the order of the request."""

    results: list[BatchAppendResponse]


class EventLine(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """An event as it is read: one line of NDJSON, or the data of one server-sent event; fields as in `ReadEvent`."""

    seq_nr: int
    payload: Any = UNSET
    payload_base64: bytes | UnsetType = UNSET
    tags: tuple[str, ...] = ()
    metadata: dict[str, Any] | None = None
    timestamp_ms: int
    partition: int
    offset: int
    type: str | None = None
    version: int = 1

    @classmethod
    def of(cls, event: ReadEvent) -> EventLine:
        """Return the line of an event."""
        payload, encoded = payload_to(event.payload)
        tags = tuple(sorted(event.tags)) if event.tags else ()
        return cls(
            seq_nr=event.seq_nr, payload=payload, payload_base64=encoded, tags=tags, metadata=event.metadata,
            timestamp_ms=event.timestamp_ms, partition=event.partition, offset=event.offset, type=event.type,
            version=event.version,
        )  # fmt: skip

    def event(self) -> ReadEvent:
        """Return the event of a line."""
        payload = payload_from(self.payload, self.payload_base64)
        return ReadEvent(
            self.seq_nr, payload, frozenset(self.tags), self.metadata, self.timestamp_ms, self.partition, self.offset,
            self.type, self.version,
        )  # fmt: skip


class EndLine(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The last line of an NDJSON response: the read is complete, a page ended before `next`, or a problem ended it."""

    end: bool = msgspec.field(default=UNSET)  # type: ignore[assignment]
    next: int | str | None = None
    problem: dict[str, Any] | None = None


class ReadQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which events to read; without `limit` all of them, as of one position of the log."""

    start: Ordinal = FIRST
    end: Ordinal = LAST
    limit: Annotated[int, Meta(ge=1, le=PAGE_EVENTS_MAX)] | None = None
    barrier: Literal["mark", "offset"] | None = None
    follow: bool = False
    unmask: bool = False


class PointerQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a request determines the end of the log."""

    barrier: Literal["mark", "offset"] | None = None


class PointerResponse(msgspec.Struct, frozen=True):
    """The last number of a journal."""

    seq_nr: int


class DeleteQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The events to delete: those up to and including `to`."""

    to: Ordinal


class SnapshotBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The state to save: `payload` or `payload_base64`."""

    payload: Any = UNSET
    payload_base64: bytes | UnsetType = UNSET


class SnapshotResponse(msgspec.Struct, frozen=True, omit_defaults=True):
    """A saved state."""

    seq_nr: int
    timestamp_ms: int
    payload: Any = UNSET
    payload_base64: bytes | UnsetType = UNSET


class SnapshotQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Snapshots at or below `to`."""

    to: Ordinal = LAST
    unmask: bool = False


class SnapshotsToQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Snapshots at or below `to`."""

    to: Ordinal = LAST


class IdsQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Ids that begin with `prefix`, at most `limit` of them."""

    prefix: str = ""
    limit: Annotated[int, Meta(ge=1, le=LIST_MAX)] | None = None


class IdLine(msgspec.Struct, frozen=True):
    """The id of one journal."""

    id: str


class TopicsResponse(msgspec.Struct, frozen=True):
    """The topics that hold journals, sorted."""

    topics: list[str]


class TopicResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a topic in the log and in the store; lists have one item for each partition."""

    topic: str
    kind: Literal["journal", "wal", "messages"]
    partitions: int
    epoch: int | None
    starts: list[int]
    ends: list[int]
    pointers: list[int | None]
    lag: int | None


class TopicConfigResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of a topic, which is the same for all processes."""

    topic_id: str
    partitions: int
    epoch: int
    segment_size: int
    segments: int
    limit_bytes: int
    admitted: bool
    began: list[tuple[int, int]]

    @classmethod
    def of(cls, config: TopicConfig) -> TopicConfigResponse:
        """Return the response for a configuration."""
        return msgspec.convert(config, cls, from_attributes=True)

    def config(self) -> TopicConfig:
        """Return the configuration in a response."""
        return msgspec.convert(self, TopicConfig, from_attributes=True)
