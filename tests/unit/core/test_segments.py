"""The segments of heads and events in the store, from Java's String.hashCode and from frozen sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidebook.core.segments import event_segment, head_segment, lower

#: The results of Java's String.hashCode.
JAVA_HASHES = {
    "": 0,
    "a": 97,
    "hello": 99162322,
    "hello world": 1794106052,
    "o-1": 108115,
    "polygenelubricants": -(2**31),
    "the quick brown fox jumps over the lazy dog": -2082818701,
    "ä": 228,
    "日本": 835047,
    "😀": 1772899,
}


@pytest.mark.parametrize(("text", "hash_"), JAVA_HASHES.items(), ids=repr)
@pytest.mark.parametrize("segments", [1, 2, 7, 100, 512])
def test_the_head_segment_is_the_java_hash_modulo_the_count(text: str, hash_: int, segments: int) -> None:
    java_remainder = abs(hash_) % segments * (1 if hash_ >= 0 else -1)  # Java's % has the sign of its left operand
    assert head_segment(text, segments) == abs(java_remainder)


def test_upper_and_lower_case_share_a_segment() -> None:
    assert head_segment("HELLO", 512) == head_segment("hello", 512) == 99162322 % 512


@given(st.text(), st.integers(1, 10_000))
def test_a_head_segment_is_below_the_count(id: str, segments: int) -> None:
    assert 0 <= head_segment(id, segments) < segments


@pytest.mark.parametrize(
    ("seq_nr", "size", "segment"), [(1, 1, 0), (2, 1, 1), (1, 5, 0), (5, 5, 0), (6, 5, 1), (10**15, 1000, 10**12 - 1)]
)
def test_an_event_is_in_the_segment_of_its_number(seq_nr: int, size: int, segment: int) -> None:
    assert event_segment(seq_nr, size) == segment


@pytest.mark.parametrize("text", ["ΑΣ", "ΣΑ", "ΑΣΑ", "Σ", "ΑΣ.", "Α.Σ", "ΑΣ.Α", "Α-Σ", "ΑΣ-Α", "ÄÖ", "İ", "ǅ", "日Σ"])
def test_the_frozen_lower_case_is_that_of_python(text: str) -> None:
    assert lower(text) == text.lower()
