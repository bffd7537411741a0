"""Tables over the journals of a topic."""

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import count, max

spark = SparkSession.active()
OPTIONS = {
    "book": spark.conf.get("spark.tidebook.book"),
    "topic": spark.conf.get("spark.tidebook.topic"),
    "payload": "json",
}


@dp.table
def events() -> DataFrame:
    """Append each event once, as soon as it is replicated; a run continues where the last one stopped."""
    return spark.readStream.format("tidebook").options(**OPTIONS).load()


@dp.materialized_view
def journals() -> DataFrame:
    """Compute one row for each journal, with the events that are not replicated yet; a run computes all of them."""
    found = spark.read.format("tidebook").options(**OPTIONS).load()
    return found.groupBy("id").agg(count("*").alias("events"), max("seq_nr").alias("last_seq_nr"))
