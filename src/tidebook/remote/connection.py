"""The connection of a remote book: requests named as in the route table, retries, and errors of the usual classes.

A request without a response is repeated for a while, so that callers do not notice a restart of the server. Reads
change nothing; the server recognizes a repeated write by its `Idempotency-Key`, and an append to one journal by its
append id.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from datetime import datetime
from typing import Any, Final, NamedTuple
from urllib.parse import quote, urlsplit

import httpx
import msgspec

from tidebook.api.errors import SignInRequired
from tidebook.api.journals import EndLine
from tidebook.api.problem import error_of
from tidebook.api.route import Route
from tidebook.api.routes import BY_NAME
from tidebook.core.errors import InvalidInput, OutcomeUnknown, TidebookError, Unavailable
from tidebook.runtime.backoff import Backoff
from tidebook.runtime.process import generation, refuse_fork
from tidebook.runtime.secret import Secret

#: How long a request may take, in addition to the time that a claim waits for work.
REQUEST_S: Final = 60.0
CONNECT_S: Final = 5.0
#: How long a request without a response is repeated before its error is raised.
RETRY_S: Final = 30.0
RETRY_FIRST_S: Final = 0.05
RETRY_MAX_S: Final = 2.0
#: A live stream that receives nothing, not even a keep-alive, is opened again after this time.
SILENCE_S: Final = 60.0
CONNECTIONS_MAX: Final = 1_000
#: The statuses by which a gateway reports that the server has not responded; it may have received the request.
GATEWAY_STATUSES: Final = (502, 504)
#: The response to a request that failed unexpectedly.
FAILED_STATUS: Final = 500
#: The maximum length of one line of a streamed response.
LINE_BYTES_MAX: Final = 64 * 1024 * 1024

#: The possible beginnings of the last line of a streamed response.
ENDS: Final = (b'{"end":', b'{"next":', b'{"problem":')

_PARAMETER = re.compile(r"\{\w+\}")
_TOKEN = re.compile(r"[!-~]+")
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode
_decode_end = msgspec.json.Decoder(EndLine).decode


class ServerEvent(NamedTuple):
    """One server-sent event: its id and its data."""

    id: str
    data: bytes


class Connection:
    """Sends requests to one server; it belongs to one event loop and one process."""

    def __init__(
        self, url: str, *, token: str | None = None, tls_ca: str | None = None, retry_s: float = RETRY_S
    ) -> None:
        self.url = _checked_url(url)
        self._token = None if token is None else Secret(_checked_token(token))
        self._tls_ca = tls_ca
        self._retry_s = retry_s
        self._client: httpx.AsyncClient | None = None
        #: Whether the server has ever answered; until then, a failure to connect is not retried.
        self._answered = False
        self._generation = generation()

    async def open(self) -> None:
        """Prepare the client; the first request connects."""
        headers = {"accept": "application/json", "user-agent": "tidebook"}
        if self._token is not None:
            headers["authorization"] = f"Bearer {self._token.reveal()}"
        verify: ssl.SSLContext | bool = self.url.startswith("https:")  # loading the certificates takes a while
        if self._tls_ca is not None:
            try:
                verify = ssl.create_default_context(cafile=self._tls_ca)
            except (OSError, ssl.SSLError) as error:
                raise InvalidInput(f"the certificates in {self._tls_ca} cannot be read: {error}") from error
        self._client = httpx.AsyncClient(
            base_url=self.url,
            headers=headers,
            verify=verify,
            timeout=httpx.Timeout(REQUEST_S, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=CONNECTIONS_MAX, max_keepalive_connections=CONNECTIONS_MAX),
            trust_env=False,
        )
        self._generation = generation()

    async def close(self) -> None:
        """Close all connections."""
        client, self._client = self._client, None
        if client is not None and self._generation == generation():
            await client.aclose()

    @property
    def forked(self) -> bool:
        """Whether the connection was opened in a parent of this process."""
        return self._client is not None and self._generation != generation()

    def _opened(self) -> httpx.AsyncClient:
        refuse_fork(self._generation, "the book")
        if self._client is None:
            raise InvalidInput("the book is not open: use it as 'async with tidebook.open(...) as book'")
        return self._client

    async def call(
        self,
        name: str,
        *parameters: object,
        query: Mapping[str, object] | None = None,
        body: msgspec.Struct | None = None,
        wait_s: float = 0.0,
        trace: str | None = None,
    ) -> Any:
        """Send a request and return its decoded response; None for a response without a body.

        `trace` is the trace context that the server continues. Raise the error that the server returns; `Unavailable`
        if it cannot be reached; and `OutcomeUnknown` if a write was sent without a response.
        """
        route = BY_NAME[name]
        key = uuid.uuid4().hex if route.mutates else None
        path = _path(route, parameters)
        request = self._request(route, path, query=query, body=body, wait_s=wait_s, key=key, trace=trace)
        content = await self._send(request, route)
        if not content:
            return None
        return _decode(content) if route.response is None else msgspec.json.decode(content, type=route.response)

    async def ask(self, name: str) -> Any:
        """Send a request without parameters once; return its response whatever the status. Raise as `call` does."""
        route = BY_NAME[name]
        try:
            response = await self._opened().send(self._request(route, route.path))
        except httpx.HTTPError as error:
            raise _without_retry(self._failure(error, route)) from error
        try:
            return msgspec.json.decode(response.content, type=route.response)
        except msgspec.DecodeError:
            raise self._refusal(response, response.content) from None

    async def send_once(self, name: str, *parameters: object, body: msgspec.Struct, trace: str | None = None) -> Any:
        """Send a write without repeating it, because the caller does so itself. Raise as `call` does."""
        route = BY_NAME[name]
        request = self._request(route, _path(route, parameters), body=body, trace=trace)
        content = await self._attempt(request, route)
        return msgspec.json.decode(content, type=route.response)

    def _request(
        self,
        route: Route,
        path: str,
        *,
        query: Mapping[str, object] | None = None,
        body: msgspec.Struct | None = None,
        wait_s: float = 0.0,
        key: str | None = None,
        trace: str | None = None,
    ) -> httpx.Request:
        headers = {} if key is None else {"idempotency-key": key}
        if trace is not None:
            headers["traceparent"] = trace
        content = None
        if body is not None:
            headers["content-type"] = "application/json"
            content = _encode(body)
        timeout = httpx.Timeout(REQUEST_S + wait_s, connect=CONNECT_S)
        return self._opened().build_request(
            route.method, path, params=_query(query), content=content, headers=headers, timeout=timeout
        )

    async def _send(self, request: httpx.Request, route: Route) -> bytes:
        backoff, deadline_s = Backoff(first_s=RETRY_FIRST_S, max_s=RETRY_MAX_S), time.monotonic() + self._retry_s
        sent = False
        reason: RetryLater | NoResponse
        while True:
            try:
                return await self._attempt(request, route)
            except OutcomeUnknown as error:
                if not isinstance(error, NoResponse):
                    raise
                sent, reason = True, error
            except RetryLater as error:
                reason = error
            except Unavailable as error:
                if sent:  # by an attempt before this one
                    raise OutcomeUnknown(f"{error}: whether the request took effect is unknown") from error
                raise
            pause_s = max(backoff.next_s(), reason.retry_after_s)
            if time.monotonic() + pause_s > deadline_s:
                if sent:
                    raise OutcomeUnknown(f"{reason}: whether the request took effect is unknown") from reason
                raise _without_retry(reason)
            await asyncio.sleep(pause_s)

    async def _attempt(self, request: httpx.Request, route: Route) -> bytes:
        """Send a request once; raise `RetryLater` if nothing was changed and a retry may succeed."""
        try:
            response = await self._opened().send(request)
        except httpx.HTTPError as error:
            raise self._failure(error, route) from error
        self._answered = True
        if response.is_success:
            return response.content
        refusal = self._refusal(response, response.content)
        if type(refusal) is Unavailable and route.mutates:
            if response.status_code in GATEWAY_STATUSES:
                raise NoResponse(str(refusal))  # a gateway may have forwarded the request
            if response.status_code == FAILED_STATUS:
                raise OutcomeUnknown(str(refusal))
        raise refusal

    def _failure(self, error: httpx.HTTPError, route: Route) -> TidebookError:
        """Return the error of a request without a response."""
        text = f"{self.url} does not answer: {str(error) or type(error).__name__}"
        if isinstance(error, httpx.ConnectError) and isinstance(_root_cause(error), ssl.SSLCertVerificationError):
            remedy = "pass the file of its authority as tls_ca=, or to a command in TIDEBOOK_TLS_CA"
            return Unavailable(f"{text}: its certificate is not trusted; {remedy}")
        if isinstance(error, httpx.ConnectError) and not self._answered:
            return Unavailable(f"{text}: check the address, and that 'tidebook serve' runs there")
        never_sent = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)
        return RetryLater(text) if never_sent or not route.mutates else NoResponse(text)

    def _refusal(self, response: httpx.Response, content: bytes) -> TidebookError:
        """Return the error that a response describes."""
        try:
            problem = _decode(content)
        except msgspec.DecodeError:
            problem = None
        if not isinstance(problem, dict) or "type" not in problem:
            return Unavailable(f"{self.url} responds with {response.status_code}: it may not be a Tidebook server")
        error = error_of(problem)
        if isinstance(error, SignInRequired) and self._token is None:
            return SignInRequired(f"{self.url} needs a token: pass it as token=, or to a command in TIDEBOOK_TOKEN")
        retry_after = response.headers.get("retry-after", "")
        if isinstance(error, Unavailable) and retry_after.replace(".", "", 1).isdigit():
            return RetryLater(str(error), retry_after_s=float(retry_after), cause=error)
        return error

    @asynccontextmanager
    async def _stream(self, request: httpx.Request, route: Route) -> AsyncIterator[httpx.Response]:
        try:
            response = await self._opened().send(request, stream=True)
        except httpx.HTTPError as error:
            raise self._failure(error, route) from error
        self._answered = True
        try:
            if not response.is_success:
                raise self._refusal(response, await response.aread())
            yield response
        finally:
            await response.aclose()

    async def lines(
        self, name: str, *parameters: object, query: Mapping[str, object] | None = None
    ) -> AsyncGenerator[bytes, None]:
        """Yield the lines of a streamed response without the last one; lines that arrived together are one block.

        Raise the error with which the response ends. If the connection breaks before the first line, the request is
        repeated; later, `Unavailable` is raised, since a second read could be as of another moment.
        """
        route = BY_NAME[name]
        path = _path(route, parameters)
        backoff, deadline_s = Backoff(first_s=RETRY_FIRST_S, max_s=RETRY_MAX_S), time.monotonic() + self._retry_s
        while True:
            has_yielded = False
            try:
                request = self._request(route, path, query=query)
                request.headers["accept"] = "application/x-ndjson"
                async with self._stream(request, route) as response, aclosing(_split_lines(response)) as pages:
                    async for page in pages:
                        start = page.rfind(b"\n", 0, -1) + 1  # of the last line
                        if not page.startswith(ENDS, start):
                            has_yielded = True
                            yield page
                            continue
                        if start:
                            has_yielded = True
                            yield page[:start]
                        end = _decode_end(page[start:])
                        if end.problem is not None:
                            raise error_of(end.problem)
                        return
                raise RetryLater(f"{self.url} ended a response early")
            except httpx.HTTPError as error:
                failure: TidebookError = self._failure(error, route)
                if has_yielded or not isinstance(failure, RetryLater):
                    raise Unavailable(f"{self.url} ended a response early: {error}") from error
            except RetryLater as error:
                failure = error
                if has_yielded:
                    raise Unavailable(str(error)) from error
            pause_s = backoff.next_s()
            if time.monotonic() + pause_s > deadline_s:
                raise _without_retry(failure)
            await asyncio.sleep(pause_s)

    async def events(
        self, name: str, *parameters: object, query: Mapping[str, object], after: str | None = None
    ) -> AsyncGenerator[ServerEvent | None, None]:
        """Yield the events of a live stream; whenever it ends, reopen it after the last event.

        Yield None when the stream is opened after an event, or after a failure. Raise the error with which the server
        ends the stream.
        """
        route = BY_NAME[name]
        path = _path(route, parameters)
        backoff = Backoff(first_s=RETRY_FIRST_S, max_s=RETRY_MAX_S)
        failing_since_s: float | None = None
        while True:
            request = self._request(route, path, query=query)
            request.headers["accept"] = "text/event-stream"
            request.extensions["timeout"] = httpx.Timeout(SILENCE_S, connect=CONNECT_S).as_dict()
            if after is not None:
                request.headers["last-event-id"] = after
            try:
                async with self._stream(request, route) as response, aclosing(_split_events(response)) as events:
                    if failing_since_s is not None or after is not None:
                        yield None
                    failing_since_s = None
                    async for kind, event in events:
                        if kind == "problem":
                            raise error_of(_decode(event.data))
                        if kind == "end":
                            break
                        backoff.reset()
                        after = event.id or after
                        yield event
            except (httpx.HTTPError, RetryLater) as error:
                now_s = time.monotonic()
                failing_since_s = failing_since_s or now_s
                if now_s - failing_since_s > self._retry_s:
                    raise Unavailable(f"{self.url} does not answer: {error}") from error
            await asyncio.sleep(backoff.next_s())


class RetryLater(Unavailable):
    """Nothing was changed, and the same request may succeed after `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: float = 0.0, cause: TidebookError | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.cause = cause


class NoResponse(OutcomeUnknown):
    """A write was sent, and there was no response."""

    retry_after_s = 0.0


def _without_retry(error: TidebookError) -> TidebookError:
    """Return the error that a caller sees once a request is no longer repeated."""
    return (error.cause or Unavailable(str(error))) if isinstance(error, RetryLater) else error


def _checked_url(url: str) -> str:
    """Return the address of a server; an error does not quote an invalid one, since it may contain a password."""
    try:
        parts = urlsplit(url)
        httpx.URL(url)
        has_more = parts.username or parts.password or parts.query or parts.fragment
        is_valid = parts.hostname and parts.port != 0 and not has_more  # a port that is no number raises ValueError
    except (ValueError, httpx.InvalidURL):
        is_valid = False
    if not is_valid:
        raise InvalidInput("the address of a server is https://host:port, and its token a separate argument")
    return url.rstrip("/")


def _checked_token(token: str) -> str:
    if type(token) is not str or not _TOKEN.fullmatch(token):
        raise InvalidInput(
            "a token consists of printable ASCII characters without spaces: pass it as 'tidebook token create' "
            "printed it, without the end of the line"
        )
    return token


def _path(route: Route, parameters: tuple[object, ...]) -> str:
    given = iter(parameters)
    return _PARAMETER.sub(lambda _: _segment(str(next(given))), route.path)


def _segment(text: str) -> str:
    """Return a parameter as a segment of a path; "." and ".." have another meaning there unless they are encoded."""
    return "%2E" * len(text) if text in (".", "..") else quote(text, safe="")


def _query(query: Mapping[str, object] | None) -> dict[str, str]:
    return {name: _query_text(value) for name, value in (query or {}).items() if value is not None}


def _query_text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value.isoformat() if isinstance(value, datetime) else str(value)


async def _split_lines(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    """Yield the complete lines of each chunk of a response; a server sends an empty line to keep a connection alive."""
    parts: list[bytes] = []
    size = 0
    async for chunk in response.aiter_bytes():
        cut = chunk.rfind(b"\n") + 1
        if not cut:
            parts.append(chunk)
            size += len(chunk)
        else:
            block = b"".join((*parts, chunk[:cut])) if parts else chunk[:cut]
            parts, size = [chunk[cut:]], len(chunk) - cut
            if block := block.lstrip(b"\n"):
                yield block
        if size > LINE_BYTES_MAX:
            raise Unavailable(f"a line of the server's response takes more than {LINE_BYTES_MAX:,} bytes")


async def _split_events(response: httpx.Response) -> AsyncGenerator[tuple[str, ServerEvent], None]:
    """Yield the kind and the content of each server-sent event; comments and retry hints are skipped."""
    kind, id, data = "message", "", list[bytes]()
    rest = b""
    async for chunk in response.aiter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            name, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if not line:
                if data or kind != "message":
                    yield kind, ServerEvent(id, b"\n".join(data))
                kind, data = "message", []
            elif name == b"data":
                data.append(value)
            elif name == b"id":
                id = value.decode()
            elif name == b"event":
                kind = value.decode()


def _root_cause(error: BaseException) -> BaseException:
    cause: BaseException | None = error
    while cause is not None:
        error = cause
        cause = error.__cause__ or error.__context__
    return error
