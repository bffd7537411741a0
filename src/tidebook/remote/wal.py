"""The client of a server's write-ahead logs; a region that is open for writing is a session on the server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from inspect import isawaitable
from typing import Any

import msgspec

from tidebook.api.payload import payload_from
from tidebook.api.wal import (
    FlushBody,
    MarkBody,
    PayloadBody,
    RegionOpenBody,
    RegionResponse,
    RegionWriteBody,
    TableResponse,
    TableWriteBody,
    WalEntryLine,
)
from tidebook.core.errors import InvalidInput, OutcomeUnknown, Unavailable
from tidebook.remote.connection import Connection
from tidebook.wal.reading import EntryPage, Handler, OnProgress, Replay
from tidebook.wal.record import WalEntry, Writes, Written, pack_writes, table_id, whole_number
from tidebook.wal.region import Cleaned
from tidebook.wal.topics import region_id

logger = logging.getLogger("tidebook.remote")

_decode_entries = msgspec.json.Decoder(WalEntryLine).decode_lines


class RemoteRegionMeta:
    """The tables of a region as the server last described them: for example, `tables[id].next_seq_num`."""

    def __init__(self, tables: Sequence[TableResponse], term: int) -> None:
        self.term = term
        self.tables = {each.table: each for each in tables}


class RemoteRegion:
    """A region of a write-ahead log on a server, with most methods of `Region`; the others raise `InvalidInput`."""

    def __init__(self, namespace: str, id: int, connection: Connection) -> None:
        self.id = id
        self._at = (namespace, id)
        self._connection = connection
        self._session: str | None = None
        self.meta = RemoteRegionMeta((), 0)

    async def open(self, *, create: bool, writable: bool) -> None:
        """Claim the region for writing, or only read its state; called by `RemoteWal.open_region`."""
        if not writable:
            await self.refresh()
            return
        body = RegionOpenBody(create)
        response = await self._connection.call("wal.open_session", *self._at, body=body)
        self._session = response.session
        self.meta = RemoteRegionMeta(response.tables, response.term)

    @property
    def writable(self) -> bool:
        """Whether the region was opened for writing; if another writer has claimed it since, the next write raises."""
        return self._session is not None

    async def write(self, table: int, payloads: Sequence[Any]) -> Written:
        """Write payloads to a table, atomically and in order; return their sequence numbers and the record's offset.

        See `Region.write`. The server closes a session that is idle for too long: then a write raises `Fenced`, and
        the region must be opened again.
        """
        [written] = await self.write_many([(table, payloads)])
        return written

    async def write_many(self, writes: Writes) -> list[Written]:
        """Write to several tables atomically, in the order given; return one `Written` for each pair."""
        pairs = list(writes.items() if isinstance(writes, Mapping) else writes)
        pack_writes(pairs)  # raises the errors of the server's validation
        if self._session is None:
            raise InvalidInput(f"region {self.id} was opened with writable=False: open it for writing")
        bodies = [TableWriteBody(table, tuple(map(PayloadBody.of, payloads))) for table, payloads in pairs]
        body = RegionWriteBody(self._session, tuple(bodies))
        response = await self._connection.call("wal.write", *self._at, body=body)
        return [Written(each.first, each.last, each.offset) for each in response.written]

    def read(self, *, from_offset: int = 0) -> AsyncGenerator[WalEntry, None]:
        """Yield the entries of all tables in log order, as of the start of the read, without those marked deleted."""
        return self._entries({"from_offset": whole_number(from_offset, "from_offset")})

    def read_table(self, table: int, *, start: int = 1) -> AsyncGenerator[WalEntry, None]:
        """Yield one table's entries from sequence number `start` on, without those marked deleted."""
        return self._entries({"table": table_id(table), "start": whole_number(start, "start")})

    async def _entries(self, query: dict[str, object]) -> AsyncGenerator[WalEntry, None]:
        async with aclosing(self._connection.lines("wal.read", *self._at, query=query)) as pages:
            async for page in pages:
                for line in _decode_entries(page):
                    yield WalEntry(line.table, line.seq, payload_from(line.payload, line.payload_base64), line.offset)

    async def replay(
        self, handlers: Mapping[int, Handler], *, other: Handler | None = None, progress: OnProgress | None = None
    ) -> dict[int, int]:
        """Read the region once, pass each entry to the handler of its table, and return the entry count by table.

        See `Region.replay`. `progress` is called with the number of offsets done, and their total as of the start.
        """
        replay = Replay(handlers, other=other, progress=progress)
        total, done = (await self.status()).log_end, 0
        async for entry in self.read():
            for handler, [each] in replay.take(EntryPage([[entry]], min(done, total), total)):
                result = handler(each)
                if result is not None and isawaitable(result):
                    await result
            done = entry.offset + 1
        for _ in replay.take(EntryPage([], total, total)):
            pass
        return replay.counts

    async def refresh(self) -> None:
        """Fetch the region's current state into `meta`."""
        response = await self.status()
        self.meta = RemoteRegionMeta(response.tables, response.term)

    async def mark_deleted(self, table: int, seq: int, *, incarnation: int | None = None) -> None:
        """Mark the table's entries below `seq` as deleted."""
        body = MarkBody(table_id(table), whole_number(seq, "seq"), incarnation)
        await self._connection.call("wal.mark_deleted", *self._at, body=body)

    async def request_flush(self, table: int | None = None) -> list[int]:
        """Ask the region's owner to flush a table, or all tables with entries; return the tables."""
        body = FlushBody(None if table is None else table_id(table))
        tables: list[int] = (await self._connection.call("wal.request_flush", *self._at, body=body)).tables
        return tables

    async def drop_table(self, table: int) -> None:
        """Drop a table with all its entries."""
        await self._connection.call("wal.drop_table", *self._at, table_id(table))

    async def snapshot(self) -> None:
        """Write a snapshot of the region's state."""
        await self._connection.call("wal.snapshot", *self._at)

    async def clean(self) -> Cleaned:
        """Remove the entries that no table needs."""
        response = await self._connection.call("wal.clean", *self._at)
        return Cleaned(**msgspec.structs.asdict(response))

    async def status(self) -> RegionResponse:
        """Return the status of the region and its tables."""
        response: RegionResponse = await self._connection.call("wal.status", *self._at)
        return response

    async def close(self) -> None:
        """Release the claim, if the region was opened for writing; a server that does not answer releases it later."""
        session, self._session = self._session, None
        if session is not None:
            try:
                await self._connection.call("wal.close_session", *self._at, session)
            except (Unavailable, OutcomeUnknown):
                logger.warning(
                    "%s/%d: the server does not answer; it releases the claim once the session is idle", *self._at
                )

    def __getattr__(self, name: str) -> object:
        if name.startswith("_"):
            raise AttributeError(name)
        raise InvalidInput(f"a region of a remote book has no {name}: open the folder or .toml of the book")


class RemoteWal:
    """The regions of one namespace on a server; it has the methods of `tidebook.wal.wal.Wal`."""

    def __init__(self, namespace: str, connection: Connection, *, on_open: Callable[[RemoteWal], object]) -> None:
        self.namespace = namespace
        self._connection = connection
        #: Called when a region is open for writing: from then on the book must close this object.
        self._on_open = on_open
        self._open: list[RemoteRegion] = []

    async def open_region(self, id: int, *, create: bool = False, writable: bool = True) -> RemoteRegion:
        """Open a region and, unless `writable=False`, claim it for writing, which fences the previous owner."""
        region = RemoteRegion(self.namespace, region_id(id), self._connection)
        await region.open(create=create, writable=writable)
        if region.writable:
            # The server has ended an earlier session of the region.
            self._open = [*(each for each in self._open if each.writable and each.id != region.id), region]
            self._on_open(self)
        return region

    async def regions(self) -> list[int]:
        """Return the ids of the regions in this namespace, sorted."""
        regions: list[int] = (await self._connection.call("wal.regions", self.namespace)).regions
        return regions

    async def delete_region(self, id: int) -> None:
        """Delete a region and all its entries permanently; raise `NotFound` if it does not exist."""
        await self._connection.call("wal.delete_region", self.namespace, region_id(id))

    async def close(self) -> None:
        """Release the claims of all open regions."""
        regions, self._open = self._open, []
        await asyncio.gather(*(region.close() for region in regions))
