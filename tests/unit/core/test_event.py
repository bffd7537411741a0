"""Events: validation, encoding and decoding."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidebook.core.errors import Corrupt, InvalidInput
from tidebook.core.event import (
    NOT_PLAIN,
    TAG_BYTES_MAX,
    TAGS_BYTES_MAX,
    TAGS_WARN,
    TYPE_BYTES_MAX,
    TYPE_VERSION_MAX,
    Event,
    ReadEvent,
    check_events,
    decode_event,
    decode_events,
    encode_event,
    encode_events,
    event_tags,
    event_type_of,
    pack_events,
    plain_payloads,
    read_payload,
    restore_event,
    unpack_events,
)
from tidebook.core.payload import BYTES, JSON, TEXT
from tidebook.core.position import Position
from tidebook.core.replication_plan import EventRow
from tidebook.journal.view import read_events

tags = st.frozensets(
    st.text(st.characters(exclude_characters="\x00", codec="utf-8"), min_size=1, max_size=20), max_size=4
)
metadata = st.none() | st.dictionaries(st.text(max_size=5), st.integers(0, 9) | st.text(max_size=5), max_size=3)
types = st.none() | st.text(st.characters(exclude_characters="\x00", codec="utf-8"), min_size=1, max_size=20)
untyped = st.builds(
    Event, st.binary(max_size=50) | st.text(max_size=20) | st.integers(0, 99), tags=tags, metadata=metadata
)
typed = st.builds(
    Event,
    st.binary(max_size=9) | st.integers(0, 99),
    tags=tags,
    metadata=metadata,
    type=types.filter(bool),
    version=st.integers(1, 2**31 - 1),
)
events = untyped | typed


def read(event: Event) -> ReadEvent:
    return read_events([EventRow(1, encode_event(event), 1500, Position(1, 0), 0)], 0)[0]


@given(events)
def test_a_decoded_event_equals_the_encoded_one(event: Event) -> None:
    again = read(event)
    fields = {name: getattr(again, name) for name in ("tags", "metadata", "type", "version")}
    assert Event(again.payload, **fields) == event
    assert restore_event(encode_event(event)) == event


@given(events)
def test_the_type_of_an_event_is_read_without_the_rest(event: Event) -> None:
    assert event_type_of(encode_event(event)) == (event.type, event.version)


@given(st.lists(events, min_size=1, max_size=20))
def test_every_encoded_body_passes_the_check(events: list[Event]) -> None:
    body, tagged = encode_events(events)
    check_events(body, len(events), tagged)


@given(st.lists(events, max_size=20))
def test_events_encoded_together_equal_events_encoded_one_by_one(events: list[Event]) -> None:
    one_by_one = [encode_event(event) for event in events]
    body, tagged = encode_events(events)
    assert body == pack_events(one_by_one)
    assert decode_events(one_by_one) == [decode_event(encoded) for encoded in one_by_one]
    carried = [tag for event in events for tag in event.tags]
    assert tagged == tuple((tag, carried.count(tag)) for tag in sorted(set(carried)))


@given(events)
def test_tags_and_payload_are_read_without_the_rest(event: Event) -> None:
    assert event_tags(encode_event(event)) == tuple(sorted(event.tags))
    assert read_payload(encode_event(event)) == event.payload


def test_names_tags_and_versions_at_their_limits_are_encoded_and_decoded() -> None:
    name, tag = "x" * TYPE_BYTES_MAX, "ä" * (TAG_BYTES_MAX // 2)
    event = Event(1, tags={tag}, type=name, version=TYPE_VERSION_MAX)
    body, tagged = encode_events([event])
    check_events(body, 1, tagged)
    assert restore_event(unpack_events(body)[0]) == event


def test_the_tags_of_one_event_may_take_exactly_their_limit_of_bytes() -> None:
    many = [f"{n:0128}" for n in range(TAGS_BYTES_MAX // 128)]
    with pytest.warns(UserWarning, match="each costs a row"):
        body, tagged = encode_events([Event(1, tags=many)])
    assert sum(map(len, many)) == TAGS_BYTES_MAX
    check_events(body, 1, tagged)


def test_many_tags_on_one_event_cause_a_warning() -> None:
    encode_event(Event(1, tags=map(str, range(TAGS_WARN))))
    with pytest.warns(UserWarning, match=f"{TAGS_WARN + 1} tags"):
        encode_event(Event(1, tags=map(str, range(TAGS_WARN + 1))))


@pytest.mark.parametrize("wrong", ["", "a\x00", "x" * (TAG_BYTES_MAX + 1)], ids=["empty", "NUL", "long"])
def test_one_damaged_tag_among_others_makes_a_body_corrupt(wrong: str) -> None:
    body = msgspec.msgpack.encode([[BYTES, b"", ["fine", wrong]]])
    with pytest.raises(Corrupt, match="tags of an event"):
        check_events(body, 1, (("fine", 1), (wrong, 1)))


def test_a_body_with_other_tags_than_its_append_counts_is_corrupt() -> None:
    body, _ = encode_events([Event(1, tags={"x"})])
    with pytest.raises(Corrupt, match="tag counts of the append differ"):
        check_events(body, 1, (("y", 1),))


@pytest.mark.parametrize("data", [b"", b"\xff", b"\x90"])
@pytest.mark.parametrize("read_part", [event_tags, read_payload, lambda data: decode_events([data])])
def test_no_part_of_damaged_event_bytes_is_read(read_part: Callable[[bytes], object], data: bytes) -> None:
    with pytest.raises(Corrupt):
        read_part(data)


@pytest.mark.parametrize("name", ["", 5, b"a", "x" * (TYPE_BYTES_MAX + 1), "ä" * 101, "a\x00", "\ud800", []], ids=repr)
def test_a_type_that_is_not_a_short_text_is_refused(name: Any) -> None:
    with pytest.raises(InvalidInput, match="type"):
        encode_event(Event(1, type=name))


@pytest.mark.parametrize("version", [0, -1, 2**31, 1.5, "1", None, True], ids=repr)
def test_a_version_that_is_not_a_number_from_1_is_refused(version: Any) -> None:
    with pytest.raises(InvalidInput, match="version"):
        encode_event(Event(1, type="deposited", version=version))


@pytest.mark.parametrize("data", [b"", b"\xff", b"\x96\x02", b"\x95\x02\xc4\x00\x90\xc0\x05"])
def test_the_type_of_damaged_event_bytes_is_corrupt(data: bytes) -> None:
    with pytest.raises(Corrupt):
        event_type_of(data)


@given(st.lists(st.binary(min_size=1, max_size=30).map(lambda payload: encode_event(Event(payload))), max_size=20))
def test_a_body_unpacks_to_the_same_bytes(encoded: list[bytes]) -> None:
    assert unpack_events(pack_events(encoded)) == encoded


@pytest.mark.parametrize("count", [1, 15, 16, 17, 65_535, 65_536])
def test_a_body_with_another_number_of_events_than_its_append_states_is_corrupt(count: int) -> None:
    body = pack_events([encode_event(Event(b""))] * count)
    check_events(body, count, ())
    with pytest.raises(Corrupt):
        check_events(body, count + 1, ())


@pytest.mark.parametrize("data", [b"", b"\x05", b"\x92\x01", b"\xdd\xff\xff\xff\xff", b"\x91\x01\x01", b"\x81\x01\x01"])
@pytest.mark.parametrize("count", [1, 2, 2**32 - 1])
def test_a_body_that_is_not_a_complete_array_is_corrupt(data: bytes, count: int) -> None:
    with pytest.raises(Corrupt):
        check_events(data, count, ())


def test_tags_are_sorted_so_that_equal_events_have_equal_bytes() -> None:
    assert decode_event(encode_event(Event(1, tags=["b", "a"]))).tags == ("a", "b")


def test_an_event_without_tags_and_metadata_is_small() -> None:
    assert encode_event(Event(b"")) == b"\x92\x02\xc4\x00"


def test_no_metadata_and_empty_metadata_are_distinguished() -> None:
    assert read(Event(1)).metadata is None
    assert read(Event(1, metadata={})).metadata == {}


def test_the_repr_of_an_event_shows_its_fields() -> None:
    assert repr(Event({"total": 3}, tags={"paid"}, metadata={"by": "x"})) == (
        "Event({'total': 3}, tags={'paid'}, metadata={'by': 'x'})"
    )
    assert repr(Event(5, type="deposited", version=2)) == "Event(5, type='deposited', version=2)"


def test_the_timestamp_of_an_event_has_a_time_zone() -> None:
    assert read(Event(1)).timestamp == datetime(1970, 1, 1, 0, 0, 1, 500_000, UTC)


def test_text_as_tags_is_refused_because_its_letters_would_be_tags() -> None:
    with pytest.raises(InvalidInput, match="set of strings"):
        Event(1, tags="paid")


@pytest.mark.parametrize("bad", [[["a"]], [{}], 5], ids=repr)
def test_tags_that_are_not_a_set_are_refused(bad: Any) -> None:
    with pytest.raises(InvalidInput, match="tags"):
        Event(1, tags=bad)


@pytest.mark.parametrize("tag", ["", 5, None, b"a", "x" * (TAG_BYTES_MAX + 1), "ä" * 101, "a\x00", "\ud800"], ids=repr)
def test_a_tag_that_is_not_short_text_is_refused(tag: Any) -> None:
    with pytest.raises(InvalidInput, match="tag"):
        encode_event(Event(1, tags=[tag]))


def test_the_tags_of_one_event_are_bounded_together() -> None:
    many = [f"{i:0>190}" for i in range(TAGS_BYTES_MAX // 190 + 1)]
    with pytest.raises(InvalidInput, match="in total"):
        encode_event(Event(1, tags=many))


@pytest.mark.parametrize("bad", [[1], "a", 5, {1: 2}, {"a": {1}}, {"a": float("nan")}], ids=repr)
def test_metadata_that_is_not_a_json_object_is_refused(bad: Any) -> None:
    with pytest.raises(InvalidInput, match="metadata"):
        encode_event(Event(1, metadata=bad))


@pytest.mark.parametrize("bad", [1, "a", {"a": 1}, None], ids=repr)
def test_an_object_that_is_not_an_event_is_refused(bad: Any) -> None:
    with pytest.raises(InvalidInput, match=r"Event\(\.\.\.\)"):
        encode_event(bad)


@pytest.mark.parametrize("data", [b"", b"\xff", b"\x90", b"\x91\xc0", b"\x92\x02\x05"])
def test_damaged_event_bytes_are_corrupt(data: bytes) -> None:
    with pytest.raises(Corrupt):
        decode_event(data)


@pytest.mark.parametrize("data", [b"", b"\x05", b"\x92\x01", b"\xdd\xff\xff\xff\xff"])
def test_a_damaged_body_is_corrupt(data: bytes) -> None:
    with pytest.raises(Corrupt):
        unpack_events(data)


def test_tags_that_were_changed_afterwards_are_encoded_and_counted_once() -> None:
    event = Event(1)
    event.tags = ["b", "a", "b"]  # type: ignore[assignment]
    body, tagged = encode_events([event, Event(2, tags={"b"})])
    assert tagged == (("a", 1), ("b", 2))
    check_events(body, 2, tagged)


def test_events_are_equal_if_all_their_fields_are() -> None:
    event = Event(1, tags={"x"}, metadata={"m": 1}, type="t", version=2)
    assert event == Event(1, tags={"x"}, metadata={"m": 1}, type="t", version=2)
    others = [
        Event(2, tags={"x"}, metadata={"m": 1}, type="t", version=2),
        Event(1, tags={"y"}, metadata={"m": 1}, type="t", version=2),
        Event(1, tags={"x"}, metadata={"m": 2}, type="t", version=2),
        Event(1, tags={"x"}, metadata={"m": 1}, type="u", version=2),
        Event(1, tags={"x"}, metadata={"m": 1}, type="t", version=3),
    ]
    assert [event == other for other in (*others, 1)] == [False] * 6


def test_only_single_events_that_are_a_payload_and_nothing_else_are_plain() -> None:
    plain: list[Any] = [[Event(b"a")], [Event("b")], [Event({"c": 1})]]
    others: list[Any] = [
        [Event(b"a", tags={"x"})],
        [Event(b"a", metadata={})],
        [Event(b"a", type="t")],
        [Event(b"a"), Event(b"b")],
        [],
        (Event(b"a"),),
        ["no event"],
    ]
    assert plain_payloads([*plain, *others]) == (
        [BYTES, TEXT, JSON, *[NOT_PLAIN] * len(others)],
        [b"a", b"b", b'{"c":1}', *[b""] * len(others)],
    )


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 255, 256, 65_535, 65_536])
def test_a_packed_body_is_a_msgpack_array(count: int) -> None:
    event = encode_event(Event(b""))
    body = pack_events([event] * count)
    assert body == msgspec.msgpack.encode([[BYTES, b""]] * count)
    assert unpack_events(body) == [event] * count
    check_events(body, count, ())
    with pytest.raises(Corrupt, match="declares"):
        check_events(body, count + 1, ())


def test_more_than_ten_tags_are_accepted_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="11 tags"):
        encode_event(Event(1, tags={str(n) for n in range(11)}))
