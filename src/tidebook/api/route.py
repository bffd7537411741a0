"""A route declares one HTTP operation; server, client and documentation are built from it."""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from tidebook.api.access import Role

Method = Literal["GET", "POST", "PUT", "PATCH", "DELETE"]
#: The object that a token's prefix must match: the path parameter of this name, the items of the response (those
#: that do not match are left out), the book as a whole, for which a token with a prefix is refused, or nothing.
Scope = Literal["topic", "queue", "namespace", "items", "book", "none"]
#: The form of the response: one JSON document, text, or NDJSON `lines`; `events` may also be server-sent events.
Form = Literal["json", "text", "lines", "events", "none"]
_PARAMETER = re.compile(r"\{(\w+)\}")


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """One operation of the API."""

    name: str
    method: Method
    path: str
    role: Role
    scope: Scope
    summary: str
    query: type[msgspec.Struct] | None = None
    body: type[msgspec.Struct] | None = None
    #: The struct of the response, or of each line if the form is `lines`.
    response: Any = None
    form: Form = "json"
    status: int = 200
    #: Whether the operation changes something; if so, it is audited and accepts an Idempotency-Key.
    mutates: bool = False
    #: Whether the audit entry must be durable before the response is sent.
    destructive: bool = False
    #: Whether the response contains a secret, which is never stored.
    returns_secret: bool = False
    #: Whether the body may be left out.
    body_optional: bool = False

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the path's parameters, in order."""
        return tuple(_PARAMETER.findall(self.path))

    @property
    def noun(self) -> str:
        """The first part of the name, which groups the operations of one subject."""
        return self.name.partition(".")[0]
