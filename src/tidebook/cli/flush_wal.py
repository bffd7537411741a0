"""`tidebook pipeline flush-wal`: move WAL entries to Parquet files."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from tidebook.cli import output
from tidebook.cli.options import BookOption, JsonOption
from tidebook.cli.pipeline_session import open_job_book, session
from tidebook.cli.wal import Namespace
from tidebook.wal.record import ID_MAX


def flush_wal(
    namespace: Namespace,
    to: Annotated[str, typer.Option("--to", metavar="FOLDER", help="The folder for the Parquet files.")],
    region: Annotated[
        list[int] | None,
        typer.Option(metavar="REGION", min=0, max=ID_MAX, help="Flush only this region; may be repeated."),
    ] = None,
    book: BookOption = None,
    json: JsonOption = False,
) -> None:
    """Move the entries of regions to Parquet, exactly once."""
    output.choose(json=json)
    with open_job_book(book) as (each, portal), session(each, "flush-wal") as spark:
        from tidebook.pipeline.jobs.flush_wal import flush_wal as job
        from tidebook.wal.flush import Flushed

        def report(done: Flushed) -> None:
            row = {
                "region": done.region,
                "entries": done.entries,
                "ranges": [msgspec.to_builtins(range_) for range_ in done.ranges],
            }
            output.emit(row, f"region {done.region}: {done.entries:,} entries of {len(done.ranges)} tables")

        job(spark, each, portal, namespace=namespace, output=to, regions=region or (), tell=report)
