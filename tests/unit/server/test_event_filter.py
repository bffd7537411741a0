"""The filter language: the expressions that it accepts, their meaning, and the ones it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidebook.core.errors import InvalidInput
from tidebook.server.console.event_filter import CHARS_MAX, FilterFields, matches, parse


def event(payload: Any = None, **fields: Any) -> FilterFields:
    defaults: dict[str, Any] = {
        "number": 7, "offset": 70, "time_ms": 1_767_225_600_000, "type": "Paid", "version": 2,
        "tags": frozenset({"paid", "eu"}), "meta": {"user": "ada"},
    }  # fmt: skip
    return FilterFields(**{**defaults, "payload": payload, **fields})


ORDER = {"total": 120.5, "lines": [{"sku": "x-1"}, {"sku": "y"}], "open": False, "note": None, "we ird": 1}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("payload.total > 100", True),
        ("payload.total > 100 and payload.total <= 120", False),
        ("payload.total = 120.5", True),
        ("payload.lines[0].sku begins 'x'", True),
        ('payload.lines[9].sku = "x"', False),
        ("payload.open = false", True),
        ("payload.open = 0", False),
        ("payload.note = null", True),
        ("payload.note exists", False),
        ("payload.missing != 3", True),
        ("payload.missing < 3", False),
        ('payload["we ird"] = 1', True),
        ('payload.total > "a"', False),
        ("tag = 'paid' and tag = 'eu'", True),
        ("tag != 'paid'", False),
        ("tag != 'us'", True),
        ("tag contains 'ai'", True),
        ("type = 'Paid' and version >= 2", True),
        ("not (number = 7 or offset = 1)", False),
        ("number = 7 or number = 8 and offset = 1", True),
        ("time >= '2026-01-01' and time < '2026-01-02'", True),
        ("meta.user = 'ada'", True),
        ("text contains 'x-1'", True),
        ('text contains "\\"sku\\""', True),
    ],
)
def test_a_filter_selects_the_matching_values(text: str, expected: bool) -> None:
    assert matches(parse(text), event(ORDER)) is expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "ends where a field"),
        ("total > 1", "a field: number"),
        ("payload.total", "ends where an operator"),
        ("payload.total > ", "ends where a number"),
        ("payload.total > x", "'x' at character 17"),
        ("payload. > 1", "the name of a field"),
        ("payload.a = 1 payload.b = 2", "'and' or 'or'"),
        ("(payload.a = 1", "ends where ')'"),
        ("number = 'seven'", "number must be compared with a number"),
        ("type = 1", "type must be compared with a quoted string"),
        ("number contains '1'", "contains compares strings"),
        ("time > 'noon'", "time must be an ISO date"),
        ("type.x = 'a'", "has no fields"),
        ("payload.a = 'open", "not understood at character 13"),
        ("__import__('os').system('x') = 1", "a field: number"),
        ("not " * 30 + "number = 1", "nested more than"),
        (" or ".join(["number = 1"] * 51), "characters"),
        ("a" * (CHARS_MAX + 1), "characters"),
    ],
)
def test_a_syntax_error_is_reported_with_its_position(text: str, reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason.replace("(", r"\(").replace(")", r"\)")):
        parse(text)


@given(st.text(max_size=80))
def test_every_text_is_either_parsed_or_refused(text: str) -> None:
    try:
        expression = parse(text)
    except InvalidInput:
        return
    assert matches(expression, event(ORDER)) in (True, False)
