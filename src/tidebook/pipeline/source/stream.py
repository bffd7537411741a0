"""The log's records as a streaming DataFrame, whichever log it is."""

from __future__ import annotations

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import col, unix_millis

from tidebook.core.errors import InvalidInput
from tidebook.pipeline.source.records import NAME, Offsets, RecordsSource
from tidebook.wiring.adapters import scheme
from tidebook.wiring.settings import Settings, settings_to_json
from tidebook.wiring.spark import kafka_client_options

#: Of the Java client. Its own defaults wait half a second for more and return 500 records at a time.
KAFKA_TUNING = {
    "fetch.max.wait.ms": "10",
    "max.poll.records": "10000",
    "max.partition.fetch.bytes": str(8 * 1024 * 1024),
    "fetch.max.bytes": str(64 * 1024 * 1024),
}


def read_records(spark: SparkSession, settings: Settings, starts: Offsets, *, records_max: int) -> DataFrame:
    """The records from `starts` on, at most `records_max` a micro-batch."""
    url = settings.section("log").url
    if url is None:
        return _embedded(spark, settings, starts, records_max)
    if scheme(url) == "kafka":
        return _kafka(spark, settings, starts, records_max)
    raise InvalidInput(f"[log] url: the pipeline cannot read {scheme(url)}://")


def _embedded(spark: SparkSession, settings: Settings, starts: Offsets, records_max: int) -> DataFrame:
    spark.dataSource.register(RecordsSource)
    return (
        spark.readStream.format(NAME)
        .option("settings", settings_to_json(settings))
        .option("starts", msgspec.json.encode(starts).decode())
        .option("recordsMax", str(records_max))
        .load()
    )


def _kafka(spark: SparkSession, settings: Settings, starts: Offsets, records_max: int) -> DataFrame:
    reader = spark.readStream.format("kafka")
    for name, value in {**kafka_client_options(settings), **KAFKA_TUNING}.items():
        reader = reader.option(f"kafka.{name}", value)
    # By number, for the partition count is frozen; never by what the broker has today.
    assigned = {topic: [int(number) for number in numbers] for topic, numbers in starts.items()}
    found = (
        reader.option("assign", msgspec.json.encode(assigned).decode())
        .option("startingOffsets", msgspec.json.encode(starts).decode())
        .option("maxOffsetsPerTrigger", str(records_max))
        .option("failOnDataLoss", "true")
        .load()
    )
    at = unix_millis(col("timestamp")).alias("timestamp_ms")
    return found.select("topic", "partition", "offset", at, "key", "value")
