"""Finding a key's records: in the runs, and behind them among the few records that no run has yet."""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterator

import apsw

from tidebook.log.embedded.chunks import Bounds, Moved, base, unpack_keys
from tidebook.log.embedded.directory import chunks
from tidebook.log.embedded.key_runs import decode, places, runs_between

CACHED_BYTES_MAX = 32_000_000
TAILS_MAX = 1_000


class _Tail:
    """The keys of the records from `indexed_to`, or from the start, to before `seen`."""

    __slots__ = ("indexed_to", "offsets", "seen")

    def __init__(self, indexed_to: int, first: int) -> None:
        self.indexed_to = indexed_to
        self.seen = first
        self.offsets: dict[bytes, list[int]] = {}


class KeyIndex:
    """Offsets that may hold a key. What it keeps in memory never changes in the file, so it never goes stale."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: OrderedDict[tuple[int, int], array[int]] = OrderedDict()
        self._bytes_held = 0
        self._tails: OrderedDict[int, _Tail] = OrderedDict()

    def offsets(self, connection: apsw.Connection, at: Bounds, key: bytes, start: int, stop: int) -> Iterator[int]:
        """Offsets from `start` to before `stop`, in order; a few may be of other keys."""
        for first, count in runs_between(start, stop, at.indexed_to):
            for place in places(self._run(connection, base(at.id) + first, count), key):
                if start <= first + place < stop:
                    yield first + place
        if stop > at.indexed_to:
            for offset in self._tail(connection, at, stop).get(key, ()):
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
                raise Moved  # it has been merged, or truncated
            entries = self._runs[id, count] = decode(row[0])
            self._bytes_held += len(row[0])
            while self._bytes_held > CACHED_BYTES_MAX and len(self._runs) > 1:
                _, oldest = self._runs.popitem(last=False)
                self._bytes_held -= len(oldest) * oldest.itemsize
            return entries

    def _tail(self, connection: apsw.Connection, at: Bounds, stop: int) -> dict[bytes, list[int]]:
        with self._lock:
            tail = self._tails.pop(at.id, None)
            if tail is None or tail.indexed_to != at.indexed_to or tail.seen < at.start:
                tail = _Tail(at.indexed_to, max(at.indexed_to, at.start))
            if tail.seen < stop:
                _extend(tail, connection, at, stop)
            self._tails[at.id] = tail
            if len(self._tails) > TAILS_MAX:
                self._tails.popitem(last=False)
            return tail.offsets


def _extend(tail: _Tail, connection: apsw.Connection, at: Bounds, stop: int) -> None:
    for chunk in chunks(connection, at, tail.seen, stop):
        if chunk.first > tail.seen:
            raise Moved  # truncated
        for offset, key in enumerate(unpack_keys(chunk.body), chunk.first):
            if offset >= tail.seen:
                tail.seen = offset + 1
                if key is not None:
                    tail.offsets.setdefault(key, []).append(offset)
    if tail.seen < stop:
        raise Moved
