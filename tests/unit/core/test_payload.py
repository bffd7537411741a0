"""Payloads: JSON values, text and bytes are decoded as the type that was encoded; other values are refused."""

from __future__ import annotations

import enum
import math
from collections import OrderedDict
from datetime import datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidebook.core.errors import Corrupt, InvalidInput
from tidebook.core.payload import BYTES, DEPTH_MAX, JSON, TEXT, EncodedJson, decode_json, decode_payload, encode_payload

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
json_values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=20
)


class Colour(enum.IntEnum):
    RED = 1


class Name(str):
    pass


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def cycle_of_lists() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


def cycle_of_dicts() -> Any:
    value: dict[str, Any] = {}
    value["self"] = {"again": [value]}
    return value


def round_trip(value: object) -> Any:
    return decode_payload(*encode_payload(value))


@given(json_values | st.binary())
def test_a_decoded_payload_is_equal_and_of_the_same_type(value: Any) -> None:
    again = round_trip(value)
    assert again == value
    assert type(again) is type(value)


@pytest.mark.parametrize("value", [0.0, -0.0, 5e-324, 1.7976931348623157e308, 1e22, 3.0, 0.1 + 0.2])
def test_a_float_is_decoded_to_the_last_bit(value: float) -> None:
    again = round_trip(value)
    assert type(again) is float
    assert math.copysign(1, again) == math.copysign(1, value)
    assert again.hex() == value.hex()


@pytest.mark.parametrize("value", [2**64 - 1, -(2**63), 2**53 + 1, 0])
def test_a_64_bit_integer_is_decoded_exactly(value: int) -> None:
    assert round_trip(value) == value
    assert type(round_trip(value)) is int


def test_an_objects_names_keep_their_order() -> None:
    assert list(round_trip({"b": 1, "a": 2, "": 3})) == ["b", "a", ""]


@pytest.mark.parametrize(("value", "type_"), [({"a": 1}, JSON), ([1], JSON), (None, JSON), ("a", TEXT), (b"a", BYTES)])
def test_text_and_bytes_payloads_are_kept_unchanged(value: object, type_: int) -> None:
    assert encode_payload(value)[0] == type_


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        math.inf,
        -math.inf,
        {"deep": [1, {"er": math.nan}]},
        2**64,
        -(2**63) - 1,
        [10**100],
        {1, 2},
        frozenset("a"),
        (1, 2),
        [(1,)],
        {"a": (1,)},
        {1: "a"},
        {None: 1},
        {b"a": 1},
        {True: 1},
        [b"bytes inside"],
        {"a": b"bytes inside"},
        bytearray(b"a"),
        memoryview(b"a"),
        Decimal(1),
        datetime(2026, 1, 1),
        1j,
        object(),
        Colour.RED,
        [Colour.RED],
        Name("text"),
        OrderedDict(a=1),
        range(3),
        iter([]),
        cycle_of_lists(),
        cycle_of_dicts(),
        nested(DEPTH_MAX + 1),
        nested(100_000),
        "\ud800",
        ["\udfff"],
        {"\ud800": 1},
    ],
    ids=lambda value: f"{type(value).__name__}",
)
def test_a_value_that_would_not_decode_unchanged_is_refused(value: object) -> None:
    with pytest.raises(InvalidInput):
        encode_payload(value)


def test_nesting_up_to_the_bound_is_accepted() -> None:
    assert round_trip(nested(DEPTH_MAX)) == nested(DEPTH_MAX)


def nested_objects(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value}
    return value


def test_objects_may_be_nested_up_to_the_bound() -> None:
    assert round_trip(nested_objects(DEPTH_MAX)) == nested_objects(DEPTH_MAX)
    with pytest.raises(InvalidInput, match="nested"):
        encode_payload(nested_objects(DEPTH_MAX + 1))


def test_a_refused_number_is_named_with_the_remedy() -> None:
    with pytest.raises(InvalidInput, match=r"18446744073709551616.*as text"):
        encode_payload({"n": 2**64})


def test_an_unknown_payload_type_is_corrupt() -> None:
    with pytest.raises(Corrupt, match="7"):
        decode_payload(7, b"")


@pytest.mark.parametrize(("type_", "data"), [(JSON, b""), (JSON, b"{"), (JSON, b"nan"), (TEXT, b"\xff")])
def test_damaged_payload_bytes_are_corrupt(type_: int, data: bytes) -> None:
    with pytest.raises(Corrupt):
        decode_payload(type_, data)


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, 10**5000], ids=["2**64", "-2**63-1", "10**5000"])
def test_a_number_beyond_64_bits_is_refused_however_long_it_is(value: int) -> None:
    with pytest.raises(InvalidInput, match="bits"):
        encode_payload([value])


def test_json_that_is_nested_deeper_than_the_stack_allows_is_corrupt() -> None:
    with pytest.raises(Corrupt, match="damaged"):
        decode_payload(JSON, b"[" * 5_000 + b"]" * 5_000)
    with pytest.raises(ValueError, match="nested"):
        decode_json(b"[" * 5_000 + b"]" * 5_000)


def test_already_encoded_json_is_kept_unchanged() -> None:
    assert encode_payload(EncodedJson(b'{"a": 1}')) == (JSON, b'{"a": 1}')
