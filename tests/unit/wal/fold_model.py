"""A naive model of the fold of a region, and strategies that generate histories of records."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from tidebook.wal.meta import RegionMeta, fold
from tidebook.wal.record import (
    DamagedWalRecord,
    DataRecord,
    DropTable,
    MarkDeleted,
    OwnerClaim,
    TableWrites,
    Write,
    encode_control,
    encode_write,
    pack_payloads,
)

A, B = b"a" * 16, b"b" * 16
Held = tuple[int, DataRecord | DamagedWalRecord]


def part(table: int, first: int, count: int = 1) -> TableWrites:
    return TableWrites(table, first, bytes(4 * count))


def write(term: int, writer: bytes, *parts: TableWrites) -> Write:
    return Write(term, writer, parts)


def encoded(record: DataRecord) -> bytes:
    """Return the bytes of a write record; each payload contains its table and sequence number."""
    if not isinstance(record, Write):
        return encode_control(record)
    packed = [
        (p.first, pack_payloads(p.table, [b"%d/%d" % (p.table, p.first + i) for i in range(p.count)]))
        for p in record.parts
    ]
    return encode_write(record.term, record.writer, packed)[1]


def state_of(meta: RegionMeta) -> dict[str, Any]:
    """Return the complete state of a region as comparable values."""
    return {
        "claim": (meta.term, meta.writer),
        "next_offset": meta.next_offset,
        "tables": {
            table: (t.incarnation, t.next_seq_num, t.latest_marked_deleted, t.current_high_watermark, dict(t.mapping))
            for table, t in meta.tables.items()
        },
    }


def folded(history: list[Held], meta: RegionMeta | None = None) -> RegionMeta:
    meta = RegionMeta() if meta is None else meta
    for offset, record in history:
        if offset >= meta.next_offset:
            fold(meta, offset, 100, record)
    return meta


@dataclass
class NaiveTable:
    incarnation: int
    next: int = 1
    mark: int = 0
    end: int = 0
    held: dict[int, int] = field(default_factory=dict)


def naive(history: list[Held]) -> dict[str, Any]:
    """Fold a history with the simplest implementation of the rules."""
    claim: tuple[int, bytes] = (0, bytes(16))
    tables: dict[int, NaiveTable] = {}
    end = 0
    for offset, record in history:
        end = offset + 1
        if isinstance(record, OwnerClaim) and record.term > claim[0]:
            claim = (record.term, record.writer)
        elif (
            isinstance(record, MarkDeleted)
            and record.table in tables
            and tables[record.table].incarnation == record.incarnation
        ):
            table = tables[record.table]
            table.mark = max(table.mark, min(record.seq, table.next))
            table.held = {seq: at for seq, at in table.held.items() if seq >= table.mark}
        elif (
            isinstance(record, DropTable)
            and record.table in tables
            and tables[record.table].incarnation == record.incarnation
        ):
            del tables[record.table]
        elif isinstance(record, Write) and (record.term, record.writer) == claim:
            trial = {t: (n.next if (n := tables.get(t)) else 1) for t in {p.table for p in record.parts}}
            in_step = True
            for p in record.parts:
                in_step = in_step and trial[p.table] == p.first
                trial[p.table] += p.count
            if in_step:
                for p in record.parts:
                    table = tables.setdefault(p.table, NaiveTable(offset))
                    table.held |= {p.first + i: offset for i in range(p.count)}
                    table.next += p.count
                    table.end = end
    return {
        "claim": claim,
        "next_offset": end,
        "tables": {n: (t.incarnation, t.next, t.mark, t.end, t.held) for n, t in tables.items()},
    }


@st.composite
def histories(draw: st.DrawFn, most: int = 25) -> list[Held]:
    """Generate records of owners and fenced writers, duplicates, and late marks and drops, at sparse offsets."""
    offset = 0
    history: list[Held] = []
    meta = RegionMeta()
    claims: list[tuple[int, bytes]] = [(1, A)]
    for _ in range(draw(st.integers(0, most))):
        record = draw(_records(meta, claims, [r for _, r in history]))
        history.append((offset, record))
        fold(meta, offset, 100, record)
        offset += draw(st.sampled_from([1, 1, 1, 2, 9]))
    return history


@st.composite
def _records(
    draw: st.DrawFn, meta: RegionMeta, claims: list[tuple[int, bytes]], earlier: list[DataRecord | DamagedWalRecord]
) -> DataRecord | DamagedWalRecord:
    table = draw(st.integers(1, 3))
    held = meta.tables.get(table)
    incarnation = held.incarnation if held else draw(st.integers(0, 3))
    match draw(st.sampled_from(["write", "write", "write", "zombie", "claim", "mark", "drop", "copy", "damage"])):
        case "write":
            following: dict[int, int] = {}
            parts = []
            for table in draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)):
                first = following.get(table) or (meta.tables[table].next_seq_num if table in meta.tables else 1)
                count = draw(st.integers(1, 4))
                parts.append(part(table, first, count))
                following[table] = first + count
            return write(meta.term, meta.writer, *parts) if meta.term else OwnerClaim(1, A)
        case "zombie":
            term, writer = draw(st.sampled_from(claims))
            return write(term, writer, part(table, draw(st.integers(1, 6)), draw(st.integers(1, 3))))
        case "claim":
            claims.append((draw(st.integers(1, meta.term + 2)), draw(st.sampled_from([A, B]))))
            return OwnerClaim(*claims[-1])
        case "mark":
            return MarkDeleted(table, incarnation, draw(st.integers(0, 12)))
        case "drop":
            return DropTable(table, incarnation)
        case "copy" if earlier:
            return draw(st.sampled_from(earlier))
        case _:
            return DamagedWalRecord("drawn")
