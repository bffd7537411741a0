"""Numbers, sizes, durations, times and addresses as the pages of the console write them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from tidebook.server.console.counts import Count
from tidebook.server.console.formatting import counted, iso, moment, number, size, span, span_ms
from tidebook.server.console.render import Renderer, link, static_files


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (number(None), "–"),
        (number(0), "0"),
        (number(1_234_567), "1,234,567"),
        (number(0.25), "0.2"),
        (size(None), "–"),
        (size(999), "999 B"),
        (size(1_500), "1.5 kB"),
        (size(10**18), "1,000.0 PB"),
        (span(None), "–"),
        (span(0), "0 s"),
        (span(-3), "0 s"),  # clocks that differ
        (span(0.0004), "< 1 ms"),
        (span(0.25), "250 ms"),
        (span(59.94), "59.9 s"),
        (span(7_200), "2 h"),
        (span_ms(None), "–"),
        (span_ms(90_000), "1.5 min"),
        (counted(1, "event"), "1 event"),
        (counted(2_000, "entry", "entries"), "2,000 entries"),
        (str(Count(7)), "7"),
        (str(Count(10_000, exact=False)), "over 10,000"),
        (moment(None), "–"),
        (moment(0), "1970-01-01 00:00:00.000"),
        (moment(datetime(2026, 1, 31, 12, tzinfo=UTC)), "2026-01-31 12:00:00.000"),
        (moment(10**18), "1000000000000000000 ms"),
        (iso(1_500), "1970-01-01T00:00:01.500"),
        (iso(10**18), ""),
    ],
)
def test_a_value_is_written_for_people(shown: str, expected: str) -> None:
    assert shown == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "/p"),
        ({"a": None, "b": ""}, "/p"),
        ({"a": "x/ &=#?\u202e"}, "/p?a=x%2F+%26%3D%23%3F%E2%80%AE"),
        ({"live": True, "unmask": False, "at": 3}, "/p?live=true&unmask=false&at=3"),
    ],
)
def test_an_address_has_its_parameters_quoted(fields: dict[str, Any], expected: str) -> None:
    assert link("/p", **fields) == expected


def test_a_page_is_utf_8_even_with_a_lone_surrogate() -> None:
    problem = {"status": 404, "title": "Missing", "detail": "a\ud800b"}
    page = Renderer(static_files())("problem.html", problem=problem, form=None, back="/", csrf_token="", theme="auto")
    assert "a?b" in page.decode()
