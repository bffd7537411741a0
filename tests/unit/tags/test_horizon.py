"""The horizon is the least time of all partitions; one that was never replicated holds everything."""

from __future__ import annotations

from tidebook.core.position import Position
from tidebook.core.replication import Pointer
from tidebook.tags.horizon import NEVER_MS, Horizon, horizon_of


def pointer(time_ms: int) -> Pointer:
    return Pointer(Position(1, 0), time_ms)


def test_the_least_time_is_the_horizon_and_its_partition_is_named() -> None:
    found = horizon_of({"a": 2, "b": 1}, {"a": {0: pointer(50), 1: pointer(30)}, "b": {0: pointer(40)}})
    assert found == Horizon(30, 50, "a", 1)


def test_a_partition_that_was_never_replicated_holds_everything() -> None:
    assert horizon_of({"a": 2}, {"a": {0: pointer(50)}}) == Horizon(NEVER_MS, 50, "a", 1)


def test_a_topic_that_was_registered_after_the_pointers_were_read_holds_everything() -> None:
    assert horizon_of({"a": 1, "new": 1}, {"a": {0: pointer(50)}}).topic == "new"


def test_without_topics_there_is_nothing_to_deliver() -> None:
    assert horizon_of({}, {}) == Horizon(NEVER_MS, NEVER_MS)
