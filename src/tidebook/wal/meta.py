"""What a region knows of its tables, and the one fold that makes it out of the data topic.

Everybody who folds the same records has the same RegionMeta: the owner, the recovering, the reading, the cleaning.
"""

from __future__ import annotations

from enum import Enum
from typing import assert_never

from tidebook.wal.mapping import SeqOffsets
from tidebook.wal.meter import Meter
from tidebook.wal.record import Claim, Damaged, DataRecord, Drop, Mark, Write

NO_WRITER = bytes(16)


class TableMeta:
    """One table of a region."""

    __slots__ = ("current_high_watermark", "latest_marked_deleted", "life", "mapping")

    def __init__(
        self,
        life: int,
        *,
        mapping: SeqOffsets | None = None,
        latest_marked_deleted: int = 0,
        current_high_watermark: int = 0,
    ) -> None:
        #: The offset of the record that made the table.
        self.life = life
        #: Sequence number → offset, of what is not marked deleted.
        self.mapping = SeqOffsets() if mapping is None else mapping
        #: Everything below this is no longer needed.
        self.latest_marked_deleted = latest_marked_deleted
        #: The data topic's end just after the table's last write.
        self.current_high_watermark = current_high_watermark

    @property
    def next_seq_num(self) -> int:
        """The number that the next entry gets."""
        return self.mapping.stop

    def frozen(self) -> TableMeta:
        return TableMeta(
            self.life,
            mapping=self.mapping.frozen(),
            latest_marked_deleted=self.latest_marked_deleted,
            current_high_watermark=self.current_high_watermark,
        )

    def __repr__(self) -> str:
        return (
            f"TableMeta(next_seq_num={self.next_seq_num}, latest_marked_deleted={self.latest_marked_deleted}, "
            f"current_high_watermark={self.current_high_watermark}, mapping={self.mapping!r})"
        )


class RegionMeta:
    """The fold of a region's records below `next_offset`."""

    def __init__(self) -> None:
        self.tables: dict[int, TableMeta] = {}
        #: The claim in force; term 0 before the first.
        self.term = 0
        self.writer = NO_WRITER
        self.next_offset = 0
        #: Nothing below this is needed; it may be gone, or not yet.
        self.truncated_to = 0
        #: When the snapshot was taken that it was restored from, if it was.
        self.snapshot_ms: int | None = None
        #: Where that snapshot ends: what lies before was not folded here.
        self.restored_at = 0
        self.meter = Meter()

    @property
    def first_offset(self) -> int:
        """The oldest record that a table still needs; `next_offset` where none does."""
        held = [t.mapping.first_offset for t in self.tables.values() if t.mapping.first_offset is not None]
        return min(held, default=self.next_offset)

    @property
    def held_bytes(self) -> int:
        """What the data topic must keep."""
        return self.meter.bytes_from(self.first_offset) if self.first_offset < self.next_offset else 0

    def frozen(self) -> RegionMeta:
        """The meta as it is now, whatever comes: cheap, the mappings are shared."""
        copy = RegionMeta()
        copy.tables = {table: meta.frozen() for table, meta in self.tables.items()}
        copy.term, copy.writer = self.term, self.writer
        copy.next_offset, copy.truncated_to = self.next_offset, self.truncated_to
        copy.snapshot_ms, copy.restored_at = self.snapshot_ms, self.restored_at
        copy.meter = self.meter.copy()
        return copy

    def become(self, fresh: RegionMeta) -> None:
        """Take over another fold of the same log: whoever holds this object sees it."""
        vars(self).update(vars(fresh))


class Verdict(Enum):
    """What became of a record."""

    VALID = "valid"
    #: Another claim was in force.
    FENCED = "fenced"
    #: A write whose numbers do not continue the table's: an earlier one was lost, or this is a copy of one.
    OUT_OF_STEP = "out of step"
    #: A mark or drop that changes nothing: of another life of the table, or told before.
    IDLE = "idle"
    DAMAGED = "damaged"


def fold(meta: RegionMeta, offset: int, size_bytes: int, record: DataRecord | Damaged) -> Verdict:
    """Apply the record at `offset` to the meta, which is changed in place."""
    if offset < meta.next_offset:
        raise AssertionError(f"offset {offset} is folded already: the meta stands at {meta.next_offset}")
    meta.next_offset = offset + 1
    meta.meter.add(offset, size_bytes)
    match record:
        case Write():
            return _write(meta, offset, record)
        case Claim():
            if record.term <= meta.term:
                return Verdict.FENCED
            meta.term, meta.writer = record.term, record.writer
            return Verdict.VALID
        case Mark():
            return _mark(meta, record)
        case Drop():
            table = meta.tables.get(record.table)
            if table is None or table.life != record.life:
                return Verdict.IDLE
            del meta.tables[record.table]
            return Verdict.VALID
        case Damaged():
            return Verdict.DAMAGED
        case _:
            assert_never(record)


def _write(meta: RegionMeta, offset: int, write: Write) -> Verdict:
    if write.term != meta.term or write.writer != meta.writer:
        return Verdict.FENCED
    tables = meta.tables
    following: dict[int, int] = {}
    for part in write.parts:
        expected = following.get(part.table)
        if expected is None:
            table = tables.get(part.table)
            expected = 1 if table is None else table.mapping.stop
        if part.first != expected:
            return Verdict.OUT_OF_STEP
        following[part.table] = expected + part.count
    for part in write.parts:
        table = tables.get(part.table)
        if table is None:
            table = tables[part.table] = TableMeta(offset)
        table.mapping.append(part.count, offset=offset)
        table.current_high_watermark = offset + 1
    return Verdict.VALID


def _mark(meta: RegionMeta, mark: Mark) -> Verdict:
    table = meta.tables.get(mark.table)
    if table is None or table.life != mark.life:
        return Verdict.IDLE
    seq = min(mark.seq, table.next_seq_num)  # never what is not written yet
    if seq <= table.latest_marked_deleted:
        return Verdict.IDLE
    table.latest_marked_deleted = seq
    table.mapping.remove_below(seq)
    return Verdict.VALID
