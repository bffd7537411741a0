"""Requests and responses of the outbox."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from tidebook.outbox.port import OutboxTopicStatus, ParkedMessage

PARKED_LISTED_MAX = 1_000


class OutboxResponse(msgspec.Struct, frozen=True):
    """The status of every topic of the outbox."""

    topics: list[OutboxTopicStatus]


class ParkedQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The topic of the parked messages (all topics by default), and the maximum number to list."""

    topic: str | None = None
    limit: Annotated[int, Meta(ge=1, le=PARKED_LISTED_MAX)] = 100


class ParkedMessagesResponse(msgspec.Struct, frozen=True):
    """Messages that are parked, retrying, or held by one of those."""

    messages: list[ParkedMessage]


class ParkedBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The parked messages to act on: all of a topic, or one."""

    topic: str
    id: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None


class CountResponse(msgspec.Struct, frozen=True):
    """How many messages were affected."""

    count: int
