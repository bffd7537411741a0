"""Heads: their bytes are frozen, the same for the same head, and damage is told."""

from __future__ import annotations

import pytest

from tidebook.core.errors import Corrupt
from tidebook.core.head import Head, Jump, Recent, decode_head, encode_head
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
    (Recent(b"i" * 16, 6, 7, Position(1, 9)),),
    Position(1, 4),
    (Jump(0, 2000),),
)
#: Written down once and never changed: a head of today must be read for ever.
HEAD_BYTES = (
    "9cc30702920103920109cd03e805cf0000018bcfe568009194c41069696969696969696969696969696969"
    "0607920109920104919200cd07d080"
)
GRAVE_BYTES = "9cc2070292010392010acd03e8c00090c09080"
GRAVE = Head(False, 7, 2, Position(1, 3), Position(1, 10), 1000, None, 0, (), None, ())


@pytest.mark.parametrize(("head", "golden"), [(HEAD, HEAD_BYTES), (GRAVE, GRAVE_BYTES)], ids=["live", "grave"])
def test_the_layout_of_a_head_is_frozen(head: Head, golden: str) -> None:
    assert encode_head(head).hex() == golden
    assert decode_head(bytes.fromhex(golden)) == head


@pytest.mark.parametrize("data", [b"", b"\x90", bytes.fromhex(HEAD_BYTES)[:-1], b"\xff"])
def test_damaged_head_bytes_are_corrupt_and_the_remedy_is_told(data: bytes) -> None:
    with pytest.raises(Corrupt, match="rebuild"):
        decode_head(data)


def test_a_head_expires_its_time_after_the_last_append() -> None:
    assert HEAD.expires_at_ms == 1_700_000_000_005


def test_a_head_without_expiry_never_expires() -> None:
    assert Head(True, 1, 0, HEAD.incarnation, HEAD.position, 5, None, 0, (), None, ()).expires_at_ms is None


def test_a_grave_never_expires() -> None:
    assert Head(False, 1, 0, HEAD.incarnation, HEAD.position, 5, 5, 0, (), None, ()).expires_at_ms is None
