"""Where the chunks of a partition lie: rows of a fixed count of them, and the last few in the partition's own row."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Final, NamedTuple

import apsw
import msgspec

from tidebook.core.errors import Corrupt
from tidebook.folder.rows import each_row
from tidebook.log.embedded.chunks import Bounds, Moved, base

#: Chunks that a row of the directory lists.
LISTED: Final = 64
#: Chunks that are fetched together.
FETCHED: Final = 16

_AT = "SELECT id, entries FROM directory WHERE id BETWEEN ? AND ? ORDER BY id DESC LIMIT 1"
_NEXT = "SELECT id, entries FROM directory WHERE id > ? AND id < ? ORDER BY id LIMIT 1"
_CHUNKS = "SELECT id, place, time_ms, body FROM chunk WHERE id IN (VALUES {})"

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[list[int], list[int]]).decode


class Listing(NamedTuple):
    """Chunks behind one another: the first offset of each, and its id."""

    firsts: list[int]
    ids: list[int]


class Chunk(NamedTuple):
    """A chunk as it is kept."""

    first: int
    time_ms: int
    body: bytes


def encode_listing(firsts: list[int], ids: list[int]) -> bytes:
    """A listing's bytes."""
    return _encode((firsts, ids))


def decode_listing(data: bytes) -> Listing:
    """Undo `encode_listing`; nothing is an empty one."""
    try:
        return Listing(*_decode(data)) if data else Listing([], [])
    except msgspec.MsgspecError as error:
        raise Corrupt(f"the log's list of chunks is damaged ({error}): restore a copy of log.db") from error


def listings(connection: apsw.Connection, at: Bounds, start: int, stop: int) -> Iterator[Listing]:
    """The lists of the chunks that hold offsets from `start` to before `stop`, and of a few around them."""
    recent = decode_listing(at.recent)
    low = base(at.id)
    # What was listed in the partition's row when its bounds were read may have a row of its own by now.
    listed_to = min(stop, recent.firsts[0]) if recent.firsts else stop
    if start < listed_to:
        row = connection.execute(_AT, (low, low + start)).fetchone()
        if row is None:
            row = connection.execute(_NEXT, (low - 1, low + listed_to)).fetchone()
        while row is not None:
            yield decode_listing(row[1])
            row = connection.execute(_NEXT, (row[0], low + listed_to)).fetchone()
    if recent.firsts and stop > recent.firsts[0]:
        yield recent


def chunks(connection: apsw.Connection, at: Bounds, start: int, stop: int) -> Iterator[Chunk]:
    """The chunks that hold offsets from `start` to before `stop`, in order."""
    for firsts, ids in listings(connection, at, start, stop):
        first = max(0, bisect_right(firsts, start) - 1)
        last = bisect_right(firsts, stop - 1)
        for some in range(first, last, FETCHED):
            wanted = ids[some : min(last, some + FETCHED)]
            found = {row[0]: row for row in each_row(connection, _CHUNKS, (), wanted)}
            for i, id in enumerate(wanted, some):
                row = found.get(id)
                if row is None or row[1] != base(at.id) + firsts[i]:
                    raise Moved  # truncated
                yield Chunk(firsts[i], row[2], row[3])


class Finder:
    """Finds the chunk of one offset after another, each above the one before."""

    def __init__(self, connection: apsw.Connection, at: Bounds) -> None:
        self._connection = connection
        self._at = at
        self._listing = Listing([], [])

    def find(self, offset: int) -> Chunk:
        """The chunk that holds `offset`."""
        firsts, ids = self._listing
        i = bisect_right(firsts, offset) - 1
        if i < 0 or i == len(firsts) - 1:  # it may be on the next list
            for listing in listings(self._connection, self._at, offset, offset + 1):
                if listing.firsts[0] <= offset:
                    self._listing = listing
            firsts, ids = self._listing
            i = bisect_right(firsts, offset) - 1
            if i < 0:
                raise Moved
        row = self._connection.execute("SELECT place, time_ms, body FROM chunk WHERE id = ?", (ids[i],)).fetchone()
        if row is None or row[0] != base(self._at.id) + firsts[i]:
            raise Moved
        return Chunk(firsts[i], row[1], row[2])
