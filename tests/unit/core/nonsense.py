"""Malformed records in valid frames: valid records with changed fields or bytes."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import msgspec
from hypothesis import strategies as st

from tidebook.core.bounds import EVENTS_MAX, TIME_MS_MAX
from tidebook.core.event import Event, encode_event, encode_events, pack_events

ID = bytes(range(16))
BODY = pack_events([encode_event(Event(b"a")), encode_event(Event({"t": 1}, tags={"x"}, metadata={"m": 2}))])
#: Packed arrays that are nested deeper than any stack allows.
DEEP = msgspec.Raw(b"\x91" * 5_000 + b"\x90")


def sealed(magic: int, version: int, rest: bytes) -> bytes:
    """Return a frame with a valid checksum around any content."""
    return bytes([magic, version]) + crc32(bytes([version]) + rest).to_bytes(4, "big") + rest


edges = st.sampled_from(
    [
        *(-(2**63), -(2**31), -2, -1, 0, 1, 2, 3, 15, 16, 255, 4095, 4096, 10_000, 10_001, 2**31),
        *(2**47 - 1, 2**47, 2**53 - 1, 2**53, 253_402_300_799_999, 2**63 - 1, 2**63, 2**64 - 1),
    ]
)
tags = st.frozensets(st.sampled_from(["x", "y", "ü"]), max_size=3)
types = st.sampled_from([None, None, "a", "ü"])
versions = st.integers(1, 3)
event = st.builds(Event, st.binary(max_size=3) | st.integers(0, 9), tags=tags, type=types, version=versions)
events = st.lists(event, min_size=1, max_size=4)
bodies = events.map(encode_events)

#: Replacements for a field.
wrong: st.SearchStrategy[Any] = st.one_of(
    edges,
    edges,
    st.sampled_from([None, True, 1.0, float("nan"), "", "x", "\x00", b"", b"\x91", ID, [], {}, [[]], DEEP, [DEEP]]),
    st.tuples(edges, edges).map(list),
    bodies.map(lambda body: body[0]),
    st.lists(st.tuples(st.sampled_from(["x", "y", ""]), edges).map(list), max_size=2),
)


def _append(packed: tuple[bytes, Any], events: int, numbered: list[Any], append_id: bytes) -> list[Any]:
    body, tagged = packed
    return [1, 1, append_id, events, body, *numbered, tagged, None]


appends = st.builds(
    lambda given, numbered, expiry, floor, id: _append(
        encode_events(given), len(given), [*numbered, expiry, floor], bytes([id]) * 16
    ),
    events,
    st.one_of(
        st.just([None, None]),
        st.integers(0, 4).map(lambda expected: [expected, None]),
        st.integers(1, 9).map(lambda at: [None, at]),
    ),
    st.sampled_from([None, 0, 5]),
    st.sampled_from([None, -1, 0, 3]),
    st.integers(0, 255),
)
positions = st.tuples(st.just(1), st.integers(0, 5)).map(list)
#: The fields of valid records.
valid = st.one_of(
    appends,
    appends,
    st.builds(lambda to, incarnation: [2, 1, to, incarnation], st.integers(1, 6), st.none() | positions),
    st.builds(lambda at: [3, 1, at], st.none() | positions),
    st.builds(lambda at: [4, 1, at], st.none() | st.integers(0, 2_000_000_000_000)),
    st.just([5, 1]),
)


@st.composite
def changed_fields(draw: st.DrawFn) -> bytes:
    """Draw a record with one or two fields changed, removed or added."""
    fields = list(draw(valid))
    for _ in range(draw(st.integers(1, 2))):
        match draw(st.sampled_from(["change", "change", "change", "cut", "add"])):
            case "change" if fields:
                fields[draw(st.integers(0, len(fields) - 1))] = draw(wrong)
            case "cut":
                fields = fields[: draw(st.integers(0, len(fields)))]
            case _:
                fields.append(draw(wrong))
    return msgspec.msgpack.encode(fields)


@st.composite
def changed_body(draw: st.DrawFn) -> bytes:
    """Draw an append with changed events, event count or tag counts."""
    fields = list(draw(appends))
    events: list[Any] = msgspec.msgpack.decode(fields[4])
    at = draw(st.integers(0, len(events) - 1))
    event = events[at]
    match draw(st.sampled_from(["event", "field", "field", "more", "fewer", "again", "tagged"])):
        case "event":
            events[at] = draw(wrong)
        case "field":
            event[draw(st.integers(0, len(event) - 1))] = draw(wrong)
        case "more":
            event.append(draw(wrong))
        case "fewer":
            event.pop()
        case "again":
            events.append(event)
            fields[3] += draw(st.integers(0, 1))
        case _:
            fields[-2] = draw(wrong)
    fields[4] = msgspec.msgpack.encode(events)
    return msgspec.msgpack.encode(fields)


@st.composite
def changed_bytes(draw: st.DrawFn) -> bytes:
    """Draw a record with bytes changed, removed or inserted."""
    rest = bytearray(msgspec.msgpack.encode(draw(valid)))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(rest)))
        rest[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return bytes(rest)


#: Contents of a frame.
rests = st.one_of(
    valid.map(msgspec.msgpack.encode), changed_fields(), changed_body(), changed_bytes(), st.binary(max_size=60)
)


# ---- one damaged content of each kind


def deep(levels: int) -> bytes:
    """Return nested arrays."""
    return b"\x91" * levels + b"\x90"


def array_of(*parts: bytes) -> bytes:
    """Return a msgpack array of values that are already msgpack."""
    return bytes([0x90 | len(parts)]) + b"".join(parts)


def packed(value: object) -> bytes:
    return msgspec.msgpack.encode(value)


def append_of(body: bytes, count: int = 1, tagged: object = ()) -> bytes:
    """Return a packed append with the given body and tag counts."""
    return packed([1, 1, ID, count, body, None, None, None, None, tagged])


PLAIN = encode_event(Event(b"a"))
TAGGED = encode_event(Event(b"a", tags={"x"}))
HUGE = 2**64 - 1

#: Contents of a frame that every process must treat as damaged.
NONSENSE = {
    "a body that is nested too deep": append_of(array_of(deep(5_000))),
    "a payload that is nested too deep": append_of(array_of(array_of(b"\x02", deep(5_000)))),
    "a field of an event that nobody knows": append_of(array_of(packed([2, b"", [], None, None, 1, None]))),
    "a deep field of an event that nobody knows": append_of(
        array_of(array_of(b"\x02", packed(b""), b"\x90", b"\xc0", b"\xc0", b"\x01", deep(5_000)))
    ),
    "a field of a mark that nobody knows": packed([4, 1, None, None]),
    "a deep field that nobody knows": array_of(b"\x04", b"\x01", b"\xc0", deep(5_000)),
    "a deep epoch": array_of(b"\x04", deep(5_000)),
    "a deep kind": array_of(deep(5_000)),
    "deep and nothing else": deep(5_000),
    "an epoch of 0": packed([4, 0]),
    "an epoch that no stamp has room for": packed([4, 4096]),
    "an epoch past 2**63": packed([4, HUGE]),
    "a mark past the last year": packed([4, 1, TIME_MS_MAX + 1]),
    "a mark past 2**63": packed([4, 1, HUGE]),
    "a mark before 1970": packed([4, 1, -1]),
    "a delete to nothing": packed([2, 1, 0]),
    "a delete past the last number": packed([2, 1, 2**53]),
    "a delete past 2**63": packed([2, 1, HUGE]),
    "a delete below 0": packed([2, 1, -(2**63)]),
    "a delete in an incarnation that no log could have": packed([2, 1, 7, [1, HUGE]]),
    "a purge at a position that no log could have": packed([3, 1, [HUGE, 1]]),
    "an expected number past 2**63": packed([1, 1, ID, 2, BODY, HUGE]),
    "an expected number below 0": packed([1, 1, ID, 2, BODY, -1]),
    "at past 2**63": packed([1, 1, ID, 2, BODY, None, HUGE]),
    "at 0": packed([1, 1, ID, 2, BODY, None, 0]),
    "an expiry past 2**63": packed([1, 1, ID, 2, BODY, None, None, HUGE]),
    "an expiry below 0": packed([1, 1, ID, 2, BODY, None, None, -1]),
    "a floor past 2**63": packed([1, 1, ID, 2, BODY, None, None, None, HUGE]),
    "a floor below -1": packed([1, 1, ID, 2, BODY, None, None, None, -2]),
    "an incarnation without an expected number": packed([1, 1, ID, 2, BODY, *[None] * 4, [["x", 1]], [1, 5]]),
    "an incarnation that no log could have": packed([1, 1, ID, 2, BODY, 3, *[None] * 3, [["x", 1]], [1, HUGE]]),
    "a short append id": packed([1, 1, ID[:15], 1, pack_events([PLAIN])]),
    "a long append id": packed([1, 1, ID * 1000, 1, pack_events([PLAIN])]),
    "a body that is a list of numbers": append_of(packed([1])),
    "a body that is a list of texts": append_of(packed(["a"])),
    "an event without a payload": append_of(packed([[2]])),
    "a payload of an unknown type": append_of(packed([[3, b""]])),
    "a payload of a type past 2**63": append_of(packed([[HUGE, b""]])),
    "a payload that is text": append_of(packed([[2, "a"]])),
    "an empty type of an event": append_of(packed([[2, b"", [], None, ""]])),
    "a type of an event that is a number": append_of(packed([[2, b"", [], None, 5]])),
    "a type of an event with NUL": append_of(packed([[2, b"", [], None, "a\x00"]])),
    "a type of an event of too many bytes": append_of(packed([[2, b"", [], None, "é" * 101]])),
    "a type of an event that is no UTF-8": append_of(b"\x91\x95\x02\xc4\x00\x90\xc0\xa1\xff"),
    "a deep type of an event": append_of(array_of(array_of(b"\x02", packed(b""), b"\x90", b"\xc0", deep(5_000)))),
    "a version 0 of a type": append_of(packed([[2, b"", [], None, "a", 0]])),
    "a version of a type past 2**63": append_of(packed([[2, b"", [], None, "a", HUGE]])),
    "a version of a type that is text": append_of(packed([[2, b"", [], None, "a", "1"]])),
    "metadata that is no bytes": append_of(packed([[2, b"", [], {}]])),
    "more events than an append may hold": append_of(pack_events([PLAIN] * (EVENTS_MAX + 1)), EVENTS_MAX + 1),
    "990,000 events": append_of(b"\xdd" + (990_000).to_bytes(4, "big") + b"\x90" * 990_000, 990_000),
    "events that are announced and missing": append_of(b"\xdd\xff\xff\xff\xff", HUGE),
    "tags that nobody counted": append_of(pack_events([TAGGED])),
    "tags that are counted and missing": append_of(pack_events([PLAIN]), 1, [["x", 1]]),
    "uneven counts of tags": append_of(pack_events([TAGGED, PLAIN]), 2, [["x", 2]]),
    "too low a count of tags": append_of(pack_events([TAGGED, TAGGED]), 2, [["x", 1]]),
    "a tag that is counted twice": append_of(pack_events([TAGGED]), 1, [["x", 1], ["x", 1]]),
    "a count of tags past 2**63": append_of(pack_events([TAGGED]), 1, [["x", HUGE]]),
    "a tag that an event has twice": append_of(packed([[2, b"", ["x", "x"]]]), 1, [["x", 2]]),
    "an empty tag": append_of(packed([[2, b"", [""]]]), 1, [["", 1]]),
    "a tag with NUL": append_of(packed([[2, b"", ["\x00"]]]), 1, [["\x00", 1]]),
    "a tag of too many bytes": append_of(packed([[2, b"", ["é" * 101]]]), 1, [["é" * 101, 1]]),
    "tags that take too much room": append_of(
        packed([[2, b"", (many := [f"{n:0200}" for n in range(90)])]]), 1, [[tag, 1] for tag in many]
    ),
    "a tag that is no UTF-8": append_of(b"\x91\x93\x02\xc4\x00\x91\xa1\xff", 1, [["x", 1]]),
    "a counted tag that is no UTF-8": append_of(pack_events([TAGGED]))[:-1] + b"\x91\x92\xa1\xff\x01",
    "a number that is a float": packed([4, 1.0]),
    "an unknown kind": packed([9, 1]),
    "no kind": packed([]),
}
