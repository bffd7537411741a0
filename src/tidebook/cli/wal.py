"""`tidebook wal`: write, read, regions, recover, mark, drop, snapshot, clean, delete."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Annotated, Any

import msgspec
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tidebook.cli import options, output
from tidebook.cli.help import Group
from tidebook.cli.journal import parse_payload, payload_as_json
from tidebook.cli.options import BookOption, JsonOption, YesOption, confirm, run
from tidebook.core.errors import InvalidInput, NotFound
from tidebook.wal.record import ID_MAX, WalEntry
from tidebook.wal.region import Region
from tidebook.wal.topics import namespace_name

app = Group(help="Write, read and clean write-ahead logs.", no_args_is_help=True)

Namespace = Annotated[
    str, typer.Argument(metavar="NAMESPACE", help="The namespace, for example: metrics", callback=namespace_name)
]
RegionArgument = Annotated[
    int, typer.Argument(metavar="REGION", min=0, max=ID_MAX, help="The region's id, for example: 7")
]
Table = Annotated[int, typer.Argument(metavar="TABLE", min=0, max=ID_MAX, help="The table's id, for example: 1")]


@asynccontextmanager
async def open_region(
    book: str | None, namespace: str, region: int, *, create: bool = False, writable: bool = False
) -> AsyncIterator[Region]:
    """Open a region of the chosen book; claim it only if `writable`."""
    async with options.open_book(book, create=create) as each:
        wal = each.wal(namespace)
        if not create and region not in await wal.regions():
            hint = ": use --create to create it" if writable else ""
            raise NotFound(f"namespace {namespace!r}: there is no region {region}{hint}")
        yield await wal.open_region(region, create=create, writable=writable)


@app.command()
def write(
    namespace: Namespace,
    region: RegionArgument,
    table: Table,
    payloads: Annotated[list[str], typer.Argument(metavar="JSON", help="One JSON value per entry.")],
    create: Annotated[bool, typer.Option("--create", help="Create the region if it does not exist.")] = False,
    book: BookOption = None,
    json: JsonOption = False,
) -> None:
    """Write entries to a table, atomically.

    Claim the region: a writer that has it open is fenced.
    """
    values = [parse_payload(each) for each in payloads]

    async def go() -> None:
        async with open_region(book, namespace, region, create=create, writable=True) as opened:
            done = await opened.write(table, values)
        output.emit(msgspec.to_builtins(done), f"wrote {done.first} to {done.last} at offset {done.offset}")

    run(go, json=json)


@app.command()
def read(
    namespace: Namespace,
    region: RegionArgument,
    table: Annotated[int | None, typer.Option(metavar="TABLE", min=0, max=ID_MAX, help="Read only this table.")] = None,
    start: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, max=ID_MAX, help="With --table: the first sequence number.", show_default="1"),
    ] = None,
    book: BookOption = None,
    json: JsonOption = False,
) -> None:
    """Print the entries of a region, or those of one table."""
    if start is not None and table is None:
        raise InvalidInput("--start needs --table")

    async def go() -> None:
        async with open_region(book, namespace, region) as opened:
            if table is not None and table not in opened.meta.tables:
                raise NotFound(f"region {region}: there is no table {table}")
            reading = opened.read() if table is None else opened.read_table(table, start=1 if start is None else start)
            async with aclosing(reading):  # a closed pipe ends the loop early
                async for entry in reading:
                    _show(entry)

    run(go, json=json)


@app.command()
def regions(namespace: Namespace, book: BookOption = None, json: JsonOption = False) -> None:
    """List a namespace's regions, their sizes and what pins them."""

    async def go() -> None:
        async with options.open_book(book) as each:
            wal = each.wal(namespace)
            for id in await wal.regions():
                status = await (await wal.open_region(id, writable=False)).status()
                row = msgspec.to_builtins(status)
                pinned = "" if status.pinned_by is None else f", pinned by table {status.pinned_by}"
                output.emit(
                    row,
                    f"region {id}: {status.tables} tables, {status.held_bytes:,} bytes held{pinned}, "
                    f"offsets {status.log_start} to {status.log_end}, term {status.term}",
                )

    run(go, json=json)


@app.command()
def recover(
    namespace: Namespace,
    region: RegionArgument,
    replay: Annotated[
        bool, typer.Option("--replay", help="Also read every entry, and count the entries by table.")
    ] = False,
    book: BookOption = None,
    json: JsonOption = False,
) -> None:
    """Recover a region's state without claiming it; print its tables."""

    async def go() -> None:
        async with open_region(book, namespace, region) as opened:
            counts = await _replay(opened) if replay else None
            for table, meta in sorted(opened.meta.tables.items()):
                row: dict[str, Any] = {
                    "table": table,
                    "next_seq_num": meta.next_seq_num,
                    "latest_marked_deleted": meta.latest_marked_deleted,
                    "current_high_watermark": meta.current_high_watermark,
                    "entries": len(meta.mapping),
                    "batches": meta.mapping.batch_count,
                }
                if counts is not None:
                    row["replayed"] = counts.get(table, 0)
                output.emit(row)
            if output.human():
                output.stderr.print(f"recovered in {opened.recovery_s:.3f} s, term {opened.meta.term}", markup=False)

    run(go, json=json)


@app.command()
def mark(
    namespace: Namespace,
    region: RegionArgument,
    table: Table,
    seq: Annotated[
        int, typer.Argument(metavar="SEQ", min=0, max=ID_MAX, help="Mark the entries before this sequence number.")
    ],
    book: BookOption = None,
    json: JsonOption = False,
) -> None:
    """Mark a table's older entries as deleted."""

    async def go() -> None:
        async with open_region(book, namespace, region) as opened:
            await opened.mark_deleted(table, seq)
        output.emit({"table": table, "latest_marked_deleted": seq}, f"table {table}: marked before {seq}")

    run(go, json=json)


@app.command()
def drop(
    namespace: Namespace, region: RegionArgument, table: Table, book: BookOption = None, json: JsonOption = False
) -> None:
    """Drop a table."""

    async def go() -> None:
        async with open_region(book, namespace, region) as opened:
            await opened.drop_table(table)
        output.emit({"table": table, "dropped": True}, f"table {table}: dropped")

    run(go, json=json)


@app.command()
def snapshot(namespace: Namespace, region: RegionArgument, book: BookOption = None, json: JsonOption = False) -> None:
    """Write a snapshot of a region's state, for faster recovery."""

    async def go() -> None:
        async with open_region(book, namespace, region) as opened:
            await opened.refresh()
            taken = await opened.snapshot()
        row = {"data_offset": taken.data_offset, "truncated_to": taken.truncated_to, "tables": len(taken.tables)}
        output.emit(row, f"snapshot of {len(taken.tables)} tables at offset {taken.data_offset}")

    run(go, json=json)


@app.command()
def clean(namespace: Namespace, region: RegionArgument, book: BookOption = None, json: JsonOption = False) -> None:
    """Remove the entries that no table needs."""

    async def go() -> None:
        async with open_region(book, namespace, region) as opened:
            done = await opened.clean()
        pinned = "" if done.pinned_by is None else f"; table {done.pinned_by} pins the rest"
        output.emit(
            msgspec.to_builtins(done), f"removed {done.removed:,} offsets, {done.held_bytes:,} bytes are held{pinned}"
        )

    run(go, json=json)


@app.command()
def delete(
    namespace: Namespace,
    region: RegionArgument,
    yes: YesOption = False,
    book: BookOption = None,
    json: JsonOption = False,
) -> None:
    """Delete a region and all its data."""
    confirm(f"Delete region {region} of {namespace} and all its data?", yes=yes)

    async def go() -> None:
        async with options.open_book(book) as each:
            await each.wal(namespace).delete_region(region)
        output.emit({"region": region, "deleted": True}, f"region {region}: deleted")

    run(go, json=json)


async def _replay(region: Region) -> dict[int, int]:
    columns = (TextColumn("replay"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=output.stderr, disable=not output.human()) as bar:
        task = bar.add_task("replay", total=None)
        return await region.replay(
            {}, other=lambda _: None, progress=lambda done, total: bar.update(task, completed=done, total=total)
        )


def _show(entry: WalEntry) -> None:
    row = {
        "table": entry.table,
        "seq": entry.seq,
        "payload": payload_as_json(entry.payload),
        "offset": entry.offset,
    }
    output.emit(row, f"{entry.offset:>10}  {entry.table:>6}  {entry.seq:>8}  {output.format_value(row['payload'])}")
