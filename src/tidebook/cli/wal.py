"""`tidebook wal`: write, read, regions, recover, mark, flush, drop, snapshot, clean, delete."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Annotated, Any

from tidebook.cli import bulk_input, output
from tidebook.cli.command import Group
from tidebook.cli.options import BookOption, argument, flag, number, open_book
from tidebook.core.errors import InvalidInput, NotFound
from tidebook.wal.record import ID_MAX, Written
from tidebook.wal.region import Region
from tidebook.wal.topics import namespace_name
from tidebook.wiring.book import Book

app = Group(help="Write, read and clean write-ahead logs.", no_args_is_help=True)

Namespace = Annotated[str, argument("NAMESPACE", "The namespace, for example: metrics", callback=namespace_name)]
RegionId = Annotated[int, argument("REGION", "The region's id, for example: 7", min=0, max=ID_MAX)]
Table = Annotated[int, argument("TABLE", "The table's id, for example: 1", min=0, max=ID_MAX)]


@asynccontextmanager
async def open_region(
    book: str | None, namespace: str, region: int, *, create: bool = False, writable: bool = False
) -> AsyncIterator[Region]:
    """Open a region of the chosen book; claim it only if `writable`."""
    async with open_book(book, create=create) as opened:
        wal = opened.wal(namespace)
        if not create and region not in await wal.regions():
            hint = ": use --create to create it" if writable else ""
            raise NotFound(f"namespace {namespace!r}: there is no region {region}{hint}")
        yield await wal.open_region(region, create=create, writable=writable)


@app.command()
def write(
    book: BookOption,
    namespace: Namespace,
    region: RegionId,
    table: Table,
    payloads: list[str] = argument("JSON", "One JSON value per entry; - reads one per line from standard input."),
    create: bool = flag("--create", "Create the region if it does not exist."),
) -> None:
    """Write entries to a table, atomically.

    Claim the region: a writer that has it open is fenced. With `-` the entries of standard input are written in
    batches, each of them atomically.
    """
    done: Written | None = None

    async def write_values(opened: Region, values: list[Any]) -> None:
        nonlocal done
        last = await opened.write(table, values)
        done = last if done is None else Written(done.first, last.last, last.offset)

    opening = open_region(book, namespace, region, create=create, writable=True)
    try:
        bulk_input.write(opening, payloads, "write", write_values)
    finally:
        if done is not None:  # also the entries written before a failure
            output.emit(done, f"wrote {done.first} to {done.last} at offset {done.offset}")


@app.command()
async def read(
    book: BookOption,
    namespace: Namespace,
    region: RegionId,
    table: int | None = number("Read only this table.", 0, ID_MAX, metavar="TABLE"),
    start: int | None = number("With --table: the first sequence number.", 0, ID_MAX, show_default="1"),
) -> None:
    """Print the entries of a region, or those of one table."""
    if start is not None and table is None:
        raise InvalidInput("--start needs --table")
    async with open_region(book, namespace, region) as opened:
        if table is not None and table not in opened.meta.tables:
            raise NotFound(f"region {region}: there is no table {table}")
        reading = opened.read() if table is None else opened.read_table(table, start=1 if start is None else start)
        shown = False
        async with aclosing(reading):  # a closed pipe ends the loop early
            async for entry in reading:
                if output.human() and not shown:
                    output.write(f"{'OFFSET':>10}  {'TABLE':>6}  {'SEQ':>8}  PAYLOAD\n")
                row = output.fields_of(entry, "table", "seq", "payload", "offset")
                text = f"{entry.offset:>10}  {entry.table:>6}  {entry.seq:>8}  {output.format_value(row['payload'])}"
                output.emit(row, text)
                shown = True
        if not shown:
            output.note_empty("no entries")


@app.command()
async def regions(book: Book, namespace: Namespace) -> None:
    """List a namespace's regions, their sizes and what pins them."""
    wal = book.wal(namespace)
    table = output.Table("region", "tables", "bytes held", "pinned by table", "start", "end", "term")
    for id in await wal.regions():
        status = await (await wal.open_region(id, writable=False)).status()
        pinned_by = None if status.pinned_by is None else str(status.pinned_by)
        cells = (status.tables, status.held_bytes, pinned_by, status.log_start, status.log_end, status.term)
        table.add(status, str(id), *cells)
    table.print("no regions")


@app.command()
async def recover(
    book: BookOption,
    namespace: Namespace,
    region: RegionId,
    replay: bool = flag("--replay", "Also read every entry, and count the entries by table."),
) -> None:
    """Recover a region's state without claiming it; print its tables."""
    async with open_region(book, namespace, region) as opened:
        counts = await _replay(opened) if replay else None
        tables = output.Table("table", "next", "marked", "high watermark", "entries", "batches", "replayed")
        for table, meta in sorted(opened.meta.tables.items()):
            row: dict[str, Any] = {
                "table": table,
                "next_seq_num": meta.next_seq_num,
                "latest_marked_deleted": meta.latest_marked_deleted,
                "current_high_watermark": meta.current_high_watermark,
                "entries": len(meta.mapping),
                "batches": meta.mapping.batch_count,
            }
            replayed = None if counts is None else counts.get(table, 0)
            _, *cells = row.values()
            tables.add(row if counts is None else row | {"replayed": replayed}, str(table), *cells, replayed)
        tables.print("no tables")
        if output.human():
            output.note(f"recovered in {opened.recovery_s:.3f} s, term {opened.meta.term}")


async def _replay(region: Region) -> dict[int, int]:
    with output.progress_bar() as bar:
        task = bar.add_task("replay", total=None)
        return await region.replay(
            {}, other=lambda _: None, progress=lambda done, total: bar.update(task, completed=done, total=total)
        )


@app.command()
async def mark(
    book: BookOption,
    namespace: Namespace,
    region: RegionId,
    table: Table,
    seq: int = argument("SEQ", "Mark the entries before this sequence number.", min=0, max=ID_MAX),
) -> None:
    """Mark a table's older entries as deleted."""
    async with open_region(book, namespace, region) as opened:
        await opened.mark_deleted(table, seq)
    output.emit({"table": table, "latest_marked_deleted": seq}, f"table {table}: marked as deleted before {seq}")


@app.command()
async def flush(
    book: BookOption,
    namespace: Namespace,
    region: RegionId,
    table: int | None = number("Flush only this table.", 0, ID_MAX, metavar="TABLE"),
) -> None:
    """Ask the owner of a region to flush its tables.

    The owner passes them to its `on_pinned` callback in its next round of cleaning, which then frees the log.
    """
    async with open_region(book, namespace, region) as opened:
        asked = await opened.request_flush(table)
    tables = ", ".join(map(str, asked))
    text = f"asked the owner to flush tables: {tables}" if asked else "no table has entries to flush"
    output.emit({"region": region, "tables": asked}, text)


@app.command(question="Drop table {table} of region {region} of {namespace} and all its entries?")
async def drop(book: BookOption, namespace: Namespace, region: RegionId, table: Table) -> None:
    """Drop a table and all its entries."""
    async with open_region(book, namespace, region) as opened:
        await opened.drop_table(table)
    output.emit({"table": table, "dropped": True}, f"table {table}: dropped")


@app.command()
async def snapshot(book: BookOption, namespace: Namespace, region: RegionId) -> None:
    """Write a snapshot of a region's state, for faster recovery."""
    async with open_region(book, namespace, region) as opened:
        await opened.refresh()
        taken = await opened.snapshot()
    row = {"data_offset": taken.data_offset, "truncated_to": taken.truncated_to, "tables": len(taken.tables)}
    output.emit(row, f"snapshot of {len(taken.tables)} tables at offset {taken.data_offset}")


@app.command()
async def clean(book: BookOption, namespace: Namespace, region: RegionId) -> None:
    """Remove the entries that no table needs."""
    async with open_region(book, namespace, region) as opened:
        done = await opened.clean()
    pinned = "" if done.pinned_by is None else f"; table {done.pinned_by} pins the rest"
    text = f"removed {done.removed:,} offsets, {done.held_bytes:,} bytes are held{pinned}"
    output.emit(done, text)


@app.command(question="Delete region {region} of {namespace} and all its data?", ask_scripts=True)
async def delete(book: Book, namespace: Namespace, region: RegionId) -> None:
    """Delete a region and all its data."""
    await book.wal(namespace).delete_region(region)
    output.emit({"region": region, "deleted": True}, f"region {region}: deleted")
