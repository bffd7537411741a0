"""How an event lies in its row: one cell for all of it. `docs/reference/tables.md` tells the same to people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import overload

import msgspec

from tidebook.core.errors import Corrupt
from tidebook.core.replication import EventRow

# A cell costs Cassandra and its drivers about as much as 200 bytes do; one decoder call costs less than five columns.
_decode = msgspec.msgpack.Decoder(EventRow).decode
encode_row = msgspec.msgpack.Encoder().encode


class Rows(Sequence[EventRow]):
    """Rows that are decoded when they are looked at: one at a time costs half of what a list of them does."""

    __slots__ = ("_cells",)

    def __init__(self, cells: Sequence[bytes]) -> None:
        self._cells = cells

    def __len__(self) -> int:
        return len(self._cells)

    def __iter__(self) -> Iterator[EventRow]:
        with _undamaged():
            yield from map(_decode, self._cells)

    @overload
    def __getitem__(self, index: int) -> EventRow: ...
    @overload
    def __getitem__(self, index: slice) -> Rows: ...
    def __getitem__(self, index: int | slice) -> EventRow | Rows:
        if isinstance(index, slice):
            return Rows(self._cells[index])
        with _undamaged():
            return _decode(self._cells[index])


@contextmanager
def _undamaged() -> Iterator[None]:
    try:
        yield
    except msgspec.MsgspecError as error:
        raise Corrupt(f"an event in the store is damaged: {error}: repair it from the log") from error
