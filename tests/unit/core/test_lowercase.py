"""The frozen lower case: that of Python 3.11, on every Python."""

from __future__ import annotations

import sys
import unicodedata
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidebook.core import segments
from tidebook.core.segments import head_segment, lower

FROZEN = "14.0.0"
of_the_frozen_version = pytest.mark.skipif(
    unicodedata.unidata_version != FROZEN, reason=f"this Python has Unicode {unicodedata.unidata_version}, not {FROZEN}"
)
#: All code points but surrogates, which no id may contain.
CODE_POINTS = [*range(0xD800), *range(0xE000, sys.maxunicode + 1)]
#: All assigned code points, and some of the others.
NEAR_SIGMA = [code for code in CODE_POINTS if code < 0x20000 or 0xE0000 <= code < 0xE1000 or not code % 97]
#: Letters with and without case, ignorable marks, and sigmas.
around_sigma = st.text(
    st.sampled_from("aBßİΣσς \u0301'.\u00ad1日ʰⅧⓐ\u1d7f𐐀") | st.characters(codec="utf-8"), max_size=8
)


@of_the_frozen_version
def test_every_code_point_has_the_lower_case_of_python_3_11() -> None:
    text = "\n".join(map(chr, CODE_POINTS))
    assert lower(text).split("\n") == text.lower().split("\n")


@of_the_frozen_version
@pytest.mark.parametrize("context", ["A{}\u03a3", " {}\u03a3", "A\u03a3{}", "A\u03a3{}B"])
def test_a_sigma_beside_every_code_point_has_the_lower_case_of_python_3_11(context: str) -> None:
    # Lines do not affect each other: a line feed has no case and is not ignorable.
    text = "\n".join(context.format(chr(code)) for code in NEAR_SIGMA)
    assert lower(text).split("\n") == text.lower().split("\n")


@of_the_frozen_version
@given(around_sigma)
def test_a_text_has_the_lower_case_of_python_3_11(text: str) -> None:
    assert lower(text) == text.lower()


def test_the_tables_are_frozen_whatever_unicode_version_the_running_python_has() -> None:
    lower_case, ignorable, cased = segments._tables()
    tables = (sorted(lower_case.items()), sorted(ignorable), sorted(cased))
    assert (
        sha256(repr(tables).encode()).hexdigest() == "e88e7cc92d05ac31f982e3b52fb6902481e20c92437ae76d5a933d79f2ef5147"
    )


@pytest.mark.parametrize(
    ("text", "lowered"),
    [
        ("", ""),
        ("Order-1", "order-1"),
        ("ÄÖÜ", "äöü"),
        ("İ", "i\u0307"),
        ("ΟΔΟΣ", "οδος"),
        ("ΟΔΟΣ.", "οδος."),
        ("ΣΑΣ ΣΑ", "σας σα"),
        ("Σ", "σ"),
        ("𐐀", "𐐨"),
        ("\ua7cb\ua7cc\ua7da\ua7dc\U00010d50", "\ua7cb\ua7cc\ua7da\ua7dc\U00010d50"),
    ],
    ids=ascii,
)
def test_letters_of_later_unicode_versions_are_unchanged(text: str, lowered: str) -> None:
    assert lower(text) == lowered


def test_the_segment_of_a_head_does_not_depend_on_the_running_python() -> None:
    assert head_segment("\ua7dc", 512) == 0xA7DC % 512  # Unicode 16 gives it the lower case U+019B
    assert head_segment("ÄÖ", 512) == head_segment("äö", 512)


def test_the_segment_of_a_head_never_depends_on_str_lower() -> None:
    class OfLaterPython(str):
        """Text whose `lower` returns something else, as for a letter that got a lower case in a later Unicode."""

        __slots__ = ()

        def lower(self) -> str:
            return "another"

    assert head_segment(OfLaterPython("ÄÖ"), 512) == head_segment("äö", 512) == (0xE4 * 31 + 0xF6) % 512
