"""The ASGI application: finds the route of a request, checks who sent it, decodes it, and sends the answer.

The path of an API request is short on purpose: no request object, no middleware, one pass over the headers.
Everything outside /v1 is a Starlette application, for pages.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import parse_qsl

import msgspec
from starlette.applications import Starlette

import tidebook
from tidebook.api.access import Role
from tidebook.api.errors import DeadlineExceeded, MethodNotAllowed, TooManyRequests, UnsupportedContent
from tidebook.api.openapi import document
from tidebook.api.problem import CONTENT_TYPE, internal_problem, problem_of
from tidebook.api.route import Route
from tidebook.api.routes import ROUTES
from tidebook.core.errors import InvalidInput, OutcomeUnknown, TidebookError, TooLarge
from tidebook.server import health, journals, outbox, pipeline, queues, tags, topics, wal
from tidebook.server.call import Call, Handler, Lines, Message, Receive, Reply, Send
from tidebook.server.headers import Headers
from tidebook.server.principal import LOCAL, Principal
from tidebook.server.router import Router
from tidebook.server.state import ServerState
from tidebook.server.streams import StreamSender, StreamSlots

logger = logging.getLogger("tidebook.server")

_JSON: Final = (b"content-type", b"application/json")
_NO_STORE: Final = (b"cache-control", b"no-store")
_NO_SNIFF: Final = (b"x-content-type-options", b"nosniff")
_encode = msgspec.json.Encoder().encode
_DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


async def _openapi(call: Call) -> dict[str, Any]:
    return document(tidebook.__version__)


HANDLERS: Final[dict[str, Handler]] = {
    "openapi.document": _openapi,
    **health.HANDLERS,
    **topics.HANDLERS,
    **journals.HANDLERS,
    **tags.HANDLERS,
    **queues.HANDLERS,
    **outbox.HANDLERS,
    **wal.HANDLERS,
    **pipeline.HANDLERS,
}


class Endpoint:
    """A route with its handler and its decoder."""

    __slots__ = ("decode", "handler", "is_public", "route", "scope_index", "start")

    def __init__(self, route: Route, handler: Handler) -> None:
        self.route = route
        self.handler = handler
        self.decode: Callable[[bytes], Any] | None = None
        if route.body is not None:
            self.decode = msgspec.json.Decoder(route.body).decode
        #: Which path parameter the prefix of a token must cover; None if there is none.
        scoped = route.scope in ("topic", "queue", "namespace")
        self.scope_index = route.parameters.index(route.scope) if scoped else None
        self.is_public = route.role is Role.PUBLIC
        status = 204 if route.form == "none" else route.status
        headers = [_NO_STORE] if route.form == "none" else [_JSON, _NO_STORE, _NO_SNIFF]
        self.start = {"type": "http.response.start", "status": status, "headers": headers}


class ServerApp:
    """The application of one server."""

    def __init__(self, state: ServerState, *, pages: Starlette | None = None) -> None:
        self.state = state
        self._pages = pages or Starlette()
        self._router = Router(
            (route, Endpoint(route, HANDLERS[route.name])) for route in ROUTES if route.name in HANDLERS
        )
        settings = state.settings
        self._slots = StreamSlots(settings.streams_max, settings.streams_per_token_max)

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            await self._pages(scope, receive, send)
            return
        started = False

        async def track(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            headers = Headers(scope["headers"])
            endpoint, parameters = self._router.find(scope["method"], scope["raw_path"])
            await self._serve(scope, headers, endpoint, parameters, receive, track)
        except TidebookError as error:
            if not started:
                await _send_problem(send, problem_of(error), _problem_headers(error))
        except Exception:
            logger.exception("%s %s failed", scope["method"], scope["path"])
            if not started:
                await _send_problem(send, internal_problem(), [])

    async def _serve(
        self,
        scope: dict[str, Any],
        headers: Headers,
        endpoint: Endpoint,
        parameters: list[str],
        receive: Receive,
        send: Send,
    ) -> None:
        principal = self._principal(headers)
        client = scope.get("client")
        call = Call(self.state, endpoint.route, parameters, headers, principal, client[0] if client else "")
        route = endpoint.route
        if route.query is not None or scope["query_string"]:
            call.query = _decode_query(route, scope["query_string"])
        deadline_s = self._deadline_s(headers)
        try:
            async with asyncio.timeout(deadline_s):
                if endpoint.decode is not None:
                    call.body = await self._body(endpoint, headers, receive)
                answer = await endpoint.handler(call)
        except TimeoutError as error:
            if route.mutates:
                raise OutcomeUnknown(
                    f"the request was cancelled after {deadline_s:g} s, and its change may have happened"
                ) from error
            raise DeadlineExceeded(
                f"the request was cancelled after {deadline_s:g} s: ask for less, or allow more with Request-Timeout",
                deadline_s=deadline_s,
            ) from error
        if isinstance(answer, Lines):
            await self._stream(call, answer, receive, send)
        elif isinstance(answer, Reply):
            start = {
                "type": "http.response.start",
                "status": answer.status,
                "headers": [_JSON, _NO_STORE, _NO_SNIFF, *answer.headers],
            }
            await send(start)
            await send({"type": "http.response.body", "body": b"" if answer.body is None else _encode(answer.body)})
        else:
            await send(endpoint.start)
            await send({"type": "http.response.body", "body": b"" if answer is None else _encode(answer)})

    def _principal(self, headers: Headers) -> Principal:
        return LOCAL

    def _deadline_s(self, headers: Headers) -> float:
        settings = self.state.settings
        if headers.request_timeout is None:
            return settings.request_s
        try:
            wanted = float(headers.request_timeout)
        except ValueError:
            wanted = 0.0
        if not 0 < wanted <= settings.request_s_max:  # also refuses NaN
            raise InvalidInput(
                f"Request-Timeout is a number of seconds up to {settings.request_s_max:g}, "
                f"not {headers.request_timeout[:40]!r}"
            )
        return wanted

    async def _body(self, endpoint: Endpoint, headers: Headers, receive: Receive) -> Any:
        limit = self.state.settings.body_bytes_max
        length = headers.content_length
        if length is not None and length.isdecimal() and int(length) > limit:
            raise TooLarge("the body", size_bytes=int(length), limit_bytes=limit)
        body = await _read_body(receive, limit)
        if not body and endpoint.route.body_optional:
            return None
        kind = (headers.content_type or "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise UnsupportedContent(f"send the body as application/json, not as {kind[:60] or 'an unnamed type'}")
        assert endpoint.decode is not None
        try:
            return endpoint.decode(body)
        except _DECODE_ERRORS as error:
            raise InvalidInput(f"the body is not valid: {error}") from error

    async def _stream(self, call: Call, lines: Lines, receive: Receive, send: Send) -> None:
        events = lines.events or "text/event-stream" in (call.headers.accept or "")
        settings, token = self.state.settings, call.principal.id
        self._slots.take(token)
        try:
            sender = StreamSender(
                receive, send, self.state.draining, send_s=settings.send_s, keepalive_s=settings.keepalive_s
            )
            await sender.run(lines, events=events, headers=[_NO_SNIFF])
        finally:
            self._slots.release(token)


async def _read_body(receive: Receive, limit: int) -> bytes:
    message = await receive()
    body: bytes = message.get("body", b"")
    if not message.get("more_body"):
        if len(body) > limit:
            raise TooLarge("the body", size_bytes=len(body), limit_bytes=limit)
        return body
    parts, size = [body], len(body)
    while message.get("more_body"):
        if size > limit:
            raise TooLarge("the body", size_bytes=size, limit_bytes=limit)
        message = await receive()
        if message["type"] == "http.disconnect":
            raise InvalidInput("the client disconnected before its body was complete")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
    if size > limit:
        raise TooLarge("the body", size_bytes=size, limit_bytes=limit)
    return b"".join(parts)


def _decode_query(route: Route, raw: bytes) -> Any:
    try:
        pairs = parse_qsl(raw.decode(), keep_blank_values=True, errors="strict", max_num_fields=50)
    except ValueError as error:  # also an invalid escape
        raise InvalidInput(f"the query string is not valid: {error}") from error
    if route.query is None:
        if pairs:
            raise InvalidInput(f"{route.name} takes no query parameters: leave {pairs[0][0][:40]!r} out")
        return None
    given = dict(pairs)
    if len(given) < len(pairs):
        raise InvalidInput("a query parameter was given twice: give it once")
    try:
        return msgspec.convert(given, route.query, strict=False)
    except _DECODE_ERRORS as error:
        raise InvalidInput(f"the query string is not valid: {error}") from error


def _problem_headers(error: TidebookError) -> list[tuple[bytes, bytes]]:
    match error:
        case MethodNotAllowed():
            return [(b"allow", ", ".join(error.allowed).encode())]
        case TooManyRequests():
            return [(b"retry-after", str(max(1, round(error.retry_after_s))).encode())]
        case _:
            return []


async def _send_problem(send: Send, problem: dict[str, Any], headers: list[tuple[bytes, bytes]]) -> None:
    sent = [(b"content-type", CONTENT_TYPE.encode()), _NO_STORE, _NO_SNIFF, *headers]
    await send({"type": "http.response.start", "status": problem["status"], "headers": sent})
    await send({"type": "http.response.body", "body": _encode(problem)})
