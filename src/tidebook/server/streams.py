"""Send streamed answers as NDJSON or as server-sent events, at the pace of the client.

Nothing is buffered here: a chunk is read when the one before it was accepted, and a client that does not accept one in
time is disconnected. A live stream ends with a retry hint when the server drains.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import suppress
from typing import Any, Final

import msgspec

from tidebook.api.errors import TooManyRequests
from tidebook.api.journals import EndLine
from tidebook.api.problem import internal_problem, problem_of
from tidebook.core.errors import TidebookError
from tidebook.server.call import Chunk, Lines, Receive, Send

NDJSON: Final = b"application/x-ndjson"
EVENT_STREAM: Final = b"text/event-stream"
#: How long a client waits before it connects again, in milliseconds, at the start of a stream and when a server drains.
RETRY_MS, DRAIN_RETRY_MS = 2_000, 500

_encode = msgspec.json.Encoder().encode


class StreamSlots:
    """Counts the open streams, of the server and of each token."""

    def __init__(self, streams_max: int, per_token_max: int) -> None:
        self._max, self._per_token_max = streams_max, per_token_max
        self.open = 0
        self._by_token: dict[str, int] = {}

    def take(self, token: str) -> None:
        """Count a stream; raise `TooManyRequests` if there are too many."""
        of_token = self._by_token.get(token, 0)
        if self.open >= self._max or of_token >= self._per_token_max:
            whose = "the server" if self.open >= self._max else "this token"
            raise TooManyRequests(f"{whose} has too many open streams: close some of them", retry_after_s=5.0)
        self.open += 1
        self._by_token[token] = of_token + 1

    def release(self, token: str) -> None:
        """Count a stream that has ended."""
        self.open -= 1
        left = self._by_token[token] - 1
        if left:
            self._by_token[token] = left
        else:
            del self._by_token[token]


class StreamSender:
    """Sends one streamed answer."""

    def __init__(
        self, receive: Receive, send: Send, draining: asyncio.Event, *, send_s: float, keepalive_s: float
    ) -> None:
        self._receive = receive
        self._send_raw = send
        self._draining = draining
        self._send_s = send_s
        self._keepalive_s = keepalive_s

    async def run(self, lines: Lines, *, events: bool, headers: list[tuple[bytes, bytes]]) -> None:
        """Send all chunks; return when the source ends, the client disconnects, or the server drains a live stream.

        The first chunk is read before the headers are sent, so that an error at the start has its own status.
        """
        source = lines.source
        try:
            first: Chunk | None = None
            if not lines.live:
                first = await anext(source, None)
            await self._start(events, headers)
            if first is not None:
                await self._send(_format(first, events))
            await self._until_gone(self._pump(lines, events=events))
        finally:
            await source.aclose()

    async def _start(self, events: bool, headers: list[tuple[bytes, bytes]]) -> None:
        kind = EVENT_STREAM if events else NDJSON
        sent = [(b"content-type", kind), (b"cache-control", b"no-store"), (b"x-accel-buffering", b"no"), *headers]
        await self._send_raw({"type": "http.response.start", "status": 200, "headers": sent})
        if events:
            await self._send(f"retry: {RETRY_MS}\n\n".encode())

    async def _send(self, body: bytes, *, more: bool = True) -> None:
        async with asyncio.timeout(self._send_s):
            await self._send_raw({"type": "http.response.body", "body": body, "more_body": more})

    async def _until_gone(self, pump: Awaitable[None]) -> None:
        """Run the pump until it ends or the client disconnects."""
        pumping = asyncio.ensure_future(pump)
        gone = asyncio.ensure_future(_disconnected(self._receive))
        try:
            await asyncio.wait((pumping, gone), return_when=asyncio.FIRST_COMPLETED)
            if pumping.done():
                with suppress(TimeoutError):  # the client does not read: closing the connection is all that is left
                    pumping.result()
        finally:
            for task in (gone, pumping):
                task.cancel()
            await asyncio.gather(gone, pumping, return_exceptions=True)

    async def _pump(self, lines: Lines, *, events: bool) -> None:
        last = b""
        try:
            if lines.live:
                await self._pump_live(lines.source, events=events)
                if events:
                    last = f"retry: {DRAIN_RETRY_MS}\n".encode()
            else:
                async for chunk in lines.source:
                    await self._send(_format(chunk, events))
            end = EndLine(end=True) if lines.next is None else EndLine(next=lines.next)
            last += b"event: end\ndata: " + _encode(end) + b"\n\n" if events else _encode(end) + b"\n"
        except TidebookError as error:
            last = _problem(problem_of(error), events)
        except TimeoutError:
            raise
        except Exception:
            await self._send(_problem(internal_problem(), events), more=False)
            raise
        await self._send(last, more=False)

    async def _pump_live(self, source: AsyncIterator[Chunk], *, events: bool) -> None:
        """Send chunks as they come, and a comment when none came for a while, until the server drains."""
        draining = asyncio.ensure_future(self._draining.wait())
        pending: asyncio.Future[Chunk | None] | None = None
        try:
            while not draining.done():
                if pending is None:
                    pending = asyncio.ensure_future(_next(source))
                await asyncio.wait((pending, draining), timeout=self._keepalive_s, return_when=asyncio.FIRST_COMPLETED)
                if pending.done():
                    chunk, pending = pending.result(), None
                    if chunk is None:
                        return
                    await self._send(_format(chunk, events))
                elif not draining.done():
                    await self._send(b": \n\n" if events else b"\n")
        finally:
            draining.cancel()
            if pending is not None:
                pending.cancel()
                await asyncio.gather(pending, return_exceptions=True)


async def _next(source: AsyncIterator[Chunk]) -> Chunk | None:
    return await anext(source, None)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _format(chunk: Chunk, events: bool) -> bytes:
    if not events:
        return b"".join([part for _, line in chunk for part in (line, b"\n")])
    parts: list[bytes] = []
    for id, line in chunk:
        if id:
            parts += (b"id: ", id.encode(), b"\n")
        parts += (b"data: ", line, b"\n\n")
    return b"".join(parts)


def _problem(problem: dict[str, Any], events: bool) -> bytes:
    if events:
        return b"event: problem\ndata: " + _encode(problem) + b"\n\n"
    return _encode({"problem": problem}) + b"\n"
