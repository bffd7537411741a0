"""One request, as its handler sees it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from tidebook.api.access import Role
from tidebook.api.errors import PermissionDenied, SignInRequired
from tidebook.api.route import Route
from tidebook.core.errors import InvalidInput
from tidebook.runtime.tracing import valid_context
from tidebook.server.headers import Headers
from tidebook.server.masking import Mask
from tidebook.server.principal import Principal
from tidebook.server.responses import Receive
from tidebook.server.state import ServerState
from tidebook.wiring.book import Book


class Call:
    """A request: its sender, its path parameters, and its decoded query and body."""

    __slots__ = (
        "append_key",
        "body",
        "changed",
        "client",
        "deadline_s",
        "has_parts",
        "headers",
        "is_complete",
        "is_traced",
        "parameters",
        "principal",
        "query",
        "raw_body",
        "receive",
        "route",
        "state",
        "unmask",
    )

    def __init__(
        self,
        state: ServerState,
        route: Route,
        parameters: list[str],
        headers: Headers,
        principal: Principal,
        client: str,
        receive: Receive,
    ) -> None:
        self.state = state
        self.route = route
        self.parameters = parameters
        self.headers = headers
        self.principal = principal
        self.client = client
        self.receive = receive
        self.query: Any = None
        self.body: Any = None
        #: The bytes that the body was decoded from.
        self.raw_body = b""
        #: The Idempotency-Key of an append, from which its append id is derived.
        self.append_key: str | None = None
        #: Whether the response shows masked fields.
        self.unmask = False
        #: Whether something was changed; a claim that found nothing changes nothing.
        self.changed = True
        #: Whether a part of the change may have been made although the call is refused.
        self.has_parts = False
        #: Whether all appends of a batch succeeded.
        self.is_complete = True
        self.deadline_s = 0.0
        #: Whether this process records a span of the request.
        self.is_traced = False

    @property
    def book(self) -> Book:
        """The book that is served."""
        return self.state.book

    @property
    def trace(self) -> str | None:
        """The caller's trace context, to store with new data; None if a span of this process supplies it."""
        return None if self.is_traced else valid_context(self.headers.traceparent)

    @property
    def wants_events(self) -> bool:
        """Whether the request asks for server-sent events."""
        return self.headers.accept is not None and "text/event-stream" in self.headers.accept

    def number(self, index: int, name: str) -> int:
        """Return a path parameter as a whole number."""
        text = self.parameters[index]
        if not (text.isascii() and text.isdecimal() and len(text) < 20):
            raise InvalidInput(f"{name} in the path must be a whole number, not {text[:40]!r}")
        return int(text)

    def mask(self, name: str) -> Mask | None:
        """Return the mask of a topic or queue for this request; None if nothing is hidden."""
        return None if self.unmask else self.state.masks.of(name)

    def require_current(self) -> None:
        """Raise `SignInRequired` if the sender's token or session has ended since the request began."""
        gate = self.state.gate
        if self.principal.role > Role.PUBLIC and not gate.is_current(self.principal.id, gate.session_of(self.headers)):
            raise SignInRequired("the token was revoked or has expired during the request")

    def may_unmask(self, wanted: bool) -> bool:
        """Return whether the response shows masked fields; raise `PermissionDenied` if that is not allowed."""
        if wanted and self.principal.role < Role.ADMIN:
            raise PermissionDenied("only an admin may see masked fields: leave unmask out", required="admin")
        return wanted


Handler = Callable[[Call], Awaitable[Any]]


def topics_of(text: str | None) -> list[str] | None:
    """Return the topics of a query parameter, which are separated by commas; None for all."""
    return None if text is None else [each for each in text.split(",") if each]
