"""`format("tidebook")`: what a book holds, as Spark tables and streams. The options say which part of it.

from tidebook.pipeline.source.format import register
register(spark)
spark.read.format("tidebook").option("book", "tidebook.toml").option("topic", "orders").load()
spark.read.format("tidebook").option("book", "tidebook.toml").option("wal", "metrics").load()
"""

from __future__ import annotations

from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader
from pyspark.sql.types import StructType

from tidebook.core.errors import InvalidInput
from tidebook.pipeline.source import events, regions
from tidebook.pipeline.source.journal_stream import JournalStream
from tidebook.pipeline.source.journals import journals_reader

NAME = "tidebook"


class TidebookSource(DataSource):
    """The events of journals; with the option `wal`, the entries of a namespace's regions."""

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> str:
        return regions.SCHEMA if self._is_wal() else events.SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        options = dict(self.options)
        return regions.RegionsReader(options) if self._is_wal() else journals_reader(options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        if self._is_wal():
            raise InvalidInput("the regions of a namespace cannot be streamed: read them")
        return JournalStream(dict(self.options))

    def _is_wal(self) -> bool:
        return any(name.lower() == "wal" for name in self.options)


def register(spark: SparkSession) -> None:
    """Make `format("tidebook")` known to a session, and let it take filters."""
    spark.dataSource.register(TidebookSource)
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
