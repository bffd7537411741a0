"""The check of payloads is skipped only for requests whose payloads would pass it and be stored as the same bytes."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidebook.api.payload import checked_payload, payloads_need_no_check
from tidebook.core.errors import InvalidInput
from tidebook.core.payload import DEPTH_MAX, encode_payload

_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
    max_leaves=60,
)  # fmt: skip


@given(_VALUES)
def test_a_payload_that_needs_no_check_would_pass_it(value: object) -> None:
    raw = msgspec.json.encode({"events": [{"payload": value}]})
    payload = msgspec.json.decode(raw)["events"][0]["payload"]
    if payloads_need_no_check(raw):
        assert encode_payload(checked_payload(payload)) == encode_payload(payload)


@pytest.mark.parametrize("raw", [b"18446744073709551616", b"-9223372036854775809", b'{"a":[1,99999999999999999999]}'])
def test_a_number_beyond_64_bits_needs_a_check(raw: bytes) -> None:
    assert not payloads_need_no_check(raw)
    with pytest.raises(InvalidInput, match="64 bits"):
        encode_payload(msgspec.json.decode(raw))


@pytest.mark.parametrize("brackets", [(b"[", b"]"), (b'{"a":', b"}")])
def test_a_value_that_is_nested_too_deep_needs_a_check(brackets: tuple[bytes, bytes]) -> None:
    raw = brackets[0] * (DEPTH_MAX + 1) + b"1" + brackets[1] * (DEPTH_MAX + 1)
    assert not payloads_need_no_check(raw)
    with pytest.raises(InvalidInput, match="nested"):
        encode_payload(msgspec.json.decode(raw))


def test_an_ordinary_request_needs_no_check() -> None:
    assert payloads_need_no_check(b'{"events":[{"payload":{"total":3,"lines":[{"sku":"a-1","n":2.5}]}}]}')
    assert checked_payload("text") == "text"
    assert checked_payload(b"\0") == b"\0"
