"""Where entries come from that are put once: a source's name, and the steps of its marks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from tidebook.core.errors import InvalidInput
from tidebook.core.payload import encode_text
from tidebook.sql.port.queue import Step

TEXT_BYTES_MAX: Final = 1_000
PART_MAX: Final = 2**31 - 1


def source_name(value: object) -> str:
    """Check a source's name."""
    return _text(value, "a source's name")


def checked_steps(steps: Iterable[Step]) -> Sequence[Step]:
    """Check the steps that go with a put: each part of the source moves once."""
    given: object = steps
    if not isinstance(given, Iterable) or isinstance(given, str | bytes | Step):
        raise InvalidInput(f"steps are a list of Step, not {type(given).__name__}")
    checked = list(given)
    for step in checked:
        if not isinstance(step, Step):
            raise InvalidInput(f"steps are a list of Step: {step!r} is none")
        if type(step.part) is not int or not 0 <= step.part <= PART_MAX:
            raise InvalidInput(f"a step's part is a number from 0 to {PART_MAX}, not {step.part!r}")
        if step.before is not None:
            _text(step.before, "the place before a step")
        _text(step.after, "the place after a step")
    if len({step.part for step in checked}) < len(checked):
        raise InvalidInput("a part of the source is named by two steps: one put moves it once")
    return checked


def _text(value: object, what: str) -> str:
    if type(value) is not str or not value or "\x00" in value:
        raise InvalidInput(f"{what} is text, not empty and without NUL: {value!r:.60} is not")
    size_bytes = len(encode_text(value, what))
    if size_bytes > TEXT_BYTES_MAX:
        raise InvalidInput(f"{what} may take {TEXT_BYTES_MAX:,} bytes, this one takes {size_bytes:,}")
    return value
