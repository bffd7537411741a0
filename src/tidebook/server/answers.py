"""What handlers return beside plain structs: streams of lines, and answers with another status or further headers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
#: Encoded values with the ids of their server-sent events, or lines of NDJSON.
Chunk = list[tuple[str, bytes]] | bytes


class Lines:
    """A streamed answer: encoded JSON values, each with the id of its server-sent event.

    `read` yields lists of them, so that what is read together is sent together. It gets this object, and sets `next` if
    it ends before everything was read.
    """

    __slots__ = ("events", "live", "next", "source")

    def __init__(
        self, read: Callable[[Lines], AsyncGenerator[Chunk, None]], *, live: bool = False, events: bool = False
    ) -> None:
        #: Whether it never ends by itself.
        self.live = live
        #: Whether it is sent as server-sent events, also if the request does not ask for them.
        self.events = events
        #: Where the read continues.
        self.next: int | str | None = None
        self.source = read(self)


class Reply(msgspec.Struct, frozen=True):
    """An answer with another status or further headers than its route says."""

    body: Any
    status: int = 200
    headers: tuple[tuple[bytes, bytes], ...] = ()


class Text(msgspec.Struct, frozen=True):
    """An answer that is not JSON."""

    body: bytes
    content_type: bytes
