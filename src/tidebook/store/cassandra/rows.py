"""How events lie in their rows: one cell for all of it. `docs/reference/tables.md` tells the same to people.

The events of one append share a row, up to 16 of them: it has the number of the last, and says what the first is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Final

import msgspec

from tidebook.core.errors import Corrupt
from tidebook.core.position import Position
from tidebook.core.replication import EventRow

#: Which events of a record share a row follows from their index and segment alone, so every replicator agrees on it.
EVENTS_A_ROW_MAX: Final = 16


class Shared(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Consecutive events of one record. It has one field more than an EventRow, so their first bytes differ.

    Of two cells with one stamp Cassandra keeps the one whose bytes are greater. That must be the one with more events:
    whoever has folded a delete leaves out what it deletes, while a head of before may still be what readers go by. So
    the count comes first, and a single event's first byte is below a shared one's.
    """

    count: int
    seq_nr: int
    kept: tuple[bytes, ...]
    timestamp_ms: int
    position: Position
    index: int
    time_ms: int

    @property
    def last(self) -> int:
        """The number of its last event, which is the row's."""
        return self.seq_nr + self.count - 1

    def rows(self) -> list[EventRow]:
        """Its events."""
        first, index, timestamp_ms, position, time_ms = (
            self.seq_nr, self.index, self.timestamp_ms, self.position, self.time_ms,
        )  # fmt: skip
        return [
            EventRow(first + i, kept, timestamp_ms, position, index + i, time_ms) for i, kept in enumerate(self.kept)
        ]


# A cell costs Cassandra and its drivers about as much as 200 bytes do; one decoder call costs less than five columns.
_decode = msgspec.msgpack.Decoder(EventRow).decode
_decode_shared = msgspec.msgpack.Decoder(Shared).decode
encode_row = msgspec.msgpack.Encoder().encode
#: How a msgpack array of as many fields as `Shared` has begins.
_SHARED: Final = 0x90 | len(Shared.__struct_fields__)


def encode_rows(rows: Sequence[EventRow]) -> bytes:
    """The cell of events that share a row."""
    first = rows[0]
    kept = tuple([row.kept for row in rows])
    return encode_row(
        Shared(len(rows), first.seq_nr, kept, first.timestamp_ms, first.position, first.index, first.time_ms)
    )


def is_shared(cell: bytes) -> bool:
    """Whether it holds several events."""
    return cell[0] == _SHARED


def decode_rows(cells: Iterable[bytes]) -> list[EventRow]:
    """The events of these cells, which are in the order of their rows."""
    rows: list[EventRow] = []
    try:
        for cell in cells:
            if cell[0] != _SHARED:
                rows.append(_decode(cell))
                continue
            shared = _decode_shared(cell)
            # It stands for all its numbers: an older Tidebook may have written some of them singly.
            while rows and shared.seq_nr <= rows[-1].seq_nr <= shared.last:
                rows.pop()
            rows += shared.rows()
    except (msgspec.MsgspecError, IndexError) as error:
        raise Corrupt(f"an event in the store is damaged: {error}: repair it from the log") from error
    return rows


def decode_rows_of(found: Iterable[tuple[str, bytes]]) -> list[tuple[str, EventRow]]:
    """The same for rows of several journals, each with its id."""
    rows: list[tuple[str, EventRow]] = []
    for id, of_journal in groupby(found, itemgetter(0)):
        rows += [(id, row) for row in decode_rows([cell for _, cell in of_journal])]
    return rows
