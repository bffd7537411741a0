"""`format("tidebook")`: a book's journals and write-ahead logs as Spark tables and streams, selected by options.

from tidebook.pipeline.source.format import register
register(spark)
spark.read.format("tidebook").option("book", "tidebook.toml").option("topic", "orders").load()
spark.read.format("tidebook").option("book", "tidebook.toml").option("wal", "metrics").load()
"""

from __future__ import annotations

from typing import ClassVar, NoReturn

from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader
from pyspark.sql.types import StructType

from tidebook.core.errors import InvalidInput, NotFound
from tidebook.pipeline.source import journals, regions
from tidebook.pipeline.source.event_page import events_schema
from tidebook.pipeline.source.journal_stream import JournalStream, RefusedStream
from tidebook.pipeline.source.options import STREAM, TABLE, WAL, Options, one_line_errors
from tidebook.wiring.settings import Settings, settings_to_json

NAME = "tidebook"
#: Types for which Spark uses another name than the DDL strings of this package.
_SQL_NAMES = {"long": "bigint"}


class TidebookSource(DataSource):
    """The events of journals; with the option `wal`, the entries of a namespace's regions."""

    #: The settings of the book that is read without the option `book`, as JSON.
    _default_settings: ClassVar[str | None] = None

    def __init__(self, options: dict[str, str]) -> None:
        """Check the options here, so that a mistake fails `load()` and not a later query."""
        given = Options(options)
        if self._default_settings is not None and "book" not in given and "settings" not in given:
            options = {**options, "settings": self._default_settings}
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
            self._check_columns(schema)
            options = dict(self.options)
            return regions.RegionsReader(options) if self._is_wal() else journals.JournalsReader(options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        try:
            if self._is_wal():
                raise InvalidInput("the regions of a namespace cannot be streamed: use spark.read")
            self._check_columns(schema)
            return JournalStream(dict(self.options))
        except (InvalidInput, NotFound) as error:
            return RefusedStream(error)

    def writer(self, schema: StructType, overwrite: bool) -> NoReturn:
        """Refuse to write: only a journal's own append gives an event its number."""
        with one_line_errors():
            raise InvalidInput('format("tidebook") is read-only: append with book.journal(topic).append')

    streamWriter = writer

    def _check_columns(self, schema: StructType) -> None:
        """Raise `InvalidInput` if the user has specified other columns, which the rows would not fit."""
        given = [(field.name, field.dataType.simpleString()) for field in schema.fields]
        columns = [(name, _SQL_NAMES.get(kind, kind)) for name, kind in map(str.split, self.schema().split(", "))]
        if given != columns:
            raise InvalidInput(
                'format("tidebook") has fixed columns: do not call schema(), and select the columns you need'
            )

    def _is_wal(self) -> bool:
        return "wal" in Options(self.options)


def register(spark: SparkSession, settings: Settings | None = None) -> None:
    """Register `format("tidebook")` with a session; with `settings`, reads without the option `book` use that book.

    The settings are an attribute of the class and not a Spark setting, because Spark displays its settings.
    """
    source: type[DataSource] = TidebookSource
    if settings is not None:
        source = type("TidebookSource", (TidebookSource,), {"_default_settings": settings_to_json(settings)})
    spark.dataSource.register(source)
