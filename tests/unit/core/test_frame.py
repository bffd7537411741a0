"""The frame of a record: sealed contents are unsealed unchanged, and damage is distinguished from another version."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidebook.core.errors import Corrupt, UnknownVersion
from tidebook.core.frame import HEADER_BYTES, Frame

FRAME = Frame(0x7B, 1, "the record")
NEWER = Frame(0x7B, 2, "the record")
OTHER = Frame(0x7C, 1, "another record")
contents = st.binary(max_size=20)


@given(st.lists(contents, max_size=5))
def test_contents_sealed_alone_or_together_are_unsealed(contents: list[bytes]) -> None:
    values = [FRAME.seal(content) for content in contents]
    assert FRAME.seal_all(contents) == values
    assert [bytes(FRAME.unseal(value)) for value in values] == contents
    assert [len(value) - HEADER_BYTES for value in values] == [len(content) for content in contents]


def test_the_content_of_a_frame_may_be_empty() -> None:
    assert bytes(FRAME.unseal(FRAME.seal(b""))) == b""


@given(contents)
def test_another_version_with_a_valid_checksum_is_named(content: bytes) -> None:
    with pytest.raises(UnknownVersion) as caught:
        FRAME.unseal(NEWER.seal(content))
    assert (caught.value.version, caught.value.known) == (2, 1)


@given(contents, st.data())
def test_a_frame_of_any_version_with_one_changed_byte_is_corrupt(content: bytes, data: st.DataObject) -> None:
    for frame in (FRAME, NEWER):
        value = bytearray(frame.seal(content))
        value[data.draw(st.integers(0, len(value) - 1))] ^= data.draw(st.integers(1, 255))
        with pytest.raises(Corrupt) as caught:
            FRAME.unseal(bytes(value))
        assert type(caught.value) is Corrupt


@pytest.mark.parametrize("value", [b"", b"\x7b", FRAME.seal(b"")[:-1], OTHER.seal(b"a")], ids=repr)
def test_bytes_that_are_too_short_or_have_another_magic_byte_are_not_a_record(value: bytes) -> None:
    with pytest.raises(Corrupt, match="the bytes are not the record"):
        FRAME.unseal(value)
