"""Sequence numbers: from 1 to the largest integer that every JSON reader represents exactly."""

from __future__ import annotations

import pytest

from tidebook.core.errors import InvalidInput
from tidebook.core.seq_nr import FIRST, LAST, seq_nr


@pytest.mark.parametrize("value", [FIRST, 2, 10**15, LAST])
def test_a_number_in_range_is_returned(value: int) -> None:
    assert seq_nr(value) == value


@pytest.mark.parametrize("value", [0, -1, LAST + 1, 2**63, 2**64])
def test_a_number_out_of_range_is_refused_and_the_error_names_the_range(value: int) -> None:
    with pytest.raises(InvalidInput, match=f"from 1 to {LAST}, not {value}"):
        seq_nr(value)


@pytest.mark.parametrize("value", [None, "1", 1.0, True, b"1", [1]])
def test_a_value_that_is_not_an_integer_is_refused(value: object) -> None:
    with pytest.raises(InvalidInput, match="whole number"):
        seq_nr(value)


def test_0_is_accepted_if_least_is_0() -> None:
    assert seq_nr(0, least=0) == 0


def test_the_error_names_the_parameter() -> None:
    with pytest.raises(InvalidInput, match=r"^expected must be"):
        seq_nr(-1, name="expected", least=0)


def test_the_last_number_is_exactly_representable_as_a_double() -> None:
    assert int(float(LAST)) == LAST


def test_a_number_too_long_to_print_is_refused() -> None:
    with pytest.raises(InvalidInput, match="16,610 bits"):
        seq_nr(10**5000)
