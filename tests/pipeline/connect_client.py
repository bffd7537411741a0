"""A client of Spark Connect that reads journals: `python -m tests.pipeline.connect_client URL FOLDER CHECKPOINT`."""

from __future__ import annotations

import json
import sys

import tidebook
from tests.pipeline.one_frame import PUSHDOWN, query_one_frame

#: Options that are wrong: a value, a missing book, an unknown topic, an unknown option.
WRONG = ({"freshness": "now"}, {"book": "/nowhere/book"}, {"topic": "oders"}, {"topics": "orders"})


def main() -> None:
    """Read a table, run several queries over one of its frames, read a stream; print the rows and the errors.

    Another table is read through the session of `tidebook.spark`.
    """
    url, folder, checkpoint = sys.argv[1:]
    from pyspark.sql import SparkSession

    from tidebook.pipeline.source.format import register

    spark = SparkSession.builder.remote(url).getOrCreate()
    register(spark)
    reader = spark.read.format("tidebook").option("book", folder).option("topic", "orders").option("splits", "2")
    rows = reader.load().select("id", "seq_nr").collect()
    queries = {}
    for pushdown in ("false", "true"):
        spark.conf.set(PUSHDOWN, pushdown)
        queries[pushdown] = query_one_frame(reader.load())
    stream = spark.readStream.format("tidebook").option("book", folder).option("topic", "orders").load()
    writer = stream.select("id", "seq_nr").writeStream.format("parquet").option("path", f"{checkpoint}/out")
    query = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
    query.awaitTermination()
    streamed = spark.read.parquet(f"{checkpoint}/out").collect()
    # Otherwise Spark's own client adds the server's stack trace to every error.
    spark.conf.set("spark.sql.connect.serverStacktrace.enabled", "false")
    errors = []
    for option in WRONG:
        try:
            spark.read.format("tidebook").options(**{"book": folder, "topic": "orders", **option}).load().count()
        except Exception as caught:
            errors.append(str(caught))
    session = tidebook.spark(folder)
    assert session is spark
    own = session.read.format("tidebook").option("topic", "orders").load().select("id", "seq_nr").collect()
    tables = {"table": rows, "stream": streamed, "own": own}
    found = {name: sorted(map(tuple, each)) for name, each in tables.items()}
    print(json.dumps({**found, "queries": queries, "errors": errors}))
    spark.stop()


if __name__ == "__main__":
    main()
