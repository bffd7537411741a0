"""Errors are translated into problems, and problems back into the same errors."""

from __future__ import annotations

import msgspec
import pytest

from tidebook.api import errors as api_errors
from tidebook.api.problem import KINDS, TYPE_PREFIX, error_of, kind_of, problem_of
from tidebook.core import errors
from tidebook.core.errors import TidebookError, Unavailable
from tidebook.core.key import Key

EXAMPLES: list[TidebookError] = [
    errors.InvalidInput("wrong"),
    errors.TooLarge("the record", size_bytes=5, limit_bytes=3),
    errors.NotFound("nothing"),
    errors.Conflict(key=Key("orders", "o-1"), expected=3, found=4),
    errors.Conflict(key=Key("orders", "o-1"), at=3, found=None),
    errors.Unavailable("down"),
    errors.OutcomeUnknown("perhaps", append_id=b"x" * 16, partition=1, offset=2, floor=3, epoch=4),
    errors.Truncated("gone"),
    errors.Corrupt("bad"),
    errors.UnknownVersion("it", version=2, known=1),
    errors.Fenced("late"),
    errors.LeaseLost("lost"),
    errors.LogLost(topic="t", partition=1, first=2, last=3, remedy="restore"),
    errors.UnknownEventType(topic="t", id="x", seq_nr=3, type="paid", version=2, known=1),
    errors.UnreadableEvent(topic="t", id="x", seq_nr=3, type="paid", version=2, reason="no amount"),
    errors.ProjectionStopped(name="sales", slice=3, reason="t/x 3"),
    errors.EventParked(name="sales", event="t/x/3", reason="no amount"),
    errors.MissingTaggedEvent(tag="t", topic="x", id="y", missing=(1, 2), last_known_offset="abc"),
    api_errors.SignInRequired("who?"),
    api_errors.PermissionDenied("no", required="admin"),
    api_errors.MethodNotAllowed("no", allowed=["GET"]),
    api_errors.UnsupportedContent("no"),
    api_errors.TooManyRequests("slow down", retry_after_s=2.5),
    api_errors.TooManyConnections("full"),
    api_errors.DeadlineExceeded("late", deadline_s=30.0),
]
#: Part of the interface: a change here breaks clients.
PINNED = {
    "too-large": 413,
    "method-not-allowed": 405,
    "unsupported-content": 415,
    "invalid-input": 400,
    "sign-in-required": 401,
    "permission-denied": 403,
    "not-found": 404,
    "conflict": 409,
    "fenced": 409,
    "lease-lost": 409,
    "truncated": 410,
    "too-many-requests": 429,
    "unknown-version": 500,
    "corrupt": 500,
    "log-lost": 500,
    "missing-tagged-event": 500,
    "deadline-exceeded": 503,
    "too-many-connections": 503,
    "unavailable": 503,
    "outcome-unknown": 504,
    "unknown-event-type": 409,
    "event-parked": 409,
    "unreadable-event": 409,
    "projection-stopped": 409,
}


def test_types_and_statuses_are_pinned() -> None:
    assert {kind.slug: kind.status for kind in KINDS} == PINNED


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_an_error_is_restored_with_its_fields(error: TidebookError) -> None:
    problem = msgspec.json.decode(msgspec.json.encode(problem_of(error)))
    assert list(problem)[:4] == ["type", "title", "status", "detail"]
    back = error_of(problem)
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert {name: getattr(back, name) for name in kind_of(error).fields} == {
        name: getattr(error, name) for name in kind_of(error).fields
    }


def test_every_public_error_has_a_row_in_the_table() -> None:
    modules = (errors, api_errors)
    classes = {
        each
        for module in modules
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, TidebookError) and each is not TidebookError
    }
    assert classes == {kind.error for kind in KINDS} == {type(each) for each in EXAMPLES}


def test_a_problem_of_an_unknown_type_is_unavailable() -> None:
    assert type(error_of({"type": TYPE_PREFIX + "new", "detail": "x"})) is Unavailable
    assert type(error_of({})) is Unavailable
