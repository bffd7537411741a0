"""The state of a region's tables, and the fold that derives it from the records of the data topic.

The fold is deterministic: owner, readers, recovery and cleaner derive the same `RegionMeta` from the same records.
"""

from __future__ import annotations

from enum import Enum
from typing import assert_never

from tidebook.wal.byte_index import ByteIndex
from tidebook.wal.mapping import SeqOffsets
from tidebook.wal.record import DamagedWalRecord, DataRecord, DropTable, MarkDeleted, OwnerClaim, Write

NO_WRITER = bytes(16)


class TableMeta:
    """The state of one table of a region."""

    __slots__ = ("current_high_watermark", "incarnation", "latest_marked_deleted", "mapping")

    def __init__(
        self,
        incarnation: int,
        *,
        mapping: SeqOffsets | None = None,
        latest_marked_deleted: int = 0,
        current_high_watermark: int = 0,
    ) -> None:
        #: The offset of the record that created the table: it distinguishes tables created again with the same id.
        self.incarnation = incarnation
        #: Sequence number → offset, of the entries that are not marked deleted.
        self.mapping = SeqOffsets() if mapping is None else mapping
        #: Entries below this sequence number are marked deleted.
        self.latest_marked_deleted = latest_marked_deleted
        #: The offset after the table's last write.
        self.current_high_watermark = current_high_watermark

    @property
    def next_seq_num(self) -> int:
        """The sequence number of the next entry."""
        return self.mapping.stop

    def frozen(self) -> TableMeta:
        """Return a view of the current state that later changes do not affect."""
        return TableMeta(
            self.incarnation,
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
    """The state of a region: the fold of its records below `next_offset`."""

    def __init__(self) -> None:
        self.tables: dict[int, TableMeta] = {}
        #: The term and the writer of the claim in force; term 0 before the first claim.
        self.term = 0
        self.writer = NO_WRITER
        self.next_offset = 0
        #: Records below this offset are not needed and may be truncated already.
        self.truncated_to = 0
        #: When the snapshot that this state was restored from was taken; None after a full scan.
        self.snapshot_ms: int | None = None
        #: The `data_offset` of that snapshot: records below it were not folded by this process.
        self.restored_at = 0
        self.meter = ByteIndex()

    @property
    def first_offset(self) -> int:
        """The offset of the oldest record that a table still needs; `next_offset` if no table needs any."""
        offsets = [t.mapping.first_offset for t in self.tables.values() if t.mapping.first_offset is not None]
        return min(offsets, default=self.next_offset)

    @property
    def held_bytes(self) -> int:
        """How many bytes of the data topic the tables still need (an upper bound)."""
        return self.meter.bytes_from(self.first_offset) if self.first_offset < self.next_offset else 0

    def frozen(self) -> RegionMeta:
        """Return a view of the current state that later changes do not affect; cheap, because mappings are shared."""
        copy = RegionMeta()
        copy.tables = {table: meta.frozen() for table, meta in self.tables.items()}
        copy.term, copy.writer = self.term, self.writer
        copy.next_offset, copy.truncated_to = self.next_offset, self.truncated_to
        copy.snapshot_ms, copy.restored_at = self.snapshot_ms, self.restored_at
        copy.meter = self.meter.copy()
        return copy

    def replace_with(self, fresh: RegionMeta) -> None:
        """Replace the contents by another fold of the same log, in place: other components hold this object."""
        vars(self).update(vars(fresh))


class Verdict(Enum):
    """The effect of a record on the state."""

    VALID = "valid"
    #: A claim or a write under a term that is not in force.
    FENCED = "fenced"
    #: A write whose numbers do not continue the table's: an earlier write is missing, or this is a duplicate.
    OUT_OF_SEQUENCE = "out of sequence"
    #: A mark or drop that changes nothing: it names another incarnation of the table, or is a duplicate.
    NO_EFFECT = "no effect"
    DAMAGED = "damaged"


def fold(meta: RegionMeta, offset: int, size_bytes: int, record: DataRecord | DamagedWalRecord) -> Verdict:
    """Apply the record at `offset` to `meta` in place, and return its effect. Offsets must ascend."""
    if offset < meta.next_offset:
        raise AssertionError(f"offset {offset} is folded already: the next offset is {meta.next_offset}")
    meta.next_offset = offset + 1
    meta.meter.add(offset, size_bytes)
    match record:
        case Write():
            return _write(meta, offset, record)
        case OwnerClaim():
            if record.term <= meta.term:
                return Verdict.FENCED
            meta.term, meta.writer = record.term, record.writer
            return Verdict.VALID
        case MarkDeleted():
            return _mark_deleted(meta, record)
        case DropTable():
            table = meta.tables.get(record.table)
            if table is None or table.incarnation != record.incarnation:
                return Verdict.NO_EFFECT
            del meta.tables[record.table]
            return Verdict.VALID
        case DamagedWalRecord():
            return Verdict.DAMAGED
        case _:
            assert_never(record)


def _write(meta: RegionMeta, offset: int, write: Write) -> Verdict:
    if write.term != meta.term or write.writer != meta.writer:
        return Verdict.FENCED
    tables = meta.tables
    next_seqs: dict[int, int] = {}
    for part in write.parts:
        expected = next_seqs.get(part.table)
        if expected is None:
            table = tables.get(part.table)
            expected = 1 if table is None else table.mapping.stop
        if part.first != expected:
            return Verdict.OUT_OF_SEQUENCE
        next_seqs[part.table] = expected + part.count
    for part in write.parts:
        table = tables.get(part.table)
        if table is None:
            table = tables[part.table] = TableMeta(offset)
        table.mapping.append(part.count, offset=offset)
        table.current_high_watermark = offset + 1
    return Verdict.VALID


def _mark_deleted(meta: RegionMeta, mark: MarkDeleted) -> Verdict:
    table = meta.tables.get(mark.table)
    if table is None or table.incarnation != mark.incarnation:
        return Verdict.NO_EFFECT
    seq = min(mark.seq, table.next_seq_num)  # a mark never covers entries that are not written yet
    if seq <= table.latest_marked_deleted:
        return Verdict.NO_EFFECT
    table.latest_marked_deleted = seq
    table.mapping.remove_below(seq)
    return Verdict.VALID
