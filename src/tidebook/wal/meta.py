"""The state of a region's tables, and the fold that derives it from the records of the data topic.

The fold is deterministic: owner, readers, recovery and cleaner derive the same `RegionMeta` from the same records.
"""

from __future__ import annotations

from bisect import bisect_right
from enum import Enum
from typing import Final, assert_never

import msgspec
from msgspec.structs import replace

from tidebook.core.bounds import Counter, PositiveCounter
from tidebook.wal.mapping import SeqOffsets
from tidebook.wal.record import DamagedWalRecord, DataRecord, DropTable, FlushRequest, MarkDeleted, OwnerClaim, Write

NO_WRITER: Final = bytes(16)
SAMPLES_MAX: Final = 128


class ByteIndex(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Estimates how many bytes of a log follow an offset, from samples of the total bytes before records.

    At `SAMPLES_MAX` every second sample is dropped and the step between samples doubles.
    """

    total_bytes: Counter = 0
    step_bytes: PositiveCounter = 1024
    offsets: list[Counter] = []
    totals: list[Counter] = []

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.totals):
            raise ValueError("a byte index has a different number of offsets and totals")

    def add(self, offset: int, size_bytes: int) -> None:
        """Add the size of the record at `offset`."""
        if not self.totals or self.total_bytes - self.totals[-1] >= self.step_bytes:
            self.offsets.append(offset)
            self.totals.append(self.total_bytes)
            if len(self.offsets) > SAMPLES_MAX:
                self.offsets, self.totals = self.offsets[::2], self.totals[::2]
                self.step_bytes *= 2
        self.total_bytes += size_bytes

    def bytes_from(self, offset: int) -> int:
        """Return an upper bound of the bytes of the records from `offset` on: those from the sample before it on."""
        if not self.offsets:
            return 0
        return self.total_bytes - self.totals[max(0, bisect_right(self.offsets, offset) - 1)]

    def from_offset(self, offset: int) -> ByteIndex:
        """Return a copy without the samples that no query from `offset` on needs."""
        index = max(0, bisect_right(self.offsets, offset) - 1)
        return replace(self, offsets=self.offsets[index:], totals=self.totals[index:])


class TableMeta(msgspec.Struct):
    """The state of one table of a region."""

    #: The offset of the record that created the table: it distinguishes successive tables with the same id.
    incarnation: int
    #: Sequence number → offset, of the entries that are not marked deleted.
    mapping: SeqOffsets = msgspec.field(default_factory=SeqOffsets)
    #: Entries below this sequence number are marked deleted.
    latest_marked_deleted: int = 0
    #: The offset after the table's last write.
    current_high_watermark: int = 0
    #: A flush of the entries below this sequence number was requested; 0 if none was.
    flush_requested: int = 0

    @property
    def awaits_flush(self) -> bool:
        """Whether a flush was requested and has not been done yet."""
        return self.flush_requested > self.latest_marked_deleted

    @property
    def next_seq_num(self) -> int:
        """The sequence number of the next entry."""
        return self.mapping.stop


class RegionMeta(msgspec.Struct):
    """The state of a region: the fold of its records below `next_offset`."""

    tables: dict[int, TableMeta] = {}
    #: The term and the writer of the claim in force; term 0 before the first claim.
    term: int = 0
    writer: bytes = NO_WRITER
    #: The offset of that claim: records of other writers after it are not valid.
    claimed_at: int = 0
    next_offset: int = 0
    #: Records below this offset are not needed, and may already be truncated.
    truncated_to: int = 0
    #: When the newest snapshot that this process wrote or restored was taken; None if there was none.
    snapshot_ms: int | None = None
    #: The `data_offset` of the restored snapshot: this process has not folded the records below it.
    restored_offset: int = 0
    byte_index: ByteIndex = msgspec.field(default_factory=ByteIndex)

    @property
    def first_offset(self) -> int:
        """The offset of the oldest record that a table still needs; `next_offset` if no table needs any."""
        offsets = [t.mapping.first_offset for t in self.tables.values() if t.mapping.first_offset is not None]
        return min(offsets, default=self.next_offset)

    @property
    def held_bytes(self) -> int:
        """How many bytes of the data topic the tables still need (an upper bound)."""
        return self.byte_index.bytes_from(self.first_offset) if self.first_offset < self.next_offset else 0

    def pinned_tables(self) -> list[Pinned]:
        """Return the tables with entries, oldest entry first: the first one pins the log."""
        pinned = [
            Pinned(table, table_meta.mapping.start, offset, self.byte_index.bytes_from(offset))
            for table, table_meta in self.tables.items()
            if (offset := table_meta.mapping.first_offset) is not None
        ]
        return sorted(pinned, key=lambda each: (each.offset, each.table))

    def frozen(self) -> RegionMeta:
        """Return a view of the current state that later changes do not affect; cheap, because mappings are shared."""
        tables = {table: replace(meta, mapping=meta.mapping.frozen()) for table, meta in self.tables.items()}
        return replace(self, tables=tables, byte_index=self.byte_index.from_offset(0))

    def replace_with(self, fresh: RegionMeta) -> None:
        """Replace the contents by another fold of the same log, in place: other components share this object."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(fresh, name))


class Pinned(msgspec.Struct, frozen=True):
    """A table with entries; its oldest entry keeps the log from being truncated beyond `offset`."""

    table: int
    first_seq: int
    offset: int
    #: The bytes of all tables from that entry on.
    held_bytes: int


class Verdict(Enum):
    """The effect of a record on the state."""

    VALID = "valid"
    #: A claim or a write under a term that is not in force.
    FENCED = "fenced"
    #: A write that does not begin at the table's next sequence number: an earlier one is missing, or it is a duplicate.
    OUT_OF_SEQUENCE = "out of sequence"
    #: A mark, drop or request that changes nothing: it names another incarnation of the table, or is a duplicate.
    NO_EFFECT = "no effect"
    DAMAGED = "damaged"


def fold(meta: RegionMeta, offset: int, size_bytes: int, record: DataRecord | DamagedWalRecord) -> Verdict:
    """Apply the record at `offset` to `meta` in place, and return its effect. Offsets must ascend."""
    if offset < meta.next_offset:
        raise AssertionError(f"offset {offset} has already been folded: the next offset is {meta.next_offset}")
    meta.next_offset = offset + 1
    meta.byte_index.add(offset, size_bytes)
    match record:
        case Write():
            return _fold_write(meta, offset, record)
        case OwnerClaim():
            if record.term <= meta.term:
                return Verdict.FENCED
            meta.term, meta.writer, meta.claimed_at = record.term, record.writer, offset
            return Verdict.VALID
        case MarkDeleted() | DropTable() | FlushRequest():
            table = meta.tables.get(record.table)
            if table is None or table.incarnation != record.incarnation:
                return Verdict.NO_EFFECT
            if isinstance(record, DropTable):
                del meta.tables[record.table]
                return Verdict.VALID
            seq = min(record.seq, table.next_seq_num)  # a mark never covers entries that are not written yet
            if isinstance(record, FlushRequest):
                if seq <= max(table.latest_marked_deleted, table.flush_requested):
                    return Verdict.NO_EFFECT
                table.flush_requested = seq
                return Verdict.VALID
            if seq <= table.latest_marked_deleted:
                return Verdict.NO_EFFECT
            table.latest_marked_deleted = seq
            table.mapping.remove_below(seq)
            return Verdict.VALID
        case DamagedWalRecord():
            return Verdict.DAMAGED
        case _:
            assert_never(record)


def _fold_write(meta: RegionMeta, offset: int, write: Write) -> Verdict:
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
