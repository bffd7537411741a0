"""What a query's filters are taken for."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

pytest.importorskip("pyspark")

from pyspark.sql.datasource import EqualTo, Filter, GreaterThan, In, LessThanOrEqual, StringContains

from tidebook.core.errors import InvalidInput
from tidebook.pipeline.source.wanted import Wanted, narrow, wanted_of


def test_options_name_topics_ids_and_a_tag() -> None:
    wanted = wanted_of({"topic": "a, b", "id": "x", "tag": "paid"})
    assert wanted == Wanted(topics=frozenset({"a", "b"}), ids=frozenset({"x"}), tag="paid")


def test_an_option_without_a_name_is_refused() -> None:
    with pytest.raises(InvalidInput):
        wanted_of({"topic": " , "})


def test_filters_that_can_be_taken_over_are() -> None:
    filters: list[Filter] = [
        EqualTo(("topic",), "orders"),
        In(("id",), ("a", "b")),
        GreaterThan(("seq_nr",), 5),
        LessThanOrEqual(("seq_nr",), 9),
    ]
    wanted, left = narrow(Wanted(), filters)
    assert left == []
    assert (wanted.topics, wanted.ids) == (frozenset({"orders"}), frozenset({"a", "b"}))
    assert (wanted.seq_nr_from, wanted.seq_nr_to) == (6, 9)


def test_a_time_narrows_and_is_left_to_spark_too() -> None:
    at = datetime(2026, 1, 1, tzinfo=UTC)
    wanted, left = narrow(Wanted(), [GreaterThan(("timestamp",), at)])
    assert wanted.time_from_ms == 1_767_225_600_000
    assert len(left) == 1


def test_what_is_unknown_is_left_to_spark() -> None:
    wanted, left = narrow(Wanted(), [StringContains(("id",), "x"), EqualTo(("offset",), 3)])
    assert wanted == Wanted()
    assert len(left) == 2


def test_two_filters_on_the_same_column_both_hold() -> None:
    wanted, _ = narrow(Wanted(topics=frozenset({"a", "b"})), [In(("topic",), ("b", "c"))])
    assert wanted.topics == frozenset({"b"})
