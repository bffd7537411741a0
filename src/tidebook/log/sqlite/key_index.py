"""Find the records of a key: in the key runs, and among the few records after the last run."""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterator

import apsw

from tidebook.log.sqlite.chunk_directory import chunks
from tidebook.log.sqlite.chunks import BoundsChanged, PartitionBounds, partition_base, unpack_keys
from tidebook.log.sqlite.key_runs import decode, matching_indexes, runs_between

CACHED_BYTES_MAX = 32_000_000
TAILS_MAX = 1_000


class _Tail:
    """The offsets by key of the records from `indexed_to`, or from the partition's start, to before `seen`."""

    __slots__ = ("indexed_to", "offsets", "seen")

    def __init__(self, indexed_to: int, first: int) -> None:
        self.indexed_to = indexed_to
        self.seen = first
        self.offsets: dict[bytes, list[int]] = {}


class KeyIndex:
    """Finds offsets by key. It only caches rows that never change in the file, so its cache is never stale."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: OrderedDict[tuple[int, int], array[int]] = OrderedDict()
        self._cached_bytes = 0
        self._tails: OrderedDict[int, _Tail] = OrderedDict()

    def offsets(
        self, connection: apsw.Connection, bounds: PartitionBounds, key: bytes, start: int, stop: int
    ) -> Iterator[int]:
        """Yield the offsets of a key from `start` to before `stop`, in order; some may belong to other keys.

        Raise BoundsChanged if the index was merged or truncated since the bounds were read.
        """
        for first, count in runs_between(start, stop, bounds.indexed_to):
            for index in matching_indexes(self._run(connection, partition_base(bounds.id) + first, count), key):
                if start <= first + index < stop:
                    yield first + index
        if stop > bounds.indexed_to:
            for offset in self._tail(connection, bounds, stop).get(key, ()):
                if start <= offset < stop:
                    yield offset

    def _run(self, connection: apsw.Connection, id: int, count: int) -> array[int]:
        with self._lock:
            entries = self._runs.get((id, count))
            if entries is not None:
                self._runs.move_to_end((id, count))
                return entries
            row = connection.execute("SELECT entries FROM key_run WHERE id = ? AND count = ?", (id, count)).fetchone()
            if row is None:
                raise BoundsChanged  # the run was merged or truncated
            entries = self._runs[id, count] = decode(row[0])
            self._cached_bytes += len(row[0])
            while self._cached_bytes > CACHED_BYTES_MAX and len(self._runs) > 1:
                _, oldest = self._runs.popitem(last=False)
                self._cached_bytes -= len(oldest) * oldest.itemsize
            return entries

    def _tail(self, connection: apsw.Connection, bounds: PartitionBounds, stop: int) -> dict[bytes, list[int]]:
        with self._lock:
            tail = self._tails.pop(bounds.id, None)
            if tail is None or tail.indexed_to != bounds.indexed_to or tail.seen < bounds.start:
                tail = _Tail(bounds.indexed_to, max(bounds.indexed_to, bounds.start))
            if tail.seen < stop:
                _extend(tail, connection, bounds, stop)
            self._tails[bounds.id] = tail
            if len(self._tails) > TAILS_MAX:
                self._tails.popitem(last=False)
            return tail.offsets


def _extend(tail: _Tail, connection: apsw.Connection, bounds: PartitionBounds, stop: int) -> None:
    for chunk in chunks(connection, bounds, tail.seen, stop):
        if chunk.first > tail.seen:
            raise BoundsChanged  # truncated
        for offset, key in enumerate(unpack_keys(chunk.body), chunk.first):
            if offset >= tail.seen:
                tail.seen = offset + 1
                if key is not None:
                    tail.offsets.setdefault(key, []).append(offset)
    if tail.seen < stop:
        raise BoundsChanged
