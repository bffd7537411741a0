"""What namespaces, regions and tables may be called, and the topics that follow from it."""

from __future__ import annotations

import re
from typing import Final, NewType

from tidebook.core.errors import InvalidInput

RegionId = NewType("RegionId", int)
TableId = NewType("TableId", int)

#: The largest integer that every JSON reader keeps exactly.
ID_MAX: Final = 2**53 - 1
NAMESPACE_LENGTH_MAX: Final = 150

_NAMESPACE = re.compile(rf"[A-Za-z0-9._-]{{1,{NAMESPACE_LENGTH_MAX}}}")
_DATA_TOPIC = re.compile(r"wal\.(?P<namespace>.+)\.(?P<region>0|[1-9][0-9]*)\.data")


def namespace_name(value: object) -> str:
    """Check a namespace: the letters, digits and `. _ -` that every log accepts in a topic.

    >>> namespace_name("metrics")
    'metrics'
    """
    if type(value) is not str:
        raise InvalidInput(f"a namespace is text, not {type(value).__name__}")
    if not _NAMESPACE.fullmatch(value):
        raise InvalidInput(
            f"namespace {value[:80]!r} must be 1 to {NAMESPACE_LENGTH_MAX} of the characters A-Z a-z 0-9 . _ -"
        )
    return value


def region_id(value: object) -> RegionId:
    """Check a region's id, a whole number from 0."""
    return RegionId(whole_number(value, "a region's id"))


def table_id(value: object) -> TableId:
    """Check a table's id, a whole number from 0."""
    return TableId(whole_number(value, "a table's id"))


def data_topic(namespace: str, region: RegionId) -> str:
    """The topic that holds the region's records."""
    return f"wal.{namespace}.{region}.data"


def meta_topic(namespace: str, region: RegionId) -> str:
    """The topic that holds the region's snapshots."""
    return f"wal.{namespace}.{region}.meta"


def region_of(topic: str, namespace: str) -> RegionId | None:
    """The region whose data topic this is, where it is one of the namespace."""
    found = _DATA_TOPIC.fullmatch(topic)
    if found is None or found["namespace"] != namespace:
        return None
    return RegionId(int(found["region"]))


def whole_number(value: object, what: str) -> int:
    """Check a number of an argument: from 0, and exact in every JSON reader."""
    if type(value) is not int:
        raise InvalidInput(f"{what} is a whole number, not {type(value).__name__}")
    if not 0 <= value <= ID_MAX:
        raise InvalidInput(f"{what} must be from 0 to {ID_MAX}, not {value}")
    return value
