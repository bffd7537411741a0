"""`tidebook wal`: write, read, regions, recover, mark, drop, snapshot, clean, delete."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

import msgspec
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import tidebook
from tidebook.cli import output
from tidebook.cli.journal import payload_of, shown_payload
from tidebook.cli.options import BookOption, JsonOption, chosen, run
from tidebook.wal.entry import Entry
from tidebook.wal.names import table_id
from tidebook.wal.region import Region

app = typer.Typer(help="Write-ahead logs: regions that many tables share.", no_args_is_help=True)

Namespace = Annotated[str, typer.Argument(help="The namespace, for example: metrics")]
RegionArgument = Annotated[int, typer.Argument(metavar="REGION", help="The region's id, for example: 7")]
Table = Annotated[int, typer.Argument(help="The table's id, for example: 1")]


@asynccontextmanager
async def opened(
    book: str | None, namespace: str, region: int, *, create: bool = False, writable: bool = False
) -> AsyncIterator[Region]:
    """A region of the chosen book. For reading, marking and cleaning nothing is claimed."""
    async with tidebook.open(chosen(book)) as each:
        yield await each.wal(namespace).open_region(region, create=create, writable=writable)


@app.command()
def write(
    namespace: Namespace,
    region: RegionArgument,
    table: Table,
    payloads: Annotated[list[str], typer.Argument(metavar="JSON...", help="One JSON value an entry.")],
    create: Annotated[bool, typer.Option("--create", help="Make the region where there is none.")] = False,
    book: BookOption = None,
    json: JsonOption = False,
) -> None:
    """Write entries to a table, atomically. This claims the region: a writer that has it open is fenced."""
    values = [payload_of(each) for each in payloads]

    async def go() -> None:
        table_id(table)  # before anybody is fenced
        async with opened(book, namespace, region, create=create, writable=True) as held:
            done = await held.write(table, values)
        output.emit(msgspec.to_builtins(done), f"wrote {done.first} to {done.last} at offset {done.offset}")

    run(go, json=json)


@app.command()
def read(
    namespace: Namespace,
    region: RegionArgument,
    table: Annotated[int | None, typer.Option(help="This table alone.")] = None,
    start: Annotated[int, typer.Option(help="With --table: the first sequence number.")] = 1,
    book: BookOption = None,
    json: JsonOption = False,
) -> None:
    """Read all entries of a region in order, or those of one table."""

    async def go() -> None:
        async with opened(book, namespace, region) as held:
            reading = held.read() if table is None else held.read_table(table, start=start)
            async for entry in reading:
                _show(entry)

    run(go, json=json)


@app.command()
def regions(namespace: Namespace, book: BookOption = None, json: JsonOption = False) -> None:
    """List the regions of a namespace: how much each holds, and which table pins it."""

    async def go() -> None:
        async with tidebook.open(chosen(book)) as each:
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
    replay: Annotated[bool, typer.Option("--replay", help="Read every entry too, and count them by table.")] = False,
    book: BookOption = None,
    json: JsonOption = False,
) -> None:
    """Recover a region's meta as an owner would, claiming nothing, and show its tables."""

    async def go() -> None:
        async with opened(book, namespace, region) as held:
            counts = await _replay(held) if replay else None
            for table, meta in sorted(held.meta.tables.items()):
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
                output.aside.print(f"recovered in {held.recovery_s:.3f} s, term {held.meta.term}", markup=False)

    run(go, json=json)


@app.command()
def mark(
    namespace: Namespace,
    region: RegionArgument,
    table: Table,
    seq: Annotated[int, typer.Argument(help="Entries below it are no longer needed.")],
    book: BookOption = None,
    json: JsonOption = False,
) -> None:
    """Mark a table's entries below a sequence number as deleted; the owner may go on writing."""

    async def go() -> None:
        async with opened(book, namespace, region) as held:
            await held.mark_deleted(table, seq)
        output.emit({"table": table, "latest_marked_deleted": seq}, f"table {table}: marked below {seq}")

    run(go, json=json)


@app.command()
def drop(
    namespace: Namespace, region: RegionArgument, table: Table, book: BookOption = None, json: JsonOption = False
) -> None:
    """Drop a table; the owner may go on writing."""

    async def go() -> None:
        async with opened(book, namespace, region) as held:
            await held.drop_table(table)
        output.emit({"table": table, "dropped": True}, f"table {table}: dropped")

    run(go, json=json)


@app.command()
def snapshot(namespace: Namespace, region: RegionArgument, book: BookOption = None, json: JsonOption = False) -> None:
    """Write a snapshot of the region's meta, so that the next recovery has less to scan."""

    async def go() -> None:
        async with opened(book, namespace, region) as held:
            await held.refresh()
            taken = await held.snapshot()
        row = {"data_offset": taken.data_offset, "truncated_to": taken.truncated_to, "tables": len(taken.tables)}
        output.emit(row, f"snapshot of {len(taken.tables)} tables at offset {taken.data_offset}")

    run(go, json=json)


@app.command()
def clean(namespace: Namespace, region: RegionArgument, book: BookOption = None, json: JsonOption = False) -> None:
    """Remove what no table needs any more; the owner may go on writing."""

    async def go() -> None:
        async with opened(book, namespace, region) as held:
            done = await held.clean()
        pinned = "" if done.pinned_by is None else f"; table {done.pinned_by} pins the rest"
        output.emit(
            msgspec.to_builtins(done), f"removed {done.removed:,} offsets, {done.held_bytes:,} bytes are held{pinned}"
        )

    run(go, json=json)


@app.command()
def delete(
    namespace: Namespace,
    region: RegionArgument,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    book: BookOption = None,
    json: JsonOption = False,
) -> None:
    """Remove a region and all it holds."""
    if not yes:
        typer.confirm(f"Delete region {region} of {namespace} and all it holds?", abort=True)

    async def go() -> None:
        async with tidebook.open(chosen(book)) as each:
            await each.wal(namespace).delete_region(region)
        output.emit({"region": region, "deleted": True}, f"region {region}: deleted")

    run(go, json=json)


async def _replay(region: Region) -> dict[int, int]:
    columns = (TextColumn("replay"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=output.aside, disable=not output.human()) as bar:
        task = bar.add_task("replay", total=None)
        return await region.replay(
            {}, other=lambda _: None, progress=lambda done, total: bar.update(task, completed=done, total=total)
        )


def _show(entry: Entry) -> None:
    row = {
        "table": entry.table,
        "seq": entry.seq,
        "payload": shown_payload(entry.payload),
        "offset": entry.offset,
    }
    output.emit(row, f"{entry.offset:>10}  {entry.table:>6}  {entry.seq:>8}  {output.shown(row['payload'])}")
