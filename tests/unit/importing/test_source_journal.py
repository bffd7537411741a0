"""Tests of rows of kafka-journal as events of a book, and of the plan of appends."""

from __future__ import annotations

import itertools
from datetime import date, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidebook.core.errors import Corrupt
from tidebook.core.event import Event
from tidebook.core.key import Key
from tidebook.importing.journal_import import APPEND_EVENTS_MAX, AppendPlanner, PlannedAppend, append_id
from tidebook.importing.source_journal import SourceEvent, parse_duration, read_event, read_head

KEY = Key("orders", "o-1")


@pytest.mark.parametrize(
    ("text", "length"),
    [
        ("30d", timedelta(days=30)),
        ("1mo2d3h", timedelta(days=32, hours=3)),
        ("1y1w", timedelta(days=372)),
        ("1m1s500ms", timedelta(seconds=61.5)),
    ],
)
def test_a_duration_of_cassandra_is_read(text: str, length: timedelta) -> None:
    assert parse_duration(text) == length


@pytest.mark.parametrize("text", ["", "1", "1x", "d1", "1d2"])
def test_another_text_is_no_duration(text: str) -> None:
    with pytest.raises(Corrupt):
        parse_duration(text)


def head_row(**changes: Any) -> dict[str, Any]:
    return {"topic": "orders", "id": "o-1", "segment_size": 5, "seq_nr": 7, "delete_to": None, **changes}


@pytest.mark.parametrize(
    ("changes", "segments"),
    [({}, [0, 1]), ({"delete_to": 5}, [1]), ({"delete_to": 4}, [0, 1]), ({"delete_to": 9}, []), ({"seq_nr": 5}, [0])],
)
def test_the_segments_after_the_deleted_events_are_read(changes: dict[str, Any], segments: list[int]) -> None:
    found = [*read_head(head_row(**changes)).segments()]
    deleted = changes.get("delete_to") or 0
    numbers = range(deleted + 1, max(changes.get("seq_nr", 7), deleted) + 1)
    assert {(number - 1) // 5 for number in numbers} <= {*found}
    assert found == segments or not segments


@pytest.mark.parametrize("changes", [{"seq_nr": None}, {"segment_size": None}, {"segment_size": 0}, {"seq_nr": 0}])
def test_a_head_without_its_numbers_is_damaged(changes: dict[str, Any]) -> None:
    with pytest.raises(Corrupt, match="orders/o-1"):
        read_head(head_row(**changes))


def test_a_journal_expires_on_its_day() -> None:
    head = read_head(head_row(expire_on=date(2030, 1, 2)))
    assert [head.has_expired(date(2030, 1, day)) for day in (1, 2, 3)] == [False, True, True]


def event_row(**changes: Any) -> dict[str, Any]:
    row = {"seq_nr": 1, "partition": 0, "offset": 9, "timestamp": None, "payload_type": None}
    return {**row, "payload_txt": None, "payload_bin": None, **changes}


@pytest.mark.parametrize(
    ("row", "payload"),
    [
        (event_row(payload_type="json", payload_txt="[1]"), [1]),
        (event_row(payload_type="json", payload_bin=b"[1]"), [1]),
        (event_row(payload_type="text", payload_txt=""), ""),
        (event_row(payload_type="binary", payload_bin=None), b""),
        (event_row(), None),
    ],
)
def test_a_payload_is_of_the_type_that_its_column_names(row: dict[str, Any], payload: object) -> None:
    assert read_event(row).event.payload == payload


@pytest.mark.parametrize(
    "row",
    [
        event_row(payload_type="json", payload_txt="{"),
        event_row(payload_type="text"),
        event_row(payload_type="avro"),
        event_row(metadata="{"),
    ],
)
def test_a_payload_that_does_not_fit_its_type_is_damaged(row: dict[str, Any]) -> None:
    with pytest.raises(Corrupt):
        read_event(row)


def plan(events: list[SourceEvent]) -> list[PlannedAppend]:
    planner = AppendPlanner(KEY)
    return [*(each for event in events for each in planner.add(event, 10)), *planner.finish()]


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 400)), max_size=6))
def test_a_plan_has_every_event_once_and_splits_no_record(records: list[tuple[int, int]]) -> None:
    events, number = [], 0
    for offset, (step, size) in enumerate(records):
        number += step - 1  # a gap, unless the step is 1
        for _ in range(size):
            number += 1
            events.append(SourceEvent(number, 0, offset, Event(number)))
    appends = plan(events)
    assert [event.payload for append in appends for event in append.events] == [event.seq_nr for event in events]
    offsets = {event.seq_nr: event.offset for event in events}
    for one, other in itertools.pairwise(appends):
        assert offsets[one.last] != offsets[other.first]
        assert one.last < other.first
    for append in appends:
        assert [event.payload for event in append.events] == [*range(append.first, append.last + 1)]
        first_records = {offsets[number] for number in range(append.first, append.last + 1)}
        assert len(append.events) <= APPEND_EVENTS_MAX + 400 or len(first_records) == 1
    assert plan(events) == appends


def test_append_ids_differ_by_journal_record_and_number() -> None:
    first = SourceEvent(1, 0, 5, Event(1))
    others = [
        append_id(Key("orders", "o-2"), first),
        append_id(KEY, SourceEvent(2, 0, 5, Event(1))),
        append_id(KEY, SourceEvent(1, 1, 5, Event(1))),
        append_id(KEY, SourceEvent(1, 0, 6, Event(1))),
    ]
    assert len({append_id(KEY, first), *others}) == 5
