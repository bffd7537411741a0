"""Requests and responses of tags."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from tidebook.api.journals import LIST_MAX, PAGE_EVENTS_MAX
from tidebook.api.payload import payload_to
from tidebook.tags.event import TaggedEvent


class TagReadQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Select events of a tag: those after `after` (a `tag_offset`) or since `since` (a time), in some topics or all."""

    after: str | None = None
    since: datetime | None = None
    #: Topics, separated by commas.
    topics: str | None = None
    limit: Annotated[int, Meta(ge=1, le=PAGE_EVENTS_MAX)] | None = None
    consistency: Literal["horizon", "delay"] | None = None
    follow: bool = False
    unmask: bool = False


class TaggedEventLine(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """An event of a tag; `tag_offset` resumes the stream after it, and is the id of the server-sent event."""

    tag_offset: str
    topic: str
    id: str
    seq_nr: int
    tag_seq_nr: int
    timestamp_ms: int
    partition: int
    offset: int
    payload: Any = UNSET
    payload_base64: bytes | UnsetType = UNSET
    tags: tuple[str, ...] = ()
    metadata: dict[str, Any] | None = None
    type: str | None = None
    version: int = 1

    @classmethod
    def of(cls, event: TaggedEvent) -> TaggedEventLine:
        """Return the line of an event."""
        payload, encoded = payload_to(event.payload)
        return cls(
            event.tag_offset, event.topic, event.id, event.seq_nr, event.tag_seq_nr, event.timestamp_ms,
            event.partition, event.offset, payload, encoded, tuple(sorted(event.tags)), event.metadata,
            event.type, event.version,
        )  # fmt: skip


class TagsQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tags that begin with `prefix`, at most `limit` of them."""

    prefix: str = ""
    limit: Annotated[int, Meta(ge=1, le=LIST_MAX)] | None = None


class TagLine(msgspec.Struct, frozen=True):
    """One tag."""

    tag: str


class HorizonQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The topics of the horizon, separated by commas; by default all."""

    topics: str | None = None


class HorizonResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The time below which streams by tag are complete, what holds it back, and what is not replicated yet."""

    time_ms: int
    most_ms: int
    age_s: float | None
    topic: str | None
    partition: int | None
    lag: int | None
    remedy: str | None


class TagRebuildBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The topics whose rows of the tag are rewritten; by default all."""

    topics: tuple[str, ...] | None = None


class TagRebuildResponse(msgspec.Struct, frozen=True):
    """How many rows were written and removed."""

    written: int
    removed: int
