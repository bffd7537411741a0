"""Where the records of a key lie: sorted runs over a fixed count of records, written once, merged sixteen at a time.

A tree over (key, offset) would have a page of its own to write for nearly every record of a commit. A run is one row
for thousands of records. What is behind the last run is found by reading the keys of those few records.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from typing import Final
from zlib import crc32

import apsw

from tidebook.log.embedded.chunks import Bounds, base, unpack_keys
from tidebook.log.embedded.directory import chunks

#: Records of a run. Runs begin at multiples of it.
RUN: Final = 2_048
#: Runs that become one.
MERGED: Final = 16

_PLACE_BITS = 32
_PLACE_MASK = (1 << _PLACE_BITS) - 1


def hash_of(key: bytes) -> int:
    """What a run is sorted by. Keys may share it: the record itself tells."""
    return crc32(key) << _PLACE_BITS


def places(entries: array[int], key: bytes) -> Iterator[int]:
    """Where, counted from the run's first record, records of this key may lie, in order."""
    wanted = hash_of(key)
    at = bisect_left(entries, wanted)
    while at < len(entries) and entries[at] ^ wanted <= _PLACE_MASK:
        yield entries[at] & _PLACE_MASK
        at += 1


def runs_between(start: int, stop: int, indexed_to: int) -> Iterator[tuple[int, int]]:
    """First offset and count of the runs over `start` to before `stop`: they follow from `indexed_to`."""
    wide = RUN * MERGED
    merged_to = indexed_to // wide * wide
    at = start // wide * wide if start < merged_to else start // RUN * RUN
    while at < min(stop, indexed_to):
        count = wide if at < merged_to else RUN
        yield at, count
        at += count


def encode(entries: array[int]) -> bytes:
    """A run's bytes: 64 bits an entry, little-endian."""
    if sys.byteorder == "big":
        entries = array("Q", entries)
        entries.byteswap()
    return entries.tobytes()


def decode(data: bytes) -> array[int]:
    """Undo `encode`."""
    entries = array("Q")
    entries.frombytes(data)
    if sys.byteorder == "big":
        entries.byteswap()
    return entries


def index_up_to(connection: apsw.Connection, at: Bounds) -> int:
    """Write the runs that have become full between `indexed_to` and `end`; up to where the index goes now."""
    indexed_to = at.indexed_to
    while at.end - indexed_to >= RUN:
        entries = array("Q", sorted(_entries(connection, at, indexed_to)))
        _put(connection, at.id, indexed_to, RUN, entries)
        indexed_to += RUN
        if indexed_to % (RUN * MERGED) == 0:
            _merge(connection, at.id, indexed_to - RUN * MERGED)
    return indexed_to


def _entries(connection: apsw.Connection, at: Bounds, first: int) -> list[int]:
    entries: list[int] = []
    start = max(first, at.start)
    if start < first + RUN:
        for chunk in chunks(connection, at, start, first + RUN):
            places = enumerate(unpack_keys(chunk.body), chunk.first - first)
            entries += [hash_of(key) | place for place, key in places if key is not None and 0 <= place < RUN]
    return entries


def _merge(connection: apsw.Connection, partition_id: int, first: int) -> None:
    low, stop = base(partition_id) + first, base(partition_id) + first + RUN * MERGED
    entries: list[int] = []
    runs = connection.execute("SELECT id, entries FROM key_run WHERE id >= ? AND id < ? ORDER BY id", (low, stop))
    for id, data in runs:
        moved = id - low
        entries += [entry + moved for entry in decode(data)] if moved else decode(data)
    entries.sort()
    connection.execute("DELETE FROM key_run WHERE id >= ? AND id < ?", (low, stop))
    _put(connection, partition_id, first, RUN * MERGED, array("Q", entries))


def _put(connection: apsw.Connection, partition_id: int, first: int, count: int, entries: array[int]) -> None:
    connection.execute("INSERT INTO key_run VALUES (?, ?, ?)", (base(partition_id) + first, count, encode(entries)))
