"""`format("tidebook")`: what a book holds, as Spark tables. The options say which part of it.

from tidebook.pipeline.source.format import register
register(spark)
spark.read.format("tidebook").option("book", "tidebook.toml").option("wal", "metrics").load()
"""

from __future__ import annotations

from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader
from pyspark.sql.types import StructType

from tidebook.core.errors import InvalidInput
from tidebook.pipeline.source import regions

NAME = "tidebook"


class TidebookSource(DataSource):
    """With the option `wal`: the regions of a namespace."""

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> str:
        self._part()
        return regions.SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        self._part()
        return regions.RegionsReader(dict(self.options))

    def _part(self) -> str:
        for name in self.options:
            if name.lower() == "wal":
                return name
        raise InvalidInput('format("tidebook") needs an option that says what to read: wal, the name of a namespace')


def register(spark: SparkSession) -> None:
    """Make `format("tidebook")` known to a session."""
    spark.dataSource.register(TidebookSource)
