"""Handlers of write-ahead logs."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from tidebook.api.access import Role
from tidebook.api.wal import (
    CleanResponse,
    FlushResponse,
    RegionOpenBody,
    RegionReadQuery,
    RegionResponse,
    RegionSessionResponse,
    RegionSnapshotResponse,
    RegionsResponse,
    RegionWriteResponse,
    TableResponse,
    WalEntryLine,
    WriteResponse,
)
from tidebook.core.errors import InvalidInput
from tidebook.server.call import Call, Handler
from tidebook.server.masking import Mask
from tidebook.server.responses import Chunk, ChunkBuffer, Lines
from tidebook.wal.region import Region

CHUNK_ENTRIES = 256

_encode = msgspec.json.Encoder().encode
_OPEN = RegionOpenBody()


async def _reader(call: Call) -> Region:
    """Open a region for reading, which claims nothing."""
    return await call.book.wal(call.parameters[0]).open_region(call.number(1, "region"), writable=False)


def _tables(region: Region) -> list[TableResponse]:
    return [
        TableResponse(
            table=id,
            incarnation=meta.incarnation,
            next_seq_num=meta.next_seq_num,
            latest_marked_deleted=meta.latest_marked_deleted,
            current_high_watermark=meta.current_high_watermark,
            entries=len(meta.mapping),
        )
        for id, meta in sorted(region.meta.tables.items())
    ]


async def regions(call: Call) -> RegionsResponse:
    """List the regions of a namespace."""
    return RegionsResponse(await call.book.wal(call.parameters[0]).regions())


async def status(call: Call) -> RegionResponse:
    """Return the status of a region and its tables."""
    region = await _reader(call)
    fields = msgspec.structs.asdict(await region.status())
    return RegionResponse(**{**fields, "tables": _tables(region)})


async def delete_region(call: Call) -> None:
    """Delete a region."""
    namespace, id = call.parameters[0], call.number(1, "region")
    await call.state.regions.close_region(namespace, id)
    await call.book.wal(namespace).delete_region(id)


async def open_session(call: Call) -> RegionSessionResponse:
    """Claim a region for writing."""
    body = call.body or _OPEN
    opened = await call.state.regions.open(call.parameters[0], call.number(1, "region"), create=body.create)
    region = opened.region
    idle_s = call.state.settings.region_idle_s
    return RegionSessionResponse(session=opened.id, term=region.meta.term, idle_s=idle_s, tables=_tables(region))


async def close_session(call: Call) -> None:
    """Release a claim."""
    namespace, _, session = call.parameters
    await call.state.regions.close_session(namespace, call.number(1, "region"), session)


async def write(call: Call) -> RegionWriteResponse:
    """Write payloads to tables."""
    writes = [(each.table, [one.value() for one in each.payloads]) for each in call.body.writes]
    async with call.state.regions.use(call.parameters[0], call.number(1, "region"), call.body.session) as region:
        written = await region.write_many(writes)
    return RegionWriteResponse(
        [
            WriteResponse(table, done.first, done.last, done.offset)
            for (table, _), done in zip(writes, written, strict=True)
        ]
    )


async def read(call: Call) -> Lines:
    """Read entries."""
    query, region = call.query, await _reader(call)
    if query.table is not None and query.from_offset:
        raise InvalidInput("from_offset is for all tables: give either table and start, or from_offset")
    # A client that may write a region may have to recover from it, which needs the entries as they were written.
    mask = call.mask(call.parameters[0]) if call.principal.role < Role.OPERATOR else None
    return Lines(lambda lines: _chunks(lines, region, query, mask))


async def _chunks(
    lines: Lines, region: Region, query: RegionReadQuery, mask: Mask | None
) -> AsyncGenerator[Chunk, None]:
    table, start, from_offset, limit = query.table, query.start, query.from_offset, query.limit
    entries = region.read(from_offset=from_offset) if table is None else region.read_table(table, start=start)
    buffer = ChunkBuffer(CHUNK_ENTRIES)
    count = offset = 0
    async with aclosing(entries):
        async for entry in entries:
            # A page of all tables ends between records: the entries of one record have the same offset.
            if limit is not None and count >= limit and (table is not None or entry.offset != offset):
                lines.next = entry.offset if table is None else entry.seq
                break
            count, offset = count + 1, entry.offset
            payload = entry.payload if mask is None else mask(entry.payload)
            if buffer.add("", _encode(WalEntryLine.of(entry, payload))):
                yield buffer.take()
    if buffer:
        yield buffer.take()


async def mark_deleted(call: Call) -> None:
    """Mark older entries as deleted."""
    body, region = call.body, await _reader(call)
    await region.mark_deleted(body.table, body.seq, incarnation=body.incarnation)


async def request_flush(call: Call) -> FlushResponse:
    """Ask the owner to flush."""
    return FlushResponse(await (await _reader(call)).request_flush(None if call.body is None else call.body.table))


async def drop_table(call: Call) -> None:
    """Drop a table."""
    region = await _reader(call)
    await region.drop_table(call.number(2, "table"))


async def clean(call: Call) -> CleanResponse:
    """Remove the entries that no table needs."""
    region = await _reader(call)
    return CleanResponse(**msgspec.structs.asdict(await region.clean()))


async def snapshot(call: Call) -> RegionSnapshotResponse:
    """Write a snapshot."""
    region = await _reader(call)
    taken = await region.snapshot()
    return RegionSnapshotResponse(taken.data_offset, taken.truncated_to, len(taken.tables))


HANDLERS: dict[str, Handler] = {
    "wal.regions": regions,
    "wal.status": status,
    "wal.delete_region": delete_region,
    "wal.open_session": open_session,
    "wal.close_session": close_session,
    "wal.write": write,
    "wal.read": read,
    "wal.mark_deleted": mark_deleted,
    "wal.request_flush": request_flush,
    "wal.drop_table": drop_table,
    "wal.clean": clean,
    "wal.snapshot": snapshot,
}
