"""Run queries over one DataFrame: each must return its own rows, whatever the filters of earlier queries."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: Spark's switch: with it on, Spark 4.2.0 shares what one query has pushed down with every scan of the DataFrame.
PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
IDS, EVENTS = ("k1", "k2", "k3"), 5

Rows = list[tuple[str, int]]


def query_one_frame(frame: DataFrame) -> dict[str, Rows]:
    """Run several queries over a frame of the journals `IDS` with `EVENTS` events each; return the rows by query."""
    events = frame.select("id", "seq_nr")
    one, other = events.where("id = 'k1'"), events.where("id = 'k3'")
    found = {"filtered": _rows(events.where("id = 'k2' and seq_nr > 3")), "after a filter": _rows(events)}
    found["union"] = _rows(one.union(other))
    joined = one.withColumnRenamed("id", "one").join(other, "seq_nr")
    found["self join"] = _rows(joined.where("one = 'k1'"))
    frame.createOrReplaceTempView("one_frame")
    last = "SELECT id, seq_nr FROM one_frame WHERE seq_nr = (SELECT max(seq_nr) FROM one_frame WHERE id = 'k2')"
    found["subquery"] = _rows(frame.sparkSession.sql(last))
    found["not in"] = _rows(events.join(other.select("id"), "id", "left_anti"))
    cached = one.cache()
    found["cached"] = _rows(cached)
    found["beside a cache"] = _rows(other)
    found["cached again"] = _rows(cached)
    cached.unpersist()
    found["at the end"] = _rows(events)
    return found


def expected_rows() -> dict[str, Rows]:
    """Return what `query_one_frame` must return if no query affects another."""
    of = {id: [(id, number) for number in range(1, EVENTS + 1)] for id in IDS}
    everything = [row for id in IDS for row in of[id]]
    return {
        "filtered": [("k2", 4), ("k2", 5)],
        "after a filter": everything,
        "union": of["k1"] + of["k3"],
        "self join": of["k3"],
        "subquery": [(id, EVENTS) for id in IDS],
        "not in": of["k1"] + of["k2"],
        "cached": of["k1"],
        "beside a cache": of["k3"],
        "cached again": of["k1"],
        "at the end": everything,
    }


def _rows(frame: DataFrame) -> Rows:
    return sorted((row["id"], row["seq_nr"]) for row in frame.collect())
