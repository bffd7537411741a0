"""A client of Spark Connect that reads journals: `python -m tests.pipeline.connect_client FOLDER CHECKPOINT`."""

from __future__ import annotations

import json
import sys


def main() -> None:
    """Read a table, a filtered one and a stream, and print what they brought."""
    folder, checkpoint = sys.argv[1:]
    from pyspark.sql import SparkSession

    from tidebook.pipeline.source.format import register

    spark = SparkSession.builder.remote("local[2]").getOrCreate()
    register(spark)
    reader = spark.read.format("tidebook").option("book", folder).option("topic", "orders").option("splits", "2")
    rows = reader.load().select("id", "seq_nr").collect()
    filtered = reader.load().where("id = 'b' and seq_nr > 3").select("id", "seq_nr").collect()
    stream = spark.readStream.format("tidebook").option("book", folder).option("topic", "orders").load()
    writer = stream.select("id", "seq_nr").writeStream.format("parquet").option("path", f"{checkpoint}/out")
    query = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
    query.awaitTermination()
    streamed = spark.read.parquet(f"{checkpoint}/out").collect()
    found = {"table": rows, "filtered": filtered, "stream": streamed}
    print(json.dumps({name: sorted(map(tuple, each)) for name, each in found.items()}))
    spark.stop()


if __name__ == "__main__":
    main()
