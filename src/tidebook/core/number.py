"""Numbers in error messages."""

from __future__ import annotations

_BITS_MAX = 128


def told_number(value: int) -> str:
    """A number as a message tells it: Python refuses to write out numbers of thousands of digits.

    >>> told_number(7)
    '7'
    >>> told_number(1 << 20_000)
    'a number of 20,001 bits'
    """
    bits = value.bit_length()
    return str(value) if bits <= _BITS_MAX else f"a number of {bits:,} bits"
