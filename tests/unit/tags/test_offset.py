"""Offsets come back as they were, and nothing else is taken for one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidebook.core.errors import InvalidInput
from tidebook.core.replication import TagPlace
from tidebook.tags.offset import decode_offset, encode_offset

numbers = st.integers(0, 2**47)
places = st.builds(TagPlace, st.just("paid"), numbers, st.text(max_size=20), numbers, numbers, numbers, numbers)


@given(places)
def test_an_offset_is_the_same_after_its_text(place: TagPlace) -> None:
    assert decode_offset("paid", encode_offset(place)) == place


@given(st.text(max_size=30))
def test_any_other_text_is_refused(text: str) -> None:
    try:
        place = decode_offset("paid", text)
    except InvalidInput:
        return
    assert decode_offset("paid", encode_offset(place)) == place


def test_an_offset_of_another_version_is_refused() -> None:
    with pytest.raises(InvalidInput, match="no offset"):
        decode_offset("paid", "kQI")
