"""Encode event rows: one cell per row (see `docs/reference/tables.md`).

The events of one append are packed into rows of up to 16. A packed row has the number of its last event, and its cell
the number of the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Final

import msgspec

from tidebook.core.bounds import DECODE_ERRORS
from tidebook.core.errors import Corrupt
from tidebook.core.position import Position
from tidebook.core.replication_plan import EventRow

#: The index and segment of events alone determine which of them share a row, so all replicators agree on it.
EVENTS_PER_ROW_MAX: Final = 16


class PackedEvents(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Consecutive events of one record. It has one field more than an `EventRow`, so the first bytes of the two differ.

    Of two cells with the same stamp Cassandra keeps the one with the greater bytes. That must be the one with more
    events: a replicator that has folded a delete omits the deleted events, while readers may still use an earlier head.
    So the count is the first field, and the first byte of a single event is less than that of a packed row.
    """

    count: int
    seq_nr: int
    events: tuple[bytes, ...]
    timestamp_ms: int
    position: Position
    index: int
    time_ms: int

    @property
    def last(self) -> int:
        """The number of its last event, which is the row's number."""
        return self.seq_nr + self.count - 1

    def rows(self) -> list[EventRow]:
        """Return its events."""
        first, index, timestamp_ms, position, time_ms = (
            self.seq_nr, self.index, self.timestamp_ms, self.position, self.time_ms,
        )  # fmt: skip
        return [
            EventRow(first + i, event, timestamp_ms, position, index + i, time_ms)
            for i, event in enumerate(self.events)
        ]


# A row has one cell, because a cell costs Cassandra and its drivers about as much as 200 bytes, and one call of a
# decoder costs less than reading five columns.
_decode = msgspec.msgpack.Decoder(EventRow).decode
_decode_packed = msgspec.msgpack.Decoder(PackedEvents).decode
encode_row = msgspec.msgpack.Encoder().encode
#: The first byte of a msgpack array with as many fields as `PackedEvents`.
_PACKED: Final = 0x90 | len(PackedEvents.__struct_fields__)


def encode_rows(rows: Sequence[EventRow]) -> bytes:
    """Encode events that share a row into its cell."""
    first = rows[0]
    events = tuple([row.encoded for row in rows])
    return encode_row(
        PackedEvents(len(rows), first.seq_nr, events, first.timestamp_ms, first.position, first.index, first.time_ms)
    )


def is_packed(cell: bytes) -> bool:
    """Return whether a cell holds several events."""
    return cell[0] == _PACKED


def decode_rows(cells: Iterable[bytes]) -> list[EventRow]:
    """Decode the events of cells that are in the order of their rows; raise `Corrupt` if one is damaged."""
    rows: list[EventRow] = []
    try:
        for cell in cells:
            if cell[0] != _PACKED:
                rows.append(_decode(cell))
                continue
            packed = _decode_packed(cell)
            # A packed row replaces single rows of the same numbers, which an interrupted repair may have written.
            while rows and packed.seq_nr <= rows[-1].seq_nr <= packed.last:
                rows.pop()
            rows += packed.rows()
    except (*DECODE_ERRORS, IndexError) as error:
        raise Corrupt(f"an event in the store is damaged: {error}: repair it from the log") from error
    return rows


def decode_rows_of(id_cells: Iterable[tuple[str, bytes]]) -> list[tuple[str, EventRow]]:
    """Decode the rows of several journals, each with its id."""
    rows: list[tuple[str, EventRow]] = []
    for id, journal_cells in groupby(id_cells, itemgetter(0)):
        rows += [(id, row) for row in decode_rows([cell for _, cell in journal_cells])]
    return rows
