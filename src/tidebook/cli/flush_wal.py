"""`tidebook pipeline flush-wal`: regions to Parquet."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from tidebook.cli import output
from tidebook.cli.options import BookOption, JsonOption
from tidebook.cli.pipeline_session import opened, session


def flush_wal(
    namespace: Annotated[str, typer.Argument(help="The namespace of the regions, for example: metrics")],
    to: Annotated[str, typer.Option("--to", help="The folder that Parquet files go to.", metavar="FOLDER")],
    region: Annotated[list[int] | None, typer.Option(help="This region alone; may be given again.")] = None,
    book: BookOption = None,
    json: JsonOption = False,
) -> None:
    """Write what the regions hold to Parquet, a folder a table, exactly once; then mark it deleted."""
    output.choose(json=json)
    with opened(book) as (each, portal), session(each, "flush-wal") as spark:
        from tidebook.pipeline.jobs.flush_wal import flush_wal as job
        from tidebook.wal.flush import Flushed

        def tell(done: Flushed) -> None:
            row = {
                "region": done.region,
                "entries": done.entries,
                "ranges": [msgspec.to_builtins(range_) for range_ in done.ranges],
            }
            output.emit(row, f"region {done.region}: {done.entries:,} entries of {len(done.ranges)} tables")

        job(spark, each, portal, namespace=namespace, output=to, regions=region or (), tell=tell)
