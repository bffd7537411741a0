"""Send streamed responses as NDJSON or as server-sent events, at the pace of the client.

Nothing is buffered here: a chunk is read only after the client has accepted the previous one, and a client that does
not accept one in time is disconnected. A live stream ends with a retry hint when the server drains.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec

from tidebook.api.errors import DeadlineExceeded, SignInRequired, TooManyRequests
from tidebook.api.journals import EndLine
from tidebook.api.problem import internal_problem, problem_of
from tidebook.core.errors import TidebookError
from tidebook.server.browser_sessions import BrowserSession
from tidebook.server.responses import Chunk, Lines, Receive, Send

NDJSON: Final = b"application/x-ndjson"
EVENT_STREAM: Final = b"text/event-stream"
#: How long a client waits before it connects again, in milliseconds, at the start of a stream and when a server drains.
RETRY_MS, DRAIN_RETRY_MS = 2_000, 500

#: Returns whether a stream that the token of this id, or one of its sessions, has opened may stay open.
IsCurrent = Callable[[str, BrowserSession | None], bool]
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
            holder = "the server" if self.open >= self._max else "this token"
            raise TooManyRequests(f"{holder} has too many open streams: close some of them", retry_after_s=5.0)
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


class LiveStreams:
    """The open live streams: keeps all of them alive, and ends them when the server drains."""

    def __init__(self, *, send_s: float, keepalive_s: float) -> None:
        self._send_s = send_s
        self._keepalive_s = keepalive_s
        self._streams: set[LiveStream] = set()
        self._draining = False

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, send: Send, *, token: str, session: BrowserSession | None, events: bool) -> LiveStream:
        """Register a new stream, which the token of this id, or one of its sessions, has opened."""
        stream = LiveStream(send, self._send_s, token=token, session=session, events=events)
        self._streams.add(stream)
        if self._draining:  # a client whose stream was ended may ask again on the same connection
            stream.end()
        return stream

    def close(self, stream: LiveStream) -> None:
        """Forget a stream."""
        self._streams.discard(stream)

    def keep_alive(self) -> None:
        """Send a comment to each stream that has sent nothing for a while; call this about every second."""
        before_s = time.monotonic() - self._keepalive_s
        for stream in list(self._streams):
            if stream.sent_s < before_s:
                stream.send_comment()

    def end_unless(self, is_current: IsCurrent) -> None:
        """End the streams of tokens and sessions that are no longer valid; call this about every second."""
        ended = {opener for opener in {stream.opener for stream in self._streams} if not is_current(*opener)}
        for stream in [stream for stream in self._streams if stream.opener in ended]:
            stream.end()

    def end_all(self) -> None:
        """End all streams with a retry hint, and those that are opened from now on."""
        self._draining = True
        for stream in list(self._streams):
            stream.end()


class LiveStream:
    """Sends the chunks of one live stream; a comment may be sent between any two of them."""

    def __init__(self, send: Send, send_s: float, *, token: str, session: BrowserSession | None, events: bool) -> None:
        self.opener = (token, session)
        self._send_raw = send
        self._send_s = send_s
        self._events = events
        self.sent_s = time.monotonic()
        self._pump: asyncio.Task[None] | None = None
        self._ending = False
        self._comments: set[asyncio.Task[None]] = set()

    async def send(self, body: bytes, *, more: bool = True) -> None:
        """Send a part of the response; raise `TimeoutError` if the client does not accept it in time."""
        async with asyncio.timeout(self._send_s):
            await self._send_raw({"type": "http.response.body", "body": body, "more_body": more})
        self.sent_s = time.monotonic()

    def send_comment(self) -> None:
        """Send a comment in the background, unless one is still being sent."""
        if not self._comments and not self._ending:
            task = asyncio.ensure_future(self._comment())
            self._comments.add(task)
            task.add_done_callback(self._comments.discard)

    async def _comment(self) -> None:
        try:
            await self.send(b": \n\n" if self._events else b"\n")
        except (TimeoutError, OSError):
            if self._pump is not None:
                self._pump.cancel()

    def end(self) -> None:
        """Make `pump` end the stream with a retry hint."""
        self._ending = True
        if self._pump is not None:
            self._pump.cancel()

    async def pump(self, lines: Lines) -> None:
        """Send chunks as they come, until the source fails or the stream must end."""
        self._pump = asyncio.current_task()
        last = b""
        try:
            if not self._ending:
                async for chunk in lines.source:
                    await self.send(format_chunk(chunk, self._events))
        except TidebookError as error:
            last = format_problem(problem_of(error), self._events)
        except asyncio.CancelledError:
            if not self._ending:
                raise
        if not last:
            hint = f"retry: {DRAIN_RETRY_MS}\n".encode() if self._events else b""
            last = hint + format_end(EndLine(end=True), self._events)
        await self.send(last, more=False)


class StreamSender:
    """Sends one streamed response."""

    def __init__(
        self,
        receive: Receive,
        send: Send,
        live: LiveStreams,
        is_current: IsCurrent,
        *,
        token: str,
        session: BrowserSession | None,
        send_s: float,
        deadline_s: float,
    ) -> None:
        self._token = token
        self._session = session
        self._receive = receive
        self._send_raw = send
        self._live = live
        self._is_current = is_current
        self._send_s = send_s
        self._deadline_s = deadline_s

    async def run(self, lines: Lines, *, events: bool, headers: list[tuple[bytes, bytes]]) -> None:
        """Send all chunks; return when the source ends, the client disconnects, or the server drains a live stream.

        The first chunk of a stream that is not live is read before the headers are sent, so that an error at the start
        has its own status.
        """
        try:
            first: Chunk | None = None
            if not lines.live:
                first = await self._read(lines)
            await self._start(events, headers)
            pump = self._pump_live(lines, events=events) if lines.live else self._pump(lines, first, events=events)
            pumping = asyncio.ensure_future(pump)
            disconnection = asyncio.ensure_future(disconnected(self._receive))
            try:
                await asyncio.wait((pumping, disconnection), return_when=asyncio.FIRST_COMPLETED)
            finally:
                disconnection.cancel()
                pumping.cancel()
                await asyncio.gather(disconnection, pumping, return_exceptions=True)
            if not pumping.cancelled() and (error := pumping.exception()) is not None:
                raise error
        finally:
            await lines.source.aclose()

    async def _read(self, lines: Lines) -> Chunk | None:
        try:
            async with asyncio.timeout(self._deadline_s):
                return await anext(lines.source, None)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"no event could be read within {self._deadline_s:g} s: try again", deadline_s=self._deadline_s
            ) from error

    async def _start(self, events: bool, headers: list[tuple[bytes, bytes]]) -> None:
        kind = EVENT_STREAM if events else NDJSON
        sent = [(b"content-type", kind), (b"cache-control", b"no-store"), (b"x-accel-buffering", b"no"), *headers]
        await self._send_raw({"type": "http.response.start", "status": 200, "headers": sent})
        if events:
            await self._send(f"retry: {RETRY_MS}\n\n".encode())

    async def _send(self, body: bytes, *, more: bool = True) -> None:
        async with asyncio.timeout(self._send_s):
            await self._send_raw({"type": "http.response.body", "body": body, "more_body": more})

    async def _pump(self, lines: Lines, chunk: Chunk | None, *, events: bool) -> None:
        try:
            while chunk is not None:
                await self._send(format_chunk(chunk, events))
                chunk = await self._read(lines)
                if not self._is_current(self._token, self._session):
                    raise SignInRequired("the token was revoked or has expired during the answer")
            end = EndLine(end=True) if lines.next is None else EndLine(next=lines.next)
            last = format_end(end, events)
        except TidebookError as error:
            last = format_problem(problem_of(error), events)
        except TimeoutError:
            raise
        except Exception:
            await self._send(format_problem(internal_problem(), events), more=False)
            raise
        await self._send(last, more=False)

    async def _pump_live(self, lines: Lines, *, events: bool) -> None:
        stream = self._live.open(self._send_raw, token=self._token, session=self._session, events=events)
        try:
            await stream.pump(lines)
        finally:
            self._live.close(stream)


async def disconnected(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


def format_chunk(chunk: Chunk, events: bool) -> bytes:
    """Return lines of NDJSON, or server-sent events."""
    if isinstance(chunk, bytes):
        return chunk
    if not events:
        return b"\n".join([line for _, line in chunk]) + b"\n"
    parts: list[bytes] = []
    for id, line in chunk:
        if id:
            parts += (b"id: ", id.encode(), b"\n")
        parts += (b"data: ", line, b"\n\n")
    return b"".join(parts)


def format_end(end: EndLine, events: bool) -> bytes:
    """Return the last line of a stream that was not interrupted."""
    return b"event: end\ndata: " + _encode(end) + b"\n\n" if events else _encode(end) + b"\n"


def format_problem(problem: dict[str, Any], events: bool) -> bytes:
    """Return the last line of a stream that a problem has ended."""
    if events:
        return b"event: problem\ndata: " + _encode(problem) + b"\n\n"
    return _encode({"problem": problem}) + b"\n"
