"""Key runs, the log's index by key: sorted (key hash, index) entries of a fixed number of consecutive records.

A run is one row for thousands of records, written once; sixteen runs are merged into one. An index over (key, offset)
would instead write a page for nearly every record of a commit. The few records after the last run are found by reading
their keys.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from typing import Final
from zlib import crc32

import apsw

from tidebook.log.sqlite.chunk_directory import chunks
from tidebook.log.sqlite.chunks import PartitionBounds, partition_base, unpack_keys

#: Number of records of a run. Runs start at multiples of it.
RUN_RECORDS: Final = 2_048
#: Number of runs that are merged into one.
MERGED_RUNS: Final = 16

_INDEX_BITS = 32
_INDEX_MASK = (1 << _INDEX_BITS) - 1


def key_hash(key: bytes) -> int:
    """Return the hash by which runs are sorted, in the upper bits. Keys may collide: compare the record's key."""
    return crc32(key) << _INDEX_BITS


def matching_indexes(entries: array[int], key: bytes) -> Iterator[int]:
    """Yield the indexes within the run, in order, of records that may have this key."""
    wanted = key_hash(key)
    i = bisect_left(entries, wanted)
    while i < len(entries) and entries[i] ^ wanted <= _INDEX_MASK:
        yield entries[i] & _INDEX_MASK
        i += 1


def runs_between(start: int, stop: int, indexed_to: int) -> Iterator[tuple[int, int]]:
    """Yield the first offset and record count of the runs that cover `start` to before `stop`, up to `indexed_to`."""
    wide = RUN_RECORDS * MERGED_RUNS
    merged_to = indexed_to // wide * wide
    first = start // wide * wide if start < merged_to else start // RUN_RECORDS * RUN_RECORDS
    while first < min(stop, indexed_to):
        count = wide if first < merged_to else RUN_RECORDS
        yield first, count
        first += count


def encode(entries: array[int]) -> bytes:
    """Encode a run: 64 bits per entry, little-endian."""
    if sys.byteorder == "big":
        entries = array("Q", entries)
        entries.byteswap()
    return entries.tobytes()


def decode(data: bytes) -> array[int]:
    """Decode a run."""
    entries = array("Q")
    entries.frombytes(data)
    if sys.byteorder == "big":
        entries.byteswap()
    return entries


def index_up_to(connection: apsw.Connection, bounds: PartitionBounds) -> int:
    """Write the runs that are complete between `indexed_to` and `end`; return the new `indexed_to`."""
    indexed_to = bounds.indexed_to
    while bounds.end - indexed_to >= RUN_RECORDS:
        entries = array("Q", sorted(_entries(connection, bounds, indexed_to)))
        _insert(connection, bounds.id, indexed_to, RUN_RECORDS, entries)
        indexed_to += RUN_RECORDS
        if indexed_to % (RUN_RECORDS * MERGED_RUNS) == 0:
            _merge(connection, bounds.id, indexed_to - RUN_RECORDS * MERGED_RUNS)
    return indexed_to


def _entries(connection: apsw.Connection, bounds: PartitionBounds, first: int) -> list[int]:
    entries: list[int] = []
    start = max(first, bounds.start)
    if start < first + RUN_RECORDS:
        for chunk in chunks(connection, bounds, start, first + RUN_RECORDS):
            keys = enumerate(unpack_keys(chunk.body), chunk.first - first)
            entries += [key_hash(key) | index for index, key in keys if key is not None and 0 <= index < RUN_RECORDS]
    return entries


def _merge(connection: apsw.Connection, partition_id: int, first: int) -> None:
    low, stop = partition_base(partition_id) + first, partition_base(partition_id) + first + RUN_RECORDS * MERGED_RUNS
    entries: list[int] = []
    runs = connection.execute("SELECT id, entries FROM key_run WHERE id >= ? AND id < ? ORDER BY id", (low, stop))
    for id, data in runs:
        shift = id - low
        entries += [entry + shift for entry in decode(data)] if shift else decode(data)
    entries.sort()
    connection.execute("DELETE FROM key_run WHERE id >= ? AND id < ?", (low, stop))
    _insert(connection, partition_id, first, RUN_RECORDS * MERGED_RUNS, array("Q", entries))


def _insert(connection: apsw.Connection, partition_id: int, first: int, count: int, entries: array[int]) -> None:
    connection.execute(
        "INSERT INTO key_run VALUES (?, ?, ?)", (partition_base(partition_id) + first, count, encode(entries))
    )
