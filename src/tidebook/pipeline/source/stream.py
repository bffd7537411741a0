"""The log's records as a streaming DataFrame, whichever log it is."""

from __future__ import annotations

import msgspec
from pyspark.sql import DataFrame, SparkSession

from tidebook.core.errors import InvalidInput
from tidebook.pipeline.source.records import NAME, Offsets, RecordsSource
from tidebook.wiring.adapters import scheme
from tidebook.wiring.settings import Settings, settings_to_json


def read_records(spark: SparkSession, settings: Settings, starts: Offsets, *, records_max: int) -> DataFrame:
    """The records from `starts` on, at most `records_max` a micro-batch."""
    url = settings.section("log").url
    if url is None:
        return _embedded(spark, settings, starts, records_max)
    raise InvalidInput(f"[log] url: the pipeline cannot read {scheme(url)}:// yet")


def _embedded(spark: SparkSession, settings: Settings, starts: Offsets, records_max: int) -> DataFrame:
    spark.dataSource.register(RecordsSource)
    return (
        spark.readStream.format(NAME)
        .option("settings", settings_to_json(settings))
        .option("starts", msgspec.json.encode(starts).decode())
        .option("recordsMax", str(records_max))
        .load()
    )
