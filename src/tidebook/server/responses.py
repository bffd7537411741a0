"""Responses of handlers that are not plain structs: streams of lines, and those with another status or headers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import aclosing
from typing import Any

import msgspec

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
#: Encoded values with the ids of their server-sent events, or lines of NDJSON.
Chunk = list[tuple[str, bytes]] | bytes
CHUNK_NAMES = 256
#: A chunk ends when it has this size, so it exceeds it by at most one value.
CHUNK_BYTES = 1_000_000


class Lines:
    """A streamed response: encoded JSON values, each with the id of its server-sent event.

    `read` is called with this object and yields chunks; it sets `next` if it stops before everything was read.
    """

    __slots__ = ("events", "live", "next", "source")

    def __init__(
        self, read: Callable[[Lines], AsyncGenerator[Chunk, None]], *, live: bool = False, events: bool = False
    ) -> None:
        #: Whether the stream never ends by itself.
        self.live = live
        #: Whether the response is sent as server-sent events even if the request does not ask for them.
        self.events = events
        #: Where the read continues.
        self.next: int | str | None = None
        self.source = read(self)


class ChunkBuffer:
    """Collects the encoded values of a chunk, up to a number of them and to `CHUNK_BYTES`."""

    def __init__(self, values_max: int) -> None:
        self._max = values_max
        self._values: list[tuple[str, bytes]] = []
        self._bytes = 0

    def add(self, id: str, encoded: bytes) -> bool:
        """Add a value; return whether the chunk is to be sent now."""
        self._values.append((id, encoded))
        self._bytes += len(encoded)
        return len(self._values) >= self._max or self._bytes >= CHUNK_BYTES

    def take(self) -> list[tuple[str, bytes]]:
        """Return the values, and begin the next chunk."""
        values, self._values, self._bytes = self._values, [], 0
        return values

    def __bool__(self) -> bool:
        return bool(self._values)


async def name_chunks(
    names: AsyncIterator[str], encode: Callable[[str], bytes], *, prefix: str, limit: int | None
) -> AsyncGenerator[Chunk, None]:
    """Yield the encoded names that begin with a prefix in chunks, at most `limit` of them."""
    chunk: list[tuple[str, bytes]] = []
    count = 0
    async with aclosing(names):  # type: ignore[type-var]
        async for name in names:
            if not name.startswith(prefix):
                continue
            chunk.append(("", encode(name)))
            count += 1
            if len(chunk) >= CHUNK_NAMES:
                yield chunk
                chunk = []
            if count == limit:
                break
    if chunk:
        yield chunk


class Reply(msgspec.Struct, frozen=True):
    """A response with a status other than that of its route, or with additional headers."""

    body: Any
    status: int = 200
    headers: tuple[tuple[bytes, bytes], ...] = ()


class Text(msgspec.Struct, frozen=True):
    """A response that is not JSON."""

    body: bytes
    content_type: bytes
