"""`format("tidebook")`: a book's journals and write-ahead logs as Spark tables and streams, selected by options.

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
from tidebook.pipeline.source import journals, regions
from tidebook.pipeline.source.event_page import events_schema
from tidebook.pipeline.source.journal_stream import JournalStream
from tidebook.pipeline.source.options import STREAM, TABLE, WAL, Options, one_line_errors

NAME = "tidebook"


class TidebookSource(DataSource):
    """The events of journals; with the option `wal`, the entries of a namespace's regions."""

    def __init__(self, options: dict[str, str]) -> None:
        """Check the options here, so that a mistake fails `load()` and not a later query."""
        super().__init__(options)
        with one_line_errors():
            given = Options(options)
            given.check_names(WAL if "wal" in given else {*TABLE, *STREAM})
            given.check_values()
            given.settings()

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> str:
        return regions.SCHEMA if self._is_wal() else events_schema(Options(self.options).payload_form())

    def reader(self, schema: StructType) -> DataSourceReader:
        with one_line_errors():
            options = dict(self.options)
            return regions.RegionsReader(options) if self._is_wal() else journals.JournalsReader(options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        with one_line_errors():
            if self._is_wal():
                raise InvalidInput("the regions of a namespace cannot be streamed: read them")
            return JournalStream(dict(self.options))

    def _is_wal(self) -> bool:
        return "wal" in Options(self.options)


def register(spark: SparkSession) -> None:
    """Register `format("tidebook")` with a session."""
    spark.dataSource.register(TidebookSource)
