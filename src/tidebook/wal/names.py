"""Validate names of namespaces and ids of regions and tables; derive topic names from them."""

from __future__ import annotations

import re
from typing import Final, NewType

from tidebook.core.errors import InvalidInput

RegionId = NewType("RegionId", int)
TableId = NewType("TableId", int)

#: The largest integer that every JSON parser represents exactly.
ID_MAX: Final = 2**53 - 1
NAMESPACE_LENGTH_MAX: Final = 150

_NAMESPACE = re.compile(rf"[A-Za-z0-9._-]{{1,{NAMESPACE_LENGTH_MAX}}}")
_DATA_TOPIC = re.compile(r"wal\.(?P<namespace>.+)\.(?P<region>0|[1-9][0-9]*)\.data")


def namespace_name(value: object) -> str:
    """Return a valid namespace, else raise `InvalidInput`; every log allows these characters in a topic name."""
    if type(value) is not str:
        raise InvalidInput(f"a namespace is text, not {type(value).__name__}")
    if not _NAMESPACE.fullmatch(value):
        raise InvalidInput(
            f"namespace {value[:80]!r} must be 1 to {NAMESPACE_LENGTH_MAX} of the characters A-Z a-z 0-9 . _ -"
        )
    return value


def region_id(value: object) -> RegionId:
    """Return a valid region id, else raise `InvalidInput`."""
    return RegionId(whole_number(value, "a region's id"))


def table_id(value: object) -> TableId:
    """Return a valid table id, else raise `InvalidInput`."""
    return TableId(whole_number(value, "a table's id"))


def region_of(topic: str, namespace: str) -> RegionId | None:
    """Return the region whose data topic this is; None if it is not a data topic of the namespace."""
    found = _DATA_TOPIC.fullmatch(topic)
    if found is None or found["namespace"] != namespace:
        return None
    return RegionId(int(found["region"]))


def whole_number(value: object, what: str) -> int:
    """Return an integer from 0 to `ID_MAX`, else raise `InvalidInput`; `what` names the argument."""
    if type(value) is not int:
        raise InvalidInput(f"{what} is a whole number, not {type(value).__name__}")
    if not 0 <= value <= ID_MAX:
        raise InvalidInput(f"{what} must be from 0 to {ID_MAX}, not {value}")
    return value
