"""Heads: their encoding is frozen and deterministic, and damage is reported."""

from __future__ import annotations

import pytest

from tidebook.core.errors import Corrupt
from tidebook.core.head import Head, Jump, RecentAppend, decode_head, encode_head
from tidebook.core.position import Position

HEAD = Head(
    True,
    7,
    2,
    Position(1, 3),
    Position(1, 9),
    1000,
    5,
    1_700_000_000_000,
    (RecentAppend(b"i" * 16, 6, 7, Position(1, 9)),),
    Position(1, 4),
    (Jump(0, 2000),),
    {},
    3,
)
#: Never change these: every stored head must stay readable.
HEAD_BYTES = (
    "9dc30702920103920109cd03e805cf0000018bcfe568009194c41069696969696969696969696969696969"
    "0607920109920104919200cd07d08003"
)
GRAVE_BYTES = "9dc2070292010392010acd03e8c00090c0908000"
#: The same heads as encoded before heads had a `run_start`.
EARLIER_GRAVE_BYTES = "9cc2070292010392010acd03e8c00090c09080"
GRAVE = Head(False, 7, 2, Position(1, 3), Position(1, 10), 1000, None, 0, (), None, ())


@pytest.mark.parametrize(("head", "golden"), [(HEAD, HEAD_BYTES), (GRAVE, GRAVE_BYTES)], ids=["live", "grave"])
def test_the_layout_of_a_head_is_frozen(head: Head, golden: str) -> None:
    assert encode_head(head).hex() == golden
    assert decode_head(bytes.fromhex(golden)) == head


DAMAGED = [
    b"",
    b"\x90",
    bytes.fromhex(HEAD_BYTES)[:-1],
    b"\xff",
    bytes.fromhex(HEAD_BYTES)[:-1] + b"\x81\xa1\xff\x01",  # a tag that is not UTF-8
    b"\x9d" + bytes.fromhex(HEAD_BYTES)[1:] + b"\x91" * 5_000 + b"\x90",  # an unknown field, nested too deep
    bytes.fromhex(
        GRAVE_BYTES.replace("92010a", "920100ffffffff"[:4] + "01cfffffffffffffffff")
    ),  # an offset beyond the range
]


def test_a_head_of_an_earlier_version_is_read() -> None:
    assert decode_head(bytes.fromhex(EARLIER_GRAVE_BYTES)) == GRAVE


@pytest.mark.parametrize("data", DAMAGED, ids=lambda data: data.hex()[:20])
def test_damaged_head_bytes_are_corrupt_and_the_error_names_the_remedy(data: bytes) -> None:
    with pytest.raises(Corrupt, match="rebuild"):
        decode_head(data)


def test_the_expiry_of_a_head_counts_from_the_last_append() -> None:
    assert HEAD.expires_at_ms == 1_700_000_000_005


def test_a_head_without_expiry_never_expires() -> None:
    assert Head(True, 1, 0, HEAD.incarnation, HEAD.position, 5, None, 0, (), None, ()).expires_at_ms is None


def test_a_grave_never_expires() -> None:
    assert Head(False, 1, 0, HEAD.incarnation, HEAD.position, 5, 5, 0, (), None, ()).expires_at_ms is None
