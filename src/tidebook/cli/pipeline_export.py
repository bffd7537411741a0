"""`tidebook pipeline export`: export events to Parquet files or a Delta table."""

from __future__ import annotations

import threading
from typing import Annotated

import msgspec
import typer

from tidebook.cli import output
from tidebook.cli.options import BookOption, JsonOption, TopicsOption, seconds
from tidebook.cli.pipeline_session import open_job_book, session
from tidebook.cli.signals import stop_on_signals

DELTA = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}


def export(
    to: Annotated[
        str,
        typer.Option(
            "--to", metavar="FOLDER", help="A folder that all Spark workers can reach, or the folder of a Delta table."
        ),
    ],
    delta: Annotated[bool, typer.Option("--delta", help="Write a Delta table instead of Parquet files.")] = False,
    every_s: Annotated[
        float | None,
        typer.Option(
            "--every-s",
            metavar="SECONDS",
            help="Repeat the export at this interval, until SIGINT or SIGTERM.",
            callback=seconds("--every-s", least=0.05),
        ),
    ] = None,
    topic: TopicsOption = None,
    book: BookOption = None,
    json: JsonOption = False,
) -> None:
    """Export new events by topic and day, exactly once."""
    output.choose(json=json)
    stop = threading.Event()
    with open_job_book(book) as (each, portal), session(each, "export", _delta() if delta else None) as spark:
        from tidebook.pipeline.jobs.export import ExportProgress
        from tidebook.pipeline.jobs.export import export as job

        def report(done: ExportProgress) -> None:
            if output.human():
                output.stderr.print(f"{done.events:,} events in {done.batches:,} batches, {done.seconds:.1f} s")

        with stop_on_signals(stop.set):
            while True:
                done = job(
                    spark,
                    each,
                    portal,
                    to,
                    topics=topic or (),
                    table_format="delta" if delta else "parquet",
                    tell=report,
                )
                output.emit(msgspec.to_builtins(done), f"{done.events:,} events exported to {to}")
                if every_s is None or stop.wait(every_s):
                    return


def _delta() -> dict[str, str]:
    from tidebook.pipeline.jars import delta_jars
    from tidebook.pipeline.session import submitted

    return DELTA if submitted() else {**DELTA, "spark.jars": ",".join(map(str, delta_jars()))}
