"""Which events a query wants, told by its options and filters. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
)

from tidebook.core.errors import InvalidInput

LEAST, MOST = 0, 2**62
NEVER_NULL = frozenset({"topic", "id", "seq_nr", "timestamp", "payload", "payload_type", "tags", "partition", "offset"})


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of a query; None means all."""

    topics: frozenset[str] | None = None
    ids: frozenset[str] | None = None
    tag: str | None = None
    seq_nr_from: int = 1
    seq_nr_to: int = MOST
    time_from_ms: int = LEAST
    time_to_ms: int = MOST

    def of_topics(self, names: Iterable[str]) -> list[str]:
        """Those of the topics that are wanted."""
        return [name for name in names if self.topics is None or name in self.topics]

    @property
    def narrows(self) -> bool:
        """Whether single events must be looked at."""
        return self != Wanted(topics=self.topics, tag=self.tag)

    def takes(self, id: str, seq_nr: int, timestamp_ms: int) -> bool:
        """Whether an event is wanted, by what is known of it without decoding it."""
        return (
            self.seq_nr_from <= seq_nr <= self.seq_nr_to
            and self.time_from_ms <= timestamp_ms <= self.time_to_ms
            and (self.ids is None or id in self.ids)
        )


def wanted_of(options: Mapping[str, str]) -> Wanted:
    """What the options topic, id and tag ask for; topics and ids are separated by commas."""
    return Wanted(topics=_names(options.get("topic")), ids=_names(options.get("id")), tag=options.get("tag") or None)


def _names(text: str | None) -> frozenset[str] | None:
    if text is None:
        return None
    names = frozenset(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise InvalidInput("the options topic and id name at least one each, separated by commas")
    return names


def narrow(wanted: Wanted, filters: Iterable[Filter]) -> tuple[Wanted, list[Filter]]:
    """Take over the filters that can be; those that are returned are left to Spark.

    Times are narrowed to the millisecond and left to Spark too, which knows them better.
    """
    left: list[Filter] = []
    for each in filters:
        narrowed = _narrow(wanted, each)
        if narrowed is None or (getattr(each, "attribute", ()) == ("timestamp",) and narrowed is not wanted):
            left.append(each)
        wanted = narrowed or wanted
    return wanted, left


def _narrow(wanted: Wanted, each: Filter) -> Wanted | None:
    match each:
        case IsNotNull(attribute=(name,)) if name in NEVER_NULL:
            return wanted
        case EqualTo(attribute=("topic",), value=value):
            return _only(wanted, "topics", {value})
        case In(attribute=("topic",), value=values):
            return _only(wanted, "topics", set(values))
        case EqualTo(attribute=("id",), value=value):
            return _only(wanted, "ids", {value})
        case In(attribute=("id",), value=values):
            return _only(wanted, "ids", set(values))
        case EqualTo(attribute=("seq_nr" | "timestamp" as name,), value=value):
            return _between(wanted, name, _number(value), _number(value))
        case GreaterThan(attribute=("seq_nr" | "timestamp" as name,), value=value):
            return _between(wanted, name, _number(value) + (name == "seq_nr"), MOST)
        case GreaterThanOrEqual(attribute=("seq_nr" | "timestamp" as name,), value=value):
            return _between(wanted, name, _number(value), MOST)
        case LessThan(attribute=("seq_nr" | "timestamp" as name,), value=value):
            return _between(wanted, name, LEAST, _number(value) - (name == "seq_nr"))
        case LessThanOrEqual(attribute=("seq_nr" | "timestamp" as name,), value=value):
            return _between(wanted, name, LEAST, _number(value))
        case _:
            return None


def _only(wanted: Wanted, name: str, values: set[Any]) -> Wanted:
    before: frozenset[str] | None = getattr(wanted, name)
    found = frozenset(values) if before is None else before & values
    return msgspec.structs.replace(wanted, **{name: found})


def _between(wanted: Wanted, name: str, low: int, high: int) -> Wanted:
    if name == "seq_nr":
        return msgspec.structs.replace(
            wanted, seq_nr_from=max(wanted.seq_nr_from, low), seq_nr_to=min(wanted.seq_nr_to, high)
        )
    return msgspec.structs.replace(
        wanted, time_from_ms=max(wanted.time_from_ms, low), time_to_ms=min(wanted.time_to_ms, high)
    )


def _number(value: Any) -> int:
    """A number as it is, a time as its millisecond; a time without a zone is in UTC."""
    if isinstance(value, datetime):
        moment = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
        return int(moment.timestamp() * 1000)
    return int(value)
