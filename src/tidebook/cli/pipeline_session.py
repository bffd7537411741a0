"""Open a book and a Spark session for the commands that run a Spark job."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tidebook.cli.options import existing_settings
from tidebook.core.errors import InvalidInput
from tidebook.pipeline.jars import missing_for_spark
from tidebook.pipeline.session import pipeline_settings
from tidebook.runtime.blocking_portal import BlockingPortal
from tidebook.wiring.book import Book

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MASTERS = re.compile(r"local$|local\[|local-cluster\[|spark://|yarn$|k8s://")


def _enter(book: Book, portal: BlockingPortal) -> None:
    portal.run(book.__aenter__())


@contextmanager
def open_job_book(
    book: str | None, *, enter: Callable[[Book, BlockingPortal], None] = _enter
) -> Iterator[tuple[Book, BlockingPortal]]:
    """Open an existing book for a job, which runs in threads and calls the book through the portal.

    `enter` opens the book; it may wait for the book's servers.
    """
    settings = existing_settings(book)
    portal = BlockingPortal()
    try:
        each = Book(settings)
        enter(each, portal)
        try:
            yield each, portal
        finally:
            portal.run(each.__aexit__(None, None, None))
    finally:
        portal.close()


def require_spark() -> None:
    """Raise `InvalidInput` with installation advice if Spark is missing."""
    if (missing := missing_for_spark()) is not None:
        raise InvalidInput(missing)


@contextmanager
def session(book: Book, job: str, more: dict[str, str] | None = None) -> Iterator[SparkSession]:
    """Open a Spark session for a job; translate failures of Spark or the job into `TidebookError`."""
    master = pipeline_settings(book.settings).master
    if not MASTERS.match(master):  # otherwise Spark's launcher prints a long Java stack trace
        raise InvalidInput(f"[pipeline] master is local[N], spark://HOST:PORT, yarn or k8s://URL, not {master!r}")
    require_spark()
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    from tidebook.pipeline.errors import failure_of
    from tidebook.pipeline.session import job_session, unless_spark_is_gone

    try:
        spark = job_session(f"tidebook {job}", book.settings, more)
    except (PySparkException, Py4JError) as error:
        raise InvalidInput(f"Spark does not start: {_cause(error)}: check [pipeline] in tidebook.toml") from error
    try:
        yield spark
    except (PySparkException, Py4JError) as error:
        raise failure_of(error) from error
    finally:
        with unless_spark_is_gone():
            spark.stop()


def _cause(error: Exception) -> str:
    """Return the innermost cause of a Java exception, or the last line of another error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if line.startswith(("Caused by:", ": ", "org.", "java."))]
    return (causes or lines or [type(error).__name__])[-1].removeprefix("Caused by:").strip(" :")[:300]
