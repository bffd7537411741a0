"""Checks of the source names and mark steps that `put_once` takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from tidebook.core.errors import InvalidInput
from tidebook.core.payload import encode_text
from tidebook.queue.port import Step

TEXT_BYTES_MAX: Final = 1_000
PART_MAX: Final = 2**31 - 1


def check_source_name(value: object) -> str:
    """Return the name of a source; raise InvalidInput if it is not one."""
    return _check_text(value, "a source's name")


def check_steps(steps: Iterable[Step]) -> Sequence[Step]:
    """Return the steps of a put; raise InvalidInput if one is malformed or a part of the source moves twice."""
    given: object = steps
    if not isinstance(given, Iterable) or isinstance(given, str | bytes | Step):
        raise InvalidInput(f"steps are a list of Step, not {type(given).__name__}")
    checked = list(given)
    for step in checked:
        if not isinstance(step, Step):
            raise InvalidInput(f"steps are a list of Step: {step!r} is not a Step")
        if type(step.part) is not int or not 0 <= step.part <= PART_MAX:
            raise InvalidInput(f"a step's part is a number from 0 to {PART_MAX}, not {step.part!r}")
        if step.before is not None:
            _check_text(step.before, "the place before a step")
        _check_text(step.after, "the place after a step")
    if len({step.part for step in checked}) < len(checked):
        raise InvalidInput("two steps name the same part of the source: one put moves it once")
    return checked


def _check_text(value: object, what: str) -> str:
    if type(value) is not str or not value or "\x00" in value:
        raise InvalidInput(f"{what} is text, not empty and without NUL: {value!r:.60} is not")
    size_bytes = len(encode_text(value, what))
    if size_bytes > TEXT_BYTES_MAX:
        raise InvalidInput(f"{what} may take {TEXT_BYTES_MAX:,} bytes, this one takes {size_bytes:,}")
    return value
