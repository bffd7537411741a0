"""Read the records of any log as a DataFrame, streaming or batch."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import col, unix_millis
from pyspark.sql.readwriter import DataFrameReader
from pyspark.sql.streaming.readwriter import DataStreamReader

from tidebook.core.errors import InvalidInput
from tidebook.pipeline.source.records import NAME, Offsets, RecordsSource
from tidebook.wiring.adapters import scheme
from tidebook.wiring.settings import Settings, settings_to_json
from tidebook.wiring.spark import kafka_client_options

#: Settings of the Java client, whose defaults wait half a second for more data and return 500 records per poll.
KAFKA_TUNING = {
    "fetch.max.wait.ms": "10",
    "max.poll.records": "10000",
    "max.partition.fetch.bytes": str(8 * 1024 * 1024),
    "fetch.max.bytes": str(64 * 1024 * 1024),
}

Reader = TypeVar("Reader", DataFrameReader, DataStreamReader)


def stream_records(spark: SparkSession, settings: Settings, starts: Offsets, *, records_max: int) -> DataFrame:
    """Return a stream of the records from `starts`, with at most `records_max` per micro-batch."""
    if _log_kind(settings) == "embedded":
        return _embedded(spark, spark.readStream, settings, starts).option("recordsMax", str(records_max)).load()
    return _columns(_kafka(spark.readStream, settings, starts).option("maxOffsetsPerTrigger", str(records_max)).load())


def read_records(spark: SparkSession, settings: Settings, starts: Offsets, stops: Offsets) -> DataFrame:
    """Return the records with starts ≤ offset < stops."""
    if _log_kind(settings) == "embedded":
        return _embedded(spark, spark.read, settings, starts).option("stops", _json(stops)).load()
    return _columns(_kafka(spark.read, settings, starts).option("endingOffsets", _json(stops)).load())


def coalesce_to_cores(spark: SparkSession, records: DataFrame) -> DataFrame:
    """In local mode, let each core run one task that replicates several log partitions concurrently."""
    context = spark.sparkContext
    return records.coalesce(context.defaultParallelism) if str(context.master).startswith("local") else records


def _log_kind(settings: Settings) -> str:
    url = settings.section("log").url
    if url is None:
        return "embedded"
    if scheme(url) == "kafka":
        return "kafka"
    raise InvalidInput(f"[log] url: the pipeline cannot read {scheme(url)}://")


def _embedded(spark: SparkSession, reader: Reader, settings: Settings, starts: Offsets) -> Reader:
    spark.dataSource.register(RecordsSource)
    return reader.format(NAME).option("settings", settings_to_json(settings)).option("starts", _json(starts))


def _kafka(reader: Reader, settings: Settings, starts: Offsets) -> Reader:
    reader = reader.format("kafka")
    for name, value in {**kafka_client_options(settings), **KAFKA_TUNING}.items():
        reader = reader.option(f"kafka.{name}", value)
    # Partitions are assigned explicitly: a topic's partition count is fixed in its configuration.
    assigned = {topic: [int(number) for number in numbers] for topic, numbers in starts.items()}
    return (
        reader.option("assign", msgspec.json.encode(assigned).decode())
        .option("startingOffsets", _json(starts))
        .option("failOnDataLoss", "true")
    )


def _columns(found: DataFrame) -> DataFrame:
    at = unix_millis(col("timestamp")).alias("timestamp_ms")
    return found.select("topic", "partition", "offset", at, "key", "value")


def _json(offsets: Offsets) -> str:
    return msgspec.json.encode(offsets).decode()
