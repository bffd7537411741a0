"""Sequence numbers: the age of a journal, counted from 1."""

from __future__ import annotations

from typing import NewType

from tidebook.core.errors import InvalidInput
from tidebook.core.number import told_number

SeqNr = NewType("SeqNr", int)

FIRST = SeqNr(1)
#: The largest integer that every JSON reader keeps exactly.
LAST = SeqNr(2**53 - 1)


def seq_nr(value: object, *, name: str = "seq_nr", least: int = FIRST) -> SeqNr:
    """Check that `value` can be a sequence number.

    >>> seq_nr(3)
    3
    """
    if type(value) is not int:
        raise InvalidInput(f"{name} must be a whole number, not {type(value).__name__}")
    if not least <= value <= LAST:
        raise InvalidInput(f"{name} must be from {least} to {LAST}, not {told_number(value)}")
    return SeqNr(value)
