"""The ASGI application: finds the route of a request, checks who sent it, decodes it, and sends the response.

The path of an API request is short on purpose: no request object, no middleware, one pass over the headers.
Everything outside /v1, except /metrics, is a Starlette application, for pages.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, Final
from urllib.parse import parse_qsl

import msgspec
from starlette.applications import Starlette

import tidebook
from tidebook.api.errors import (
    DeadlineExceeded,
    MethodNotAllowed,
    SignInRequired,
    TooManyConnections,
    TooManyRequests,
    UnsupportedContent,
)
from tidebook.api.openapi import document
from tidebook.api.problem import CONTENT_TYPE, internal_problem, problem_of
from tidebook.api.route import Route
from tidebook.api.routes import BY_NAME, ROUTES
from tidebook.core.errors import InvalidInput, NotFound, OutcomeUnknown, TidebookError, TooLarge, Unavailable
from tidebook.runtime import tracing
from tidebook.server import (
    access,
    appends,
    health,
    journals,
    monitoring,
    outbox,
    pipeline,
    queues,
    snapshots,
    tags,
    topics,
    wal,
)
from tidebook.server.call import Call, Handler
from tidebook.server.headers import Headers
from tidebook.server.idempotency import EncodedResponse, check_key
from tidebook.server.principal import ANONYMOUS
from tidebook.server.protocol import send_response, take_body
from tidebook.server.responses import Lines, Message, Receive, Reply, Send, Text
from tidebook.server.router import Router
from tidebook.server.state import ServerState
from tidebook.server.streams import StreamSender

logger = logging.getLogger("tidebook.server")

_JSON: Final = b"application/json"
_PROBLEM: Final = CONTENT_TYPE.encode()
METRICS_PATH: Final = BY_NAME["monitoring.metrics"].path
#: The label of requests that have no route.
NO_ROUTE: Final = "none"
_NO_STORE: Final = (b"cache-control", b"no-store")
_NO_SNIFF: Final = (b"x-content-type-options", b"nosniff")
#: The header lines of a response with JSON of a given size, and of one without a body.
_JSON_HEAD: Final = (
    b"content-type: application/json\r\ncache-control: no-store\r\nx-content-type-options: nosniff\r\n"
    b"content-length: %d\r\n"
)
_NO_CONTENT_HEAD: Final = b"cache-control: no-store\r\n"
_REPLAYED: Final = (b"idempotency-replayed", b"true")
_encode = msgspec.json.Encoder().encode
_DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
#: Appends, which the journal itself recognizes by the append id that is derived from their key.
_NATIVE_KEYS: Final = frozenset({"journals.append", "journals.append_batch"})


async def _openapi(call: Call) -> dict[str, Any]:
    return document(tidebook.__version__)


HANDLERS: Final[dict[str, Handler]] = {
    "openapi.document": _openapi,
    **health.HANDLERS,
    **monitoring.HANDLERS,
    **topics.HANDLERS,
    **journals.HANDLERS,
    **appends.HANDLERS,
    **snapshots.HANDLERS,
    **tags.HANDLERS,
    **queues.HANDLERS,
    **outbox.HANDLERS,
    **wal.HANDLERS,
    **pipeline.HANDLERS,
    **access.HANDLERS,
}


class Endpoint:
    """A route with its handler and its decoder."""

    __slots__ = ("decode", "handler", "name_index", "native_key", "route", "unmasks")

    def __init__(self, route: Route, handler: Handler) -> None:
        self.route = route
        self.handler = handler
        self.decode: Callable[[bytes], Any] | None = None
        if route.body is not None:
            self.decode = msgspec.json.Decoder(route.body).decode
        #: The path parameter that a token's prefix must cover; None if there is none.
        self.name_index = route.parameters.index(route.scope) if route.scope in route.parameters else None
        self.native_key = route.name in _NATIVE_KEYS
        self.unmasks = route.query is not None and "unmask" in route.query.__struct_fields__


class Exchange:
    """One request and its response: counts the response when it begins."""

    __slots__ = ("_app", "_received_s", "raw_send", "route", "started")

    def __init__(self, app: ServerApp, send: Send) -> None:
        self._app = app
        self._received_s = time.perf_counter()
        self.raw_send = send
        self.route = NO_ROUTE
        #: Whether a part of the response was sent: then its status can no longer be chosen.
        self.started = False

    def start(self, status: int) -> None:
        """Count the response."""
        self.started = True
        count, observe = self._app.meters(self.route, status)
        count()
        observe(time.perf_counter() - self._received_s)

    async def send(self, message: Message) -> None:
        """Send a part of a page or a stream, and count the response when it begins."""
        if not self.started:
            self.start(message["status"])
        await self.raw_send(message)


class ServerApp:
    """The application of one server."""

    def __init__(
        self, state: ServerState, *, pages: Starlette | None = None, more: Iterable[tuple[Route, Handler]] = ()
    ) -> None:
        self.state = state
        self._pages = pages
        self._connections_max = state.settings.connections_max
        routes = [(route, HANDLERS[route.name]) for route in ROUTES]
        self._router = Router((route, Endpoint(route, handler)) for route, handler in (*routes, *more))
        self._meters: dict[tuple[str, int], tuple[Callable[[], None], Callable[[float], None]]] = {}

    def meters(self, route: str, status: int) -> tuple[Callable[[], None], Callable[[float], None]]:
        """Return the counter and the timer of a route's responses with this status."""
        found = self._meters.get((route, status))
        if found is None:
            metrics = self.state.book.metrics
            count = metrics.counter("server_requests", route=route, status=status).inc
            found = self._meters[route, status] = (count, metrics.duration("server_request", route=route).observe)
        return found

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        exchange = Exchange(self, send)
        try:
            headers = Headers(scope["headers"])
            if len(self.state.connections) > self._connections_max:
                raise TooManyConnections(f"more than {self._connections_max:,} connections are open: try again later")
            self.state.gate.check_host(headers)
            self.state.gate.check_origin(scope["method"], headers)
            if not scope["path"].startswith("/v1/") and scope["path"] != METRICS_PATH:
                if self._pages is None:
                    raise NotFound(f"there is no {scope['path'][:200]!r} here: /v1/openapi.json lists all paths")
                await self._pages(scope, receive, exchange.send)
                return
            endpoint, parameters = self._router.find(scope["method"], scope["raw_path"].partition(b"?")[0])
            exchange.route = endpoint.route.name
            await self._serve(scope, headers, endpoint, parameters, receive, exchange)
        except TidebookError as error:
            if not exchange.started:
                await _send_problem(exchange, problem_of(error), _problem_headers(error))
        except (TimeoutError, ConnectionError):
            pass  # the client reads too slowly or has disconnected: its connection is closed
        except Exception:
            logger.exception("%s %s failed", scope["method"], scope["path"][:200])
            if not exchange.started:
                await _send_problem(exchange, internal_problem(), [])

    async def _serve(
        self,
        scope: dict[str, Any],
        headers: Headers,
        endpoint: Endpoint,
        parameters: list[str],
        receive: Receive,
        exchange: Exchange,
    ) -> None:
        state, route = self.state, endpoint.route
        client = scope["client"][0] if scope.get("client") else ""
        try:
            principal = state.gate.authenticate(route.method, headers)
        except SignInRequired:
            state.gate.count(ANONYMOUS, client)
            raise
        index = endpoint.name_index
        state.gate.authorize(principal, route, None if index is None else parameters[index], client)
        call = Call(state, route, parameters, headers, principal, client, receive)
        if route.query is not None or scope["query_string"]:
            call.query = _decode_query(route, scope["query_string"])
            call.unmask = endpoint.unmasks and call.may_unmask(call.query.unmask)
        if route.mutates:
            state.audit.check_room()
        call.deadline_s = self._deadline_s(headers)
        timer, handler_started = state.deadlines.timer(call.deadline_s), False
        try:
            with timer:
                if endpoint.decode is not None:
                    call.raw_body = raw = await _read_body(call)
                    call.body = _decode_body(endpoint, headers, raw)
                handler_started = True
                if tracing.is_on():
                    response = await self._run_traced(endpoint, call, scope)
                elif headers.idempotency_key is not None and route.mutates:
                    response = await self._run_keyed(endpoint, call, scope)
                else:
                    response = await endpoint.handler(call)
        except TimeoutError as error:
            if not handler_started:
                raise DeadlineExceeded(
                    f"the body was not complete after {call.deadline_s:g} s, and nothing was done: send it faster, "
                    "or allow more with Request-Timeout",
                    deadline_s=call.deadline_s,
                ) from error
            if route.mutates:
                self._record_failure(call, scope, 504)
                why = f"was cancelled after {call.deadline_s:g} s" if timer.expired else "got no response from the book"
                raise OutcomeUnknown(f"the request {why}, and its change may have happened") from error
            if not timer.expired:
                raise Unavailable(f"a part of the book did not answer in time: {error}") from error
            raise DeadlineExceeded(
                f"the request was cancelled after {call.deadline_s:g} s: ask for less, "
                "or allow more with Request-Timeout",
                deadline_s=call.deadline_s,
            ) from error
        except TidebookError as error:
            if handler_started and ((status := problem_of(error)["status"]) >= 500 or call.has_parts):
                self._record_failure(call, scope, status)
            raise
        except BaseException as error:  # also a cancellation, when the server stops before the request has ended
            if handler_started:
                self._record_failure(call, scope, 500 if isinstance(error, Exception) else 504)
            raise
        if isinstance(response, EncodedResponse):
            if call.changed and not response.replayed:
                await self._record(call, scope, response.status)
            await _send(exchange, response.status, response.body, [_REPLAYED] if response.replayed else [])
        elif isinstance(response, Lines):
            await self._record(call, scope, 200)
            await self._stream(call, response, receive, exchange.send)
        elif isinstance(response, Text):
            await _send(exchange, 200, response.body, kind=response.content_type)
        elif isinstance(response, Reply):
            await self._record(call, scope, response.status)
            await _send(exchange, response.status, _encode_body(response.body), response.headers)
        else:
            if (route.mutates or call.unmask) and call.changed:
                await self._record(call, scope, route.status)
            await _send(exchange, route.status, _encode_body(response))

    async def _record(self, call: Call, scope: dict[str, Any], status: int) -> None:
        """Record a call that changes or unmasks something; if it destroys or unmasks, wait until that is durable."""
        route, audit = call.route, self.state.audit
        if not route.mutates and not call.unmask:
            return
        target = _target(scope)
        if not (route.destructive or call.unmask):
            audit.record(call.principal, call.client, route.name, target, status)
            return
        try:
            async with asyncio.timeout(call.deadline_s):
                await audit.record_durably(call.principal, call.client, route.name, target, status, unmask=call.unmask)
        except TimeoutError as error:
            if route.mutates:
                raise OutcomeUnknown(
                    "the change was made, but the audit cannot be written now: do not repeat it"
                ) from error
            raise Unavailable("the audit cannot be written now, so masked fields are not shown: try again") from error

    def _record_failure(self, call: Call, scope: dict[str, Any], status: int) -> None:
        """Record a failed call whose change may have happened, completely or in part.

        This does not wait until the entry is durable: the failed component is often one that the audit needs too.
        """
        if call.route.mutates:
            self.state.audit.record(call.principal, call.client, call.route.name, _target(scope), status)

    async def _run_traced(self, endpoint: Endpoint, call: Call, scope: dict[str, Any]) -> Any:
        """Run a request as a span below that of its caller."""
        route, headers = call.route, call.headers
        with tracing.continuing(f"{route.method} {route.path}", headers.traceparent, route=route.name) as span:
            call.is_traced = span is not None and span.carried is not None
            if headers.idempotency_key is not None and route.mutates:
                return await self._run_keyed(endpoint, call, scope)
            return await endpoint.handler(call)

    async def _run_keyed(self, endpoint: Endpoint, call: Call, scope: dict[str, Any]) -> Any:
        """Run a request that has an Idempotency-Key, or return the response of an earlier one."""
        key, route = call.headers.idempotency_key, call.route
        assert key is not None
        if route.returns_secret:
            raise InvalidInput(f"{route.name} takes no Idempotency-Key, because its response contains a secret")
        if endpoint.native_key:
            call.append_key = f"{call.principal.id}\0{check_key(key)}"
            appended = scope["raw_path"] + b"\0" + call.raw_body

            async def append() -> tuple[EncodedResponse, bool]:
                response = await endpoint.handler(call)
                return EncodedResponse(route.status, _encode(response)), call.is_complete

            return await self.state.keys.append_once(call.principal.id, key, appended, append)

        async def run() -> EncodedResponse:
            response = await endpoint.handler(call)
            if isinstance(response, Reply):
                return EncodedResponse(response.status, _encode_body(response.body))
            return EncodedResponse(route.status, _encode_body(response))

        request = b"\0".join((route.method.encode(), scope["raw_path"], scope["query_string"], call.raw_body))
        return await self.state.keys.run_once(call.principal.id, key, request, run)

    def _deadline_s(self, headers: Headers) -> float:
        settings = self.state.settings
        if headers.request_timeout is None:
            return settings.request_s
        try:
            seconds = float(headers.request_timeout)
        except ValueError:
            seconds = 0.0
        if not 0 < seconds <= settings.request_s_max:  # also refuses NaN
            raise InvalidInput(
                f"Request-Timeout must be a number of seconds up to {settings.request_s_max:g}, "
                f"not {headers.request_timeout[:40]!r}"
            )
        return seconds

    async def _stream(self, call: Call, lines: Lines, receive: Receive, send: Send) -> None:
        events = lines.events or call.wants_events
        state, token = self.state, call.principal.id
        try:
            state.slots.take(token)
        except TooManyRequests:
            await lines.source.aclose()
            raise
        state.book.metrics.gauge("server_open_streams", state.slots.open)
        try:
            sender = StreamSender(
                receive,
                send,
                state.live,
                state.gate.is_current,
                token=token,
                session=state.gate.session_of(call.headers),
                send_s=state.settings.send_s,
                deadline_s=call.deadline_s,
            )
            await sender.run(lines, events=events, headers=[_NO_SNIFF])
        finally:
            state.slots.release(token)
            state.book.metrics.gauge("server_open_streams", state.slots.open)


def _target(scope: dict[str, Any]) -> str:
    """Return the path and the query of a request, as the audit records them."""
    path, query = scope["raw_path"].decode("latin-1"), scope["query_string"].decode("latin-1")
    return f"{path}?{query}" if query else path


async def _read_body(call: Call) -> bytes:
    """Return the body; raise `TooLarge` if it exceeds the limit, and `InvalidInput` if it is not complete."""
    limit = call.state.settings.body_limit(call.route.role)
    if (arrived := take_body(call.receive)) is not None:
        if len(arrived) > limit:
            raise TooLarge("the body", size_bytes=len(arrived), limit_bytes=limit)
        return arrived
    length = call.headers.content_length
    if length is not None and length.isdecimal() and int(length) > limit:
        raise TooLarge("the body", size_bytes=int(length), limit_bytes=limit)
    parts, size, is_complete = list[bytes](), 0, False
    while not is_complete and size <= limit:
        message = await call.receive()
        if message["type"] == "http.disconnect":
            raise InvalidInput("the client disconnected before its body was complete")
        parts.append(message.get("body", b""))
        size, is_complete = size + len(parts[-1]), not message.get("more_body")
    if size > limit:
        raise TooLarge("the body", size_bytes=size, limit_bytes=limit)
    call.require_current()
    return b"".join(parts)


def _decode_body(endpoint: Endpoint, headers: Headers, raw: bytes) -> Any:
    if not raw and endpoint.route.body_optional:
        return None
    kind = headers.content_type
    if kind != "application/json":
        kind = (kind or "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise UnsupportedContent(f"send the body as application/json, not as {kind[:60] or 'an unnamed type'}")
    assert endpoint.decode is not None
    try:
        return endpoint.decode(raw)
    except _DECODE_ERRORS as error:
        raise InvalidInput(f"the body is not valid: {error}") from error


def _decode_query(route: Route, raw: bytes) -> Any:
    try:
        pairs = parse_qsl(raw.decode(), keep_blank_values=True, errors="strict", max_num_fields=50)
    except ValueError as error:  # also an invalid escape
        raise InvalidInput(f"the query string is not valid: {error}") from error
    if route.query is None:
        if pairs:
            raise InvalidInput(f"{route.name} takes no query parameters: leave {pairs[0][0][:40]!r} out")
        return None
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise InvalidInput("a query parameter was given twice: give it once")
    try:
        return msgspec.convert(fields, route.query, strict=False)
    except _DECODE_ERRORS as error:
        raise InvalidInput(f"the query string is not valid: {error}") from error


def _encode_body(value: Any) -> bytes:
    return b"" if value is None else _encode(value)


async def _send(
    exchange: Exchange,
    status: int,
    body: bytes,
    more: Iterable[tuple[bytes, bytes]] = (),
    *,
    kind: bytes = _JSON,
) -> None:
    exchange.start(status)
    if kind is _JSON and not more and (body or status == 204):  # any other empty response needs a Content-Length
        head = _JSON_HEAD % len(body) if body else _NO_CONTENT_HEAD
        if send_response(exchange.raw_send, status, head, body):
            return
    if body or kind != _JSON:  # text may be empty: there are no metrics before the first response
        headers = [(b"content-type", kind), _NO_STORE, _NO_SNIFF, (b"content-length", b"%d" % len(body)), *more]
    else:
        headers = [_NO_STORE, *more]
    await exchange.raw_send({"type": "http.response.start", "status": status, "headers": headers})
    await exchange.raw_send({"type": "http.response.body", "body": body})


def _problem_headers(error: TidebookError) -> list[tuple[bytes, bytes]]:
    match error:
        case MethodNotAllowed():
            return [(b"allow", ", ".join(error.allowed).encode())]
        case TooManyRequests():
            return [(b"retry-after", str(max(1, round(error.retry_after_s))).encode())]
        case SignInRequired():
            return [(b"www-authenticate", b'Bearer realm="tidebook"')]
        case TooManyConnections():
            return [(b"retry-after", b"1"), (b"connection", b"close")]
        case Unavailable():
            return [(b"retry-after", b"1")]
        case _:
            return []


async def _send_problem(exchange: Exchange, problem: dict[str, Any], headers: list[tuple[bytes, bytes]]) -> None:
    await _send(exchange, problem["status"], _encode(problem), headers, kind=_PROBLEM)
