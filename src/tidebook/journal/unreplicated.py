"""Where the unreplicated records of each key lie, and as many of the records as fit; dropped in stretches."""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque

from tidebook.log.port import Record

#: Offsets that are dropped together. A few milliseconds at most: whoever drops stops the event loop meanwhile.
STRETCH_RECORDS_MAX = 8192
#: With small bounds, what is dropped together is a part of them.
STRETCHES_MIN = 8


class Unreplicated:
    """Offsets by key in stretches of the log, oldest first, and records by offset."""

    def __init__(self, *, offsets_max: int, bytes_max: int) -> None:
        self._stretch_records = max(1, min(STRETCH_RECORDS_MAX, offsets_max // STRETCHES_MIN))
        self._stretches_max = offsets_max // self._stretch_records
        self._bytes_max = bytes_max
        self.begin(0)

    def begin(self, base: int) -> None:
        """Hold nothing, from here on."""
        #: Offsets by key are complete from here on.
        self.base = base
        #: The last offset of a stretch, and its offsets by key.
        self._older: deque[tuple[int, dict[str, array[int]]]] = deque()
        self._newest: dict[str, array[int]] = {}
        self._left = self._stretch_records
        self._records: OrderedDict[int, Record] = OrderedDict()
        self._bytes_held = 0

    def add(self, id: str, record: Record) -> None:
        """The next record of a key; offsets rise."""
        offsets = self._newest.get(id)
        if offsets is None:
            offsets = self._newest[id] = array("q")
        offsets.append(record.offset)
        self._records[record.offset] = record
        self._bytes_held += len(record.value or b"")
        while self._bytes_held > self._bytes_max and self._records:
            self._drop_record()
        self._left -= 1
        if not self._left:
            self._older.append((record.offset, self._newest))
            self._newest, self._left = {}, self._stretch_records
            if len(self._older) > self._stretches_max:
                last, _ = self._older.popleft()
                self.base = max(self.base, last + 1)

    def find(self, id: str, after: int, to: int) -> list[Record] | None:
        """The key's records of offsets after < offset ≤ to, or None where they are not all here."""
        if after + 1 < self.base:
            return None
        found: list[Record] = []
        stretches = [offsets for last, offsets in self._older if last > after and id in offsets]
        for stretch in (*stretches, self._newest):
            for offset in stretch.get(id, ()):
                if after < offset <= to:
                    record = self._records.get(offset)
                    if record is None:
                        return None
                    found.append(record)
        return found

    def drop_below(self, base: int) -> bool:
        """Forget what lies below, a stretch at a time: whether there is more to forget."""
        self.base = max(self.base, base)
        for _ in range(self._stretch_records):
            if not self._records or next(iter(self._records)) >= self.base:
                break
            self._drop_record()
        if self._older and self._older[0][0] < self.base:
            self._older.popleft()
        more_offsets = bool(self._older) and self._older[0][0] < self.base
        return more_offsets or (bool(self._records) and next(iter(self._records)) < self.base)

    def _drop_record(self) -> None:
        _, oldest = self._records.popitem(last=False)
        self._bytes_held -= len(oldest.value or b"")
