"""Check the rows that the data source read, because the speed of a wrong read is meaningless."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def check_rows(frame: DataFrame, *, journals: int, events: int) -> None:
    """Raise an error unless this query and others return the events 1 to `events` of each journal, each once."""
    from pyspark.sql.functions import col, count, count_distinct, count_if, max

    of_journal = frame.groupBy("id").agg(
        count("*").alias("rows"), count_distinct("seq_nr").alias("numbers"), max("seq_nr").alias("last")
    )
    right = (col("rows") == events) & (col("numbers") == events) & (col("last") == events)
    found = of_journal.agg(count("*").alias("all"), count_if(right).alias("right")).collect()[0]
    if tuple(found) != (journals, journals):
        raise AssertionError(f"{found['all']} journals, of which {found['right']} are right: {journals} were written")
    # The filters of two queries over one frame must not affect each other.
    both = frame.where("id = 'j-1'").union(frame.where("id = 'j-2'")).groupBy("id").count().collect()
    if {row["id"]: row["count"] for row in both} != {"j-1": events, "j-2": events}:
        raise AssertionError(f"a union of two filters returned {both}")
