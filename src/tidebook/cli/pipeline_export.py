"""`tidebook pipeline export`."""

from __future__ import annotations

import signal
import threading
from typing import Annotated

import msgspec
import typer

from tidebook.cli import output
from tidebook.cli.options import BookOption, JsonOption
from tidebook.cli.pipeline_session import TopicsOption, opened, session
from tidebook.core.errors import InvalidInput

DELTA = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}


def export(
    to: Annotated[str, typer.Option("--to", help="A folder that all workers see, or the place of a Delta table.")],
    delta: Annotated[bool, typer.Option("--delta", help="Write a Delta table instead of Parquet files.")] = False,
    every_s: Annotated[
        float | None, typer.Option("--every", help="Go on, with this many seconds between two rounds.")
    ] = None,
    topic: TopicsOption = None,
    book: BookOption = None,
    json: JsonOption = False,
) -> None:
    """Export the events that are replicated and were not exported yet, by topic and day, exactly once."""
    output.choose(json=json)
    if every_s is not None and every_s <= 0:
        raise InvalidInput("--every is a time in seconds above 0")
    over = threading.Event()
    with opened(book) as (each, portal), session(each, "export", _delta() if delta else None) as spark:
        from tidebook.pipeline.jobs.export import Exported
        from tidebook.pipeline.jobs.export import export as job

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: over.set())

        def tell(done: Exported) -> None:
            if output.human():
                output.aside.print(f"{done.events:,} events in {done.batches:,} batches, {done.seconds:.1f} s")

        while True:
            done = job(
                spark, each, portal, to, topics=topic or (), table_format="delta" if delta else "parquet", tell=tell
            )
            output.emit(msgspec.to_builtins(done), f"{done.events:,} events exported to {to}")
            if every_s is None or over.wait(every_s):
                return


def _delta() -> dict[str, str]:
    from tidebook.pipeline.jars import delta_jars
    from tidebook.pipeline.session import submitted

    return DELTA if submitted() else {**DELTA, "spark.jars": ",".join(map(str, delta_jars()))}
