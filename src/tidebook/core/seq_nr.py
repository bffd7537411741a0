"""Sequence numbers, which number the events of a journal from 1."""

from __future__ import annotations

from typing import NewType

from tidebook.core.bounds import NUMBER_MAX
from tidebook.core.errors import InvalidInput, format_int

SeqNr = NewType("SeqNr", int)

FIRST = SeqNr(1)
LAST = SeqNr(NUMBER_MAX)


def seq_nr(value: object, *, name: str = "seq_nr", least: int = FIRST) -> SeqNr:
    """Return `value` if it is a sequence number of at least `least`; raise InvalidInput otherwise.

    >>> seq_nr(3)
    3
    """
    if type(value) is not int:
        raise InvalidInput(f"{name} must be a whole number, not {type(value).__name__}")
    if not least <= value <= LAST:
        raise InvalidInput(f"{name} must be from {least} to {LAST}, not {format_int(value)}")
    return SeqNr(value)
