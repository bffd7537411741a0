"""Uvicorn's protocol with bounds: on the size of a request's head, and on the time that a client takes to send one.

Uvicorn bounds neither: a client that sends a head without end, or trailers after a chunked body, would fill the memory,
and one that never completes its head would keep its connection forever.

`take_body` and `send_response` are short paths past ASGI's messages, for a body that has arrived and a response that is
complete; they do nothing under another server.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Final

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from tidebook.api.problem import CONTENT_TYPE, problem_of
from tidebook.core.errors import InvalidInput, TidebookError, TooLarge
from tidebook.server.responses import Receive, Send

#: The bytes of a request line and its headers, and of what a client may send between two parts of a body or after it.
HEAD_BYTES_MAX: Final = 65_536
#: How long a client may take to send a head, or the rest of a request that has already been answered.
SENDING_S_MAX = 30.0

_encode = msgspec.json.Encoder().encode
_NO_TRAILERS: Final[Any] = deque(maxlen=0)
_BODY_HEADERS: Final = (b"content-length", b"transfer-encoding")


def take_body(receive: Receive) -> bytes | None:
    """Return the body of a request if all of it has arrived, as `receive` would; None if `receive` must be awaited."""
    cycle = getattr(receive, "__self__", None)
    if type(cycle) is not RequestResponseCycle or cycle.more_body or cycle.disconnected:
        return None
    body, cycle.body = bytes(cycle.body), bytearray()
    cycle.flow.resume_reading()
    cycle.message_event.clear()  # from now on `receive` waits until the client disconnects
    return body


def send_response(send: Send, status: int, head: bytes, body: bytes) -> bool:
    """Send a complete response with one write, as `send` would; return False if `send` must be awaited.

    `head` are valid header lines, which are not checked; they contain the length of a body that is not empty.
    """
    cycle = getattr(send, "__self__", None)
    if (
        type(cycle) is not RequestResponseCycle
        or cycle.response_started
        or cycle.disconnected
        or cycle.flow.write_paused
        or not cycle.keep_alive
        or cycle.scope["method"] == "HEAD"
    ):
        return False
    cycle.response_started = cycle.response_complete = True
    cycle.waiting_for_100_continue = False
    server_lines = b"".join([b"%b: %b\r\n" % line for line in cycle.default_headers])
    cycle.transport.write(b"%b%b%b\r\n%b" % (STATUS_LINE[status], server_lines, head, body))
    cycle.message_event.set()
    cycle.on_response()
    return True


class UnsentBytes:
    """The bytes of answers that a client has not accepted yet; they remain also if the connection is closed."""

    def __init__(self) -> None:
        self._bytes = 0
        self._since_s = 0.0

    def stuck_s(self, now_s: float, count: int) -> float:
        """Return for how many seconds the client has accepted nothing; call this regularly."""
        if not count or count != self._bytes:
            self._bytes, self._since_s = count, now_s
        return now_s - self._since_s


class BoundedProtocol(HttpToolsProtocol):
    """One connection; `close_if_late` must be called about every second."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        #: The bytes since the request began that were not body, and those of the current call.
        self._head_bytes = 0
        self._data_bytes = 0
        #: Whether a request is expected or was begun, and since when; a new connection expects one.
        self._in_message = True
        self._since_s = 0.0
        self._unsent = UnsentBytes()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        self._since_s = self.loop.time()
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Parse a part of a request, and refuse a head that is too large, or trailers that are."""
        self._data_bytes = len(data)
        HttpToolsProtocol.data_received(self, data)
        if self._in_message:
            self._head_bytes += self._data_bytes
            if self._head_bytes > HEAD_BYTES_MAX and not self.transport.is_closing():
                error = TooLarge("the head of the request", size_bytes=self._head_bytes, limit_bytes=HEAD_BYTES_MAX)
                self._refuse(error, 413)

    def on_message_begin(self) -> None:
        """Begin to count the head of a request."""
        self._in_message = True
        self._head_bytes = 0
        self._since_s = self.loop.time()
        HttpToolsProtocol.on_message_begin(self)

    def on_headers_complete(self) -> None:
        """Start the request; headers that are collected from now on are trailers, which nothing reads."""
        if self.parser.should_upgrade():
            self._refuse_upgrade()
        HttpToolsProtocol.on_headers_complete(self)
        self.headers = _NO_TRAILERS

    def _refuse_upgrade(self) -> None:
        """Refuse a request that has a body and asks for another protocol; without a body, the Upgrade is ignored.

        The parser takes what follows the head for the other protocol, and later for the next request: the server would
        execute a body that a proxy has forwarded.
        """
        if any(name in _BODY_HEADERS for name, _ in self.headers):
            error = InvalidInput("this server speaks HTTP/1.1 only: leave Upgrade out of requests with a body")
            self._refuse(error, 400)
            raise error

    def on_body(self, body: bytes) -> None:
        """Take a part of the body, and restart the count of bytes that are not body."""
        self._head_bytes = -self._data_bytes
        HttpToolsProtocol.on_body(self, body)

    def on_message_complete(self) -> None:
        """Note that the client has sent the complete request."""
        self._in_message = False
        HttpToolsProtocol.on_message_complete(self)

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP with a problem."""
        self._refuse(InvalidInput("this is not a valid HTTP/1.1 request"), 400)

    def close_if_late(self, now_s: float, send_s: float) -> None:
        """Close the connection if the client sends too slowly, or accepts nothing for `send_s` seconds.

        A request that is being answered has a deadline.
        """
        is_sending_late = self._in_message and now_s - self._since_s > SENDING_S_MAX and not self._is_answering
        # While more is written, the number of unsent bytes says nothing; the sender has a time limit.
        is_writing = self._is_answering and not self.flow.write_paused and not self.transport.is_closing()
        stuck_s = self._unsent.stuck_s(now_s, 0 if is_writing else self.transport.get_write_buffer_size())
        if is_sending_late or stuck_s > send_s:
            self.transport.abort()

    @property
    def _is_answering(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle  # there is none before the first request
        return cycle is not None and not cycle.response_complete

    def _refuse(self, error: TidebookError, status: int) -> None:
        if self.transport.is_closing():  # it was refused before
            return
        if self._is_answering:  # a second response would be mistaken for a part of the first
            self.transport.abort()
            return
        body = _encode(problem_of(error))
        head = f"HTTP/1.1 {status} \r\ncontent-type: {CONTENT_TYPE}\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(f"{head}connection: close\r\n\r\n".encode() + body)
        self.transport.close()
