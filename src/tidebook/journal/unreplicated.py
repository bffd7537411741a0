"""An index of the unreplicated records of a partition: offsets by journal id, and as many records as fit in memory."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Final, NamedTuple

from tidebook.log.port import Record

#: How many offsets are dropped together: few enough to block the event loop for only a few milliseconds.
BLOCK_RECORDS_MAX = 8192
#: With a small `offsets_max` the blocks are smaller, so that there are at least this many.
BLOCKS_MIN = 8
#: The memory of a record without its key and value, as measured.
RECORD_BYTES: Final = 330


class _OffsetBlock(NamedTuple):
    """The offsets of a contiguous part of the log, by hash of the id: 16 bytes per record, however long the id is.

    Different ids may share a hash, so a lookup may return offsets of other journals.
    """

    last: int
    #: Hashes in ascending order, and the offset that belongs to each.
    hashes: array[int]
    offsets: array[int]

    @classmethod
    def of(cls, last: int, by_key: dict[str, array[int]]) -> _OffsetBlock:
        pairs = sorted([(hash(id), offset) for id, offsets in by_key.items() for offset in offsets])
        return cls(last, array("q", [hashed for hashed, _ in pairs]), array("q", [offset for _, offset in pairs]))

    def find(self, hashed: int) -> Iterator[int]:
        """Return the offsets of all ids with this hash, in ascending order."""
        index = bisect_left(self.hashes, hashed)
        while index < len(self.hashes) and self.hashes[index] == hashed:
            yield self.offsets[index]
            index += 1


class Unreplicated:
    """Offsets by journal id in blocks, oldest first, and records by offset."""

    def __init__(self, *, offsets_max: int, bytes_max: int) -> None:
        self._block_records = max(1, min(BLOCK_RECORDS_MAX, offsets_max // BLOCKS_MIN))
        self._blocks_max = offsets_max // self._block_records
        self._bytes_max = bytes_max
        self.begin(0)

    def begin(self, base: int) -> None:
        """Clear the index; it is complete from offset `base` on."""
        #: The index has every record at or above this offset.
        self.base = base
        self._older: deque[_OffsetBlock] = deque()
        self._newest: dict[str, array[int]] = {}
        self._room = self._block_records
        self._records: OrderedDict[int, Record] = OrderedDict()
        self._bytes_held = 0

    def add(self, id: str, record: Record) -> None:
        """Add a record of a journal; its offset must be above all others."""
        offsets = self._newest.get(id)
        if offsets is None:
            offsets = self._newest[id] = array("q")
        offsets.append(record.offset)
        self._records[record.offset] = record
        self._bytes_held += _memory_bytes(record)
        while self._bytes_held > self._bytes_max and self._records:
            self._drop_record()
        self._room -= 1
        if not self._room:
            self._older.append(_OffsetBlock.of(record.offset, self._newest))
            self._newest, self._room = {}, self._block_records
            if len(self._older) > self._blocks_max:
                self.base = max(self.base, self._older.popleft().last + 1)

    def find(self, id: str, after: int, to: int) -> list[Record] | None:
        """Return the journal's records with after < offset ≤ to, or None if one of them is not in memory."""
        if after + 1 < self.base:
            return None
        found: list[Record] = []
        key: bytes | None = None
        for offset in self._offsets(id, after):
            if after < offset <= to:
                record = self._records.get(offset)
                if record is None:
                    return None
                if key is None:
                    key = id.encode()
                if record.key == key:
                    found.append(record)
        return found

    def _offsets(self, id: str, after: int) -> Iterator[int]:
        """Return the journal's offsets after `after`; some may be lower, or of an id with the same hash."""
        hashed = hash(id)
        for block in self._older:
            if block.last > after:
                yield from block.find(hashed)
        yield from self._newest.get(id, ())

    def drop_below(self, base: int) -> bool:
        """Drop at most one block of offsets and records below `base`; return whether there are more to drop."""
        self.base = max(self.base, base)
        for _ in range(self._block_records):
            if not self._records or next(iter(self._records)) >= self.base:
                break
            self._drop_record()
        if self._older and self._older[0].last < self.base:
            self._older.popleft()
        more_offsets = bool(self._older) and self._older[0].last < self.base
        return more_offsets or (bool(self._records) and next(iter(self._records)) < self.base)

    def _drop_record(self) -> None:
        _, oldest = self._records.popitem(last=False)
        self._bytes_held -= _memory_bytes(oldest)


def _memory_bytes(record: Record) -> int:
    return RECORD_BYTES + len(record.key or b"") + len(record.value or b"")
