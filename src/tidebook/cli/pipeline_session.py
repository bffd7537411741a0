"""What the pipeline's commands share: a book for a job, and Spark for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

import tidebook
from tidebook.cli.options import chosen
from tidebook.core.errors import InvalidInput
from tidebook.core.portal import Portal
from tidebook.pipeline.prerequisites import missing_for_spark
from tidebook.wiring.book import Book

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TopicsOption = Annotated[list[str] | None, typer.Option("--topic", help="This topic alone; may be given again.")]


@contextmanager
def opened(book: str | None) -> Iterator[tuple[Book, Portal]]:
    """A book for a job: jobs are threads, not coroutines."""
    portal = Portal()
    try:
        each = tidebook.open(chosen(book))
        portal.run(each.__aenter__())
        try:
            yield each, portal
        finally:
            portal.run(each.__aexit__(None, None, None))
    finally:
        portal.close()


@contextmanager
def session(book: Book, job: str, more: dict[str, str] | None = None) -> Iterator[SparkSession]:
    """A Spark session for a job, or how to get Spark. What makes a job fail is told as one of our errors."""
    if (missing := missing_for_spark()) is not None:
        raise InvalidInput(missing)
    from pyspark.errors import PySparkException

    from tidebook.pipeline.failures import failure_of
    from tidebook.pipeline.session import job_session, unless_spark_is_gone

    spark = job_session(f"tidebook {job}", book.settings, more)
    try:
        yield spark
    except PySparkException as error:
        raise failure_of(error) from error
    finally:
        with unless_spark_is_gone():
            spark.stop()
