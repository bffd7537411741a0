"""How an event lies in its row: one cell for all of it. `docs/reference/tables.md` tells the same to people."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tidebook.core.errors import Corrupt
from tidebook.core.replication import EventRow

# A cell costs Cassandra and its drivers about as much as 200 bytes do; one decoder call costs less than five columns.
_decode = msgspec.msgpack.Decoder(EventRow).decode
encode_row = msgspec.msgpack.Encoder().encode


def decode_rows(cells: Iterable[bytes]) -> list[EventRow]:
    """The rows of these cells."""
    try:
        return [_decode(cell) for cell in cells]
    except msgspec.MsgspecError as error:
        raise Corrupt(f"an event in the store is damaged: {error}: repair it from the log") from error
