"""The directory of a partition's chunks: rows that list a fixed number, and the latest ones in the partition's row."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Final, NamedTuple

import apsw
import msgspec

from tidebook.core.errors import Corrupt
from tidebook.log.sqlite.chunks import BoundsChanged, PartitionBounds, partition_base
from tidebook.sqlite.multi_insert import each_row

#: Number of chunks that a row of the directory lists.
CHUNKS_PER_LISTING: Final = 64
#: Number of chunks that one statement fetches.
CHUNKS_PER_FETCH: Final = 16

_AT_OR_BEFORE = "SELECT id, entries FROM directory WHERE id BETWEEN ? AND ? ORDER BY id DESC LIMIT 1"
_NEXT = "SELECT id, entries FROM directory WHERE id > ? AND id < ? ORDER BY id LIMIT 1"
_CHUNKS = "SELECT id, place, time_ms, body FROM chunk WHERE id IN (VALUES {})"

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[list[int], list[int]]).decode


class Listing(NamedTuple):
    """Consecutive chunks: the first offset and the id of each."""

    firsts: list[int]
    ids: list[int]


class Chunk(NamedTuple):
    """A stored chunk: its first offset, its timestamp and its packed records."""

    first: int
    time_ms: int
    body: bytes


def encode_listing(firsts: list[int], ids: list[int]) -> bytes:
    """Encode a listing."""
    return _encode((firsts, ids))


def decode_listing(data: bytes) -> Listing:
    """Decode a listing, which is empty if `data` is; raise Corrupt if it is damaged."""
    try:
        return Listing(*_decode(data)) if data else Listing([], [])
    except msgspec.MsgspecError as error:
        raise Corrupt(f"the log's list of chunks is damaged ({error}): restore a copy of log.db") from error


def listings(connection: apsw.Connection, bounds: PartitionBounds, start: int, stop: int) -> Iterator[Listing]:
    """Yield listings, in order, that cover the offsets from `start` to before `stop`, and some chunks around them."""
    recent = decode_listing(bounds.recent)
    low = partition_base(bounds.id)
    # Chunks of `recent` may have moved to a directory row since the bounds were read: do not yield them twice.
    listed_to = min(stop, recent.firsts[0]) if recent.firsts else stop
    if start < listed_to:
        row = connection.execute(_AT_OR_BEFORE, (low, low + start)).fetchone()
        if row is None:
            row = connection.execute(_NEXT, (low - 1, low + listed_to)).fetchone()
        while row is not None:
            yield decode_listing(row[1])
            row = connection.execute(_NEXT, (row[0], low + listed_to)).fetchone()
    if recent.firsts and stop > recent.firsts[0]:
        yield recent


def chunks(connection: apsw.Connection, bounds: PartitionBounds, start: int, stop: int) -> Iterator[Chunk]:
    """Yield the chunks that contain the offsets from `start` to before `stop`, in order."""
    for firsts, ids in listings(connection, bounds, start, stop):
        first = max(0, bisect_right(firsts, start) - 1)
        last = bisect_right(firsts, stop - 1)
        for fetched_to in range(first, last, CHUNKS_PER_FETCH):
            wanted_ids = ids[fetched_to : min(last, fetched_to + CHUNKS_PER_FETCH)]
            found = {row[0]: row for row in each_row(connection, _CHUNKS, (), wanted_ids)}
            for i, id in enumerate(wanted_ids, fetched_to):
                row = found.get(id)
                if row is None or row[1] != partition_base(bounds.id) + firsts[i]:
                    raise BoundsChanged  # truncated
                yield Chunk(firsts[i], row[2], row[3])


class ChunkFinder:
    """Finds the chunks of ascending offsets."""

    def __init__(self, connection: apsw.Connection, bounds: PartitionBounds) -> None:
        self._connection = connection
        self._bounds = bounds
        self._listing = Listing([], [])

    def find(self, offset: int) -> Chunk:
        """Return the chunk that contains `offset`, which is above those of earlier calls."""
        firsts, ids = self._listing
        i = bisect_right(firsts, offset) - 1
        if i < 0 or i == len(firsts) - 1:  # the offset may be in the next listing
            for listing in listings(self._connection, self._bounds, offset, offset + 1):
                if listing.firsts[0] <= offset:
                    self._listing = listing
            firsts, ids = self._listing
            i = bisect_right(firsts, offset) - 1
            if i < 0:
                raise BoundsChanged
        row = self._connection.execute("SELECT place, time_ms, body FROM chunk WHERE id = ?", (ids[i],)).fetchone()
        if row is None or row[0] != partition_base(self._bounds.id) + firsts[i]:
            raise BoundsChanged
        return Chunk(firsts[i], row[1], row[2])
