"""A Spark job over the journals of a topic: it writes the number of events and the total of each journal as Parquet."""

from __future__ import annotations

import sys

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import count, get_json_object, sum


def totals_by_journal(events: DataFrame) -> DataFrame:
    """Return one row for each journal: its id, the number of its events, and the sum of their `total`."""
    total = get_json_object("payload", "$.total").cast("long")
    return events.groupBy("id").agg(count("*").alias("events"), sum(total).alias("total"))


def main(book: str, topic: str, target: str) -> None:
    """Read the topic of a book, and write its totals."""
    spark = SparkSession.builder.appName(f"totals of {topic}").getOrCreate()
    events = spark.read.format("tidebook").option("book", book).option("topic", topic).option("payload", "json").load()
    totals_by_journal(events).write.mode("overwrite").parquet(target)
    for row in spark.read.parquet(target).orderBy("id").collect():
        print(f"{row.id}: {row.events} events, total {row.total}")
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
