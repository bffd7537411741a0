"""Finding a key's records: in the runs, and behind them among the few records that no run has yet."""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterator

import apsw

from tidebook.core.errors import Corrupt
from tidebook.log.embedded.chunks import base, unpack_keys
from tidebook.log.embedded.key_runs import chunk_of, decode, places, runs_between

CACHED_BYTES_MAX = 32_000_000
TAILS_MAX = 1_000

_CHUNKS = "SELECT id, body FROM chunk WHERE id >= ? AND id < ? ORDER BY id"


class _Tail:
    """The keys of the records from `first` to before `seen`."""

    __slots__ = ("first", "offsets", "seen")

    def __init__(self, first: int) -> None:
        self.first = self.seen = first
        self.offsets: dict[bytes, list[int]] = {}


class KeyIndex:
    """Offsets that may hold a key. What it keeps in memory never changes in the file, so it never goes stale."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: OrderedDict[tuple[int, int], array[int]] = OrderedDict()
        self._bytes_held = 0
        self._tails: OrderedDict[int, _Tail] = OrderedDict()

    def offsets(
        self, connection: apsw.Connection, partition_id: int, key: bytes, start: int, stop: int, indexed_to: int
    ) -> Iterator[int]:
        """Offsets from `start` to before `stop`, in order; a few may be of other keys."""
        for first, count in runs_between(start, stop, indexed_to):
            for place in places(self._run(connection, base(partition_id) + first, count), key):
                if start <= first + place < stop:
                    yield first + place
        if stop > indexed_to:
            for offset in self._tail(connection, partition_id, stop, indexed_to).get(key, ()):
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
                raise Corrupt(f"the log's index by key lacks the run {id}: restore a copy of log.db")
            entries = self._runs[id, count] = decode(row[0])
            self._bytes_held += len(row[0])
            while self._bytes_held > CACHED_BYTES_MAX and len(self._runs) > 1:
                _, oldest = self._runs.popitem(last=False)
                self._bytes_held -= len(oldest) * oldest.itemsize
            return entries

    def _tail(
        self, connection: apsw.Connection, partition_id: int, stop: int, indexed_to: int
    ) -> dict[bytes, list[int]]:
        with self._lock:
            tail = self._tails.pop(partition_id, None)
            if tail is None or tail.first != indexed_to:
                tail = _Tail(indexed_to)
            self._tails[partition_id] = tail
            if len(self._tails) > TAILS_MAX:
                self._tails.popitem(last=False)
            if tail.seen < stop:
                low = base(partition_id)
                chunks = connection.execute(_CHUNKS, (chunk_of(connection, partition_id, tail.seen), low + stop))
                for id, body in chunks:
                    for offset, key in enumerate(unpack_keys(body), id - low):
                        if offset >= tail.seen and key is not None:
                            tail.offsets.setdefault(key, []).append(offset)
                    tail.seen = offset + 1
            return tail.offsets
