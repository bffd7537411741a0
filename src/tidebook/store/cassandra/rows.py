"""How heads and events lie in their tables. `docs/reference/tables.md` tells the same to people."""

from __future__ import annotations

import struct
from typing import Final

from tidebook.core.errors import Corrupt, UnknownVersion
from tidebook.core.position import Position
from tidebook.core.replication import EventRow

#: One column for all of an event: a cell costs Cassandra about as much as 200 bytes do.
ROW_VERSION: Final = 1
_ROW = struct.Struct(">BHqIq")  # version, epoch, offset, index, time
ROW_HEADER_BYTES: Final = _ROW.size
_pack = _ROW.pack
_unpack_from = _ROW.unpack_from


def encode_row(row: EventRow) -> bytes:
    """An event's cell: what the log knows of it, then its own bytes."""
    at = row.position
    return _pack(ROW_VERSION, at.epoch, at.offset, row.index, row.timestamp_ms) + row.kept


def decode_rows(rows: list[tuple[int, bytes]]) -> list[EventRow]:
    """Undo `encode_row` for a page of (seq_nr, cell)."""
    decoded = []
    last = Position(-1, -1)
    try:
        for seq_nr, cell in rows:
            version, epoch, offset, index, timestamp_ms = _unpack_from(cell)
            if version != ROW_VERSION:
                raise UnknownVersion(f"event {seq_nr}", version=version, known=ROW_VERSION)
            if last.offset != offset or last.epoch != epoch:
                last = Position(epoch, offset)
            decoded.append(EventRow(seq_nr, cell[ROW_HEADER_BYTES:], timestamp_ms, last, index))
    except struct.error as error:
        raise Corrupt(f"an event's cell in the store is damaged: {error}: repair it from the log") from error
    return decoded
