"""The offset and the time UUID of a tagged event: offsets round-trip, and no other text is accepted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidebook.core.errors import InvalidInput
from tidebook.core.event import Event, encode_event
from tidebook.core.key import Key
from tidebook.core.position import Position
from tidebook.core.replication_plan import EventRow, TagPosition, tag_row
from tidebook.tags.event import TaggedEvent, decode_offset, encode_offset

numbers = st.integers(0, 2**47)
places = st.builds(TagPosition, st.just("paid"), numbers, st.text(max_size=20), numbers, numbers, numbers, numbers)


@given(places)
def test_an_offset_survives_encoding(place: TagPosition) -> None:
    assert decode_offset("paid", encode_offset(place)) == place


@given(st.text(max_size=30))
def test_text_that_is_not_an_offset_is_refused(text: str) -> None:
    try:
        place = decode_offset("paid", text)
    except InvalidInput:
        return
    assert decode_offset("paid", encode_offset(place)) == place


def test_an_offset_of_another_version_is_refused() -> None:
    with pytest.raises(InvalidInput, match="not an offset"):
        decode_offset("paid", "kQI")


def test_a_time_uuid_is_derived_from_the_position_of_an_event() -> None:
    def event(time_ms: int, index: int) -> TaggedEvent:
        row = EventRow(1, encode_event(Event(1)), 5, Position(1, 7), index, time_ms)
        return TaggedEvent(tag_row("paid", Key("t", "a"), 0, Position(1, 0), 1, row))

    first, second = event(1_700_000_000_000, 0), event(1_700_000_000_000, 1)
    assert first.time_uuid == event(1_700_000_000_000, 0).time_uuid
    assert first.time_uuid.version == 1
    assert (first.time_uuid.time - 0x01B21DD213814000) // 10_000 == 1_700_000_000_000
    assert first.time_uuid.time < second.time_uuid.time
