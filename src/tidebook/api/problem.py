"""Problem details (RFC 9457): one table from error class to HTTP status and stable type, and the reverse.

    {"type": "urn:tidebook:error:conflict", "title": "…", "status": 409, "detail": "…", "expected": 3, "found": 4, …}

The fields after `detail` are those of the error. A problem decodes into the same error class with the same fields.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from tidebook.api.errors import (
    DeadlineExceeded,
    MethodNotAllowed,
    PermissionDenied,
    SignInRequired,
    TooManyConnections,
    TooManyRequests,
    UnsupportedContent,
)
from tidebook.core.errors import (
    Conflict,
    Corrupt,
    EventParked,
    Fenced,
    InvalidInput,
    LeaseLost,
    LogLost,
    MissingTaggedEvent,
    NotFound,
    OutcomeUnknown,
    ProjectionStopped,
    TidebookError,
    TooLarge,
    Truncated,
    Unavailable,
    UnknownEventType,
    UnknownVersion,
    UnreadableEvent,
)
from tidebook.core.key import Key

CONTENT_TYPE: Final = "application/problem+json"
TYPE_PREFIX: Final = "urn:tidebook:error:"
#: The type of an unexpected failure of the server. It decodes into `Unavailable`; for a change, which may have been
#: made, a client raises `OutcomeUnknown`.
INTERNAL: Final = "internal"


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """The members that every problem has; further members are the fields of its error."""

    type: str
    title: str
    status: int
    detail: str


class ErrorKind(msgspec.Struct, frozen=True):
    """One row of the table: an error class, its status, the end of its type URI, its title and its fields."""

    error: type[TidebookError]
    status: int
    slug: str
    title: str
    fields: tuple[str, ...] = ()


#: A class is listed before its base classes.
KINDS: Final = (
    ErrorKind(TooLarge, 413, "too-large", "The input is too large", ("size_bytes", "limit_bytes")),
    ErrorKind(MethodNotAllowed, 405, "method-not-allowed", "The method is not allowed", ("allowed",)),
    ErrorKind(UnsupportedContent, 415, "unsupported-content", "The content type is not supported"),
    ErrorKind(InvalidInput, 400, "invalid-input", "The input is invalid"),
    ErrorKind(SignInRequired, 401, "sign-in-required", "A valid token is required"),
    ErrorKind(PermissionDenied, 403, "permission-denied", "The token does not allow this", ("required",)),
    ErrorKind(NotFound, 404, "not-found", "There is no such object"),
    ErrorKind(Conflict, 409, "conflict", "The append was rejected", ("key", "expected", "at", "found")),
    ErrorKind(Fenced, 409, "fenced", "A newer owner has taken over"),
    ErrorKind(LeaseLost, 409, "lease-lost", "The lease is no longer held"),
    ErrorKind(
        UnknownEventType,
        409,
        "unknown-event-type",
        "An event has a type that is not declared",
        ("topic", "id", "seq_nr", "type", "version", "reason", "known"),
    ),
    ErrorKind(
        UnreadableEvent,
        409,
        "unreadable-event",
        "An event does not fit its class",
        ("topic", "id", "seq_nr", "type", "version", "reason"),
    ),
    ErrorKind(ProjectionStopped, 409, "projection-stopped", "A projection is stopped", ("name", "slice", "reason")),
    ErrorKind(EventParked, 409, "event-parked", "A projection has skipped the event", ("name", "event", "reason")),
    ErrorKind(Truncated, 410, "truncated", "Events were deleted during the read"),
    ErrorKind(TooManyRequests, 429, "too-many-requests", "A limit was reached", ("retry_after_s",)),
    ErrorKind(UnknownVersion, 500, "unknown-version", "The data was written by a newer version", ("version", "known")),
    ErrorKind(Corrupt, 500, "corrupt", "Stored data is damaged"),
    ErrorKind(
        LogLost, 500, "log-lost", "The log lost records", ("topic", "partition", "first", "last", "remedy", "when")
    ),
    ErrorKind(
        MissingTaggedEvent,
        500,
        "missing-tagged-event",
        "A tagged event is missing",
        ("tag", "topic", "id", "missing", "last_known_offset"),
    ),
    ErrorKind(DeadlineExceeded, 503, "deadline-exceeded", "The request took too long", ("deadline_s",)),
    ErrorKind(TooManyConnections, 503, "too-many-connections", "The server has too many connections"),
    ErrorKind(Unavailable, 503, "unavailable", "A component does not respond"),
    ErrorKind(
        OutcomeUnknown,
        504,
        "outcome-unknown",
        "The write may or may not have happened",
        ("append_id", "partition", "offset", "floor", "epoch"),
    ),
)
_BY_CLASS: Final = {kind.error: kind for kind in KINDS}
_BY_TYPE: Final = {TYPE_PREFIX + kind.slug: kind for kind in KINDS}


def kind_of(error: TidebookError) -> ErrorKind:
    """Return the row of an error's class, or of its nearest base class."""
    for each in type(error).__mro__:
        if each in _BY_CLASS:
            return _BY_CLASS[each]
    return _BY_CLASS[Unavailable]


def status_of(error: TidebookError) -> int:
    """Return the HTTP status of an error."""
    return kind_of(error).status


def problem_of(error: TidebookError) -> dict[str, Any]:
    """Return the problem details of an error, with its fields, as a JSON object."""
    kind = kind_of(error)
    found: dict[str, Any] = {
        "type": TYPE_PREFIX + kind.slug,
        "title": kind.title,
        "status": kind.status,
        "detail": str(error).encode(errors="replace").decode(),
    }
    for name in kind.fields:
        found[_member(name)] = _to_json(getattr(error, name, None))
    return found


def internal_problem() -> dict[str, Any]:
    """Return the problem of an unexpected failure, without any details: these are in the server's log."""
    return {
        "type": TYPE_PREFIX + INTERNAL,
        "title": "The server failed unexpectedly",
        "status": 500,
        "detail": "the request failed unexpectedly: a write may have happened; the server's log has the cause",
    }


def error_of(problem: Mapping[str, Any]) -> TidebookError:
    """Return the error of a decoded problem, with its message and its fields; for an unknown type, `Unavailable`."""
    kind = _BY_TYPE.get(str(problem.get("type")))
    detail = str(problem.get("detail") or problem.get("title") or "the server refused the request")
    if kind is None:
        return Unavailable(detail)
    error = kind.error.__new__(kind.error)
    Exception.__init__(error, detail)
    for name in kind.fields:
        setattr(error, name, _FROM_JSON.get(name, lambda value: value)(problem.get(_member(name))))
    return error


def _member(name: str) -> str:
    """Return the member of a problem that holds a field: `type` is the problem's own."""
    return "event_type" if name == "type" else name


def _to_json(value: Any) -> Any:
    if isinstance(value, Key):
        return {"topic": value.topic, "id": value.id}
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if value is None or isinstance(value, str | int | float | list | tuple):
        return value
    return str(value)


def _key(value: Any) -> Any:
    return Key(value["topic"], value["id"]) if isinstance(value, dict) and {"topic", "id"} <= value.keys() else value


def _bytes(value: Any) -> Any:
    try:
        return None if value is None else base64.b64decode(value)
    except (TypeError, ValueError, binascii.Error):
        return None


#: Functions that restore the fields that JSON cannot represent.
_FROM_JSON: Final[dict[str, Callable[[Any], Any]]] = {
    "key": _key,
    "append_id": _bytes,
    "missing": lambda value: tuple(value) if isinstance(value, list) else value,
}
