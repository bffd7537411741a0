"""Snapshots of a region's state: encode them as chunks, choose the one to recover from, and plan truncations.

A recovery starts at the snapshot with the highest offset; the log is truncated only below what two snapshots need. This
remains safe: records that a fold of acknowledged records does not need are not needed by any later fold.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final
from zlib import crc32

import msgspec

from tidebook.core.bounds import STRICT_DECODE_ERRORS, Counter, Identity, Number, TimeMs
from tidebook.core.errors import Corrupt, LogLost, UnknownVersion
from tidebook.core.frame import Frame
from tidebook.wal.mapping import PackedMapping, SeqOffsets
from tidebook.wal.meta import ByteIndex, RegionMeta, TableMeta

FRAME: Final = Frame(0x7D, 1, "a region's snapshot")
#: How many usable snapshots are retained. The data topic keeps every record after the oldest of them.
SNAPSHOTS_KEPT: Final = 2
#: An upper bound of the size of a chunk's record without its data.
CHUNK_OVERHEAD_BYTES: Final = 64


class TableSnapshot(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The state of one table in a snapshot."""

    table: Number
    incarnation: Counter
    latest_marked_deleted: Counter
    current_high_watermark: Counter
    mapping: PackedMapping
    flush_requested: Counter = 0


class RegionSnapshot(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The fold of a region's acknowledged records below `data_offset`."""

    #: The id of the data topic; a topic created again has another id.
    topic_id: str
    data_offset: Counter
    #: Neither this snapshot nor the one before it needs records below this offset.
    truncated_to: Counter
    taken_ms: TimeMs
    #: The claim in force. Older claims are not needed: the mappings show which earlier records are valid.
    term: Counter
    writer: Identity
    claimed_at: Counter
    byte_index: ByteIndex
    tables: tuple[TableSnapshot, ...]


class StoredSnapshotChunks(msgspec.Struct, frozen=True):
    """A snapshot and the offset of its first chunk in the meta topic."""

    snapshot: RegionSnapshot
    first_offset: int


class _Chunk(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    snapshot_id: Identity
    index: Counter
    count: Counter
    crc: Counter
    data: bytes


_encoder = msgspec.msgpack.Encoder()
_decode_snapshot = msgspec.msgpack.Decoder(RegionSnapshot).decode
_decode_chunk = msgspec.msgpack.Decoder(_Chunk).decode


def take_snapshot(meta: RegionMeta, *, topic_id: str, truncated_to: int, taken_ms: int) -> RegionSnapshot:
    """Return a snapshot of the current state."""
    tables = tuple(
        TableSnapshot(
            table,
            table_meta.incarnation,
            table_meta.latest_marked_deleted,
            table_meta.current_high_watermark,
            table_meta.mapping.packed(),
            table_meta.flush_requested,
        )
        for table, table_meta in sorted(meta.tables.items())
    )
    truncated_to = max(truncated_to, meta.truncated_to)
    byte_index = meta.byte_index.from_offset(truncated_to)
    return RegionSnapshot(
        topic_id, meta.next_offset, truncated_to, taken_ms, meta.term, meta.writer, meta.claimed_at, byte_index, tables
    )


def restore_meta(snapshot: RegionSnapshot) -> RegionMeta:
    """Return the state that a snapshot contains; raise `Corrupt` if the snapshot is inconsistent."""
    meta = RegionMeta(
        term=snapshot.term,
        writer=snapshot.writer,
        claimed_at=snapshot.claimed_at,
        next_offset=snapshot.data_offset,
        truncated_to=snapshot.truncated_to,
        snapshot_ms=snapshot.taken_ms,
        restored_offset=snapshot.data_offset,
        byte_index=snapshot.byte_index.from_offset(0),
    )
    if snapshot.term and snapshot.claimed_at >= snapshot.data_offset:
        raise Corrupt("the claim of a region's snapshot reaches past the snapshot")
    for stored in snapshot.tables:
        if max(stored.incarnation, stored.current_high_watermark - 1) >= snapshot.data_offset:
            raise Corrupt("a table of a region's snapshot reaches past the snapshot")
        meta.tables[stored.table] = TableMeta(
            stored.incarnation,
            SeqOffsets.unpacked(stored.mapping),
            stored.latest_marked_deleted,
            stored.current_high_watermark,
            stored.flush_requested,
        )
    return meta


def encode_snapshot(snapshot: RegionSnapshot, *, snapshot_id: bytes, limit_bytes: int) -> list[bytes]:
    """Return a snapshot as the values of one or more records, none of them above `limit_bytes`."""
    data = _encoder.encode(snapshot)
    size = limit_bytes - CHUNK_OVERHEAD_BYTES
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    crc = crc32(data)
    return [
        FRAME.seal(_encoder.encode(_Chunk(snapshot_id, index, len(pieces), crc, piece)))
        for index, piece in enumerate(pieces)
    ]


def collect_snapshots(records: Iterable[tuple[int, bytes | None]]) -> list[StoredSnapshotChunks]:
    """Assemble chunks into snapshots, in order of completion; skip damaged and incomplete ones.

    Raise `UnknownVersion` for a chunk of a newer version, because skipping it could restore an outdated state.
    """
    partial: dict[bytes, dict[int, tuple[int, _Chunk]]] = {}
    stored: list[StoredSnapshotChunks] = []
    for offset, value in records:
        chunk = _read_chunk(value)
        if chunk is None:
            continue
        chunks = partial.setdefault(chunk.snapshot_id, {})
        if chunk.index in chunks:
            continue
        chunks[chunk.index] = (offset, chunk)
        if len(chunks) == chunk.count:
            del partial[chunk.snapshot_id]
            snapshot = _assemble([each for _, (_, each) in sorted(chunks.items())])
            if snapshot is not None:
                stored.append(StoredSnapshotChunks(snapshot, min(at for at, _ in chunks.values())))
    return stored


def _read_chunk(value: bytes | None) -> _Chunk | None:
    if value is None:
        return None
    try:
        chunk = _decode_chunk(FRAME.unseal(value))
    except UnknownVersion:
        raise
    except (Corrupt, *STRICT_DECODE_ERRORS):
        return None
    return chunk if 0 <= chunk.index < chunk.count else None


def _assemble(chunks: Sequence[_Chunk]) -> RegionSnapshot | None:
    data = b"".join(chunk.data for chunk in chunks)
    if [chunk.index for chunk in chunks] != list(range(chunks[0].count)) or crc32(data) != chunks[0].crc:
        return None
    try:
        snapshot = _decode_snapshot(data)
        restore_meta(snapshot)
    except (Corrupt, *STRICT_DECODE_ERRORS):
        return None
    return snapshot


def plan_recovery(
    stored: Sequence[StoredSnapshotChunks], *, topic: str, topic_id: str, log_start: int, log_end: int
) -> RegionSnapshot | None:
    """Return the snapshot to recover from, or None to scan all records; raise `LogLost` if records are missing."""
    if not stored:
        if log_start > 0:
            remedy = "there is no usable snapshot, so the whole log is needed: restore the meta topic"
            raise _lost(topic, 0, log_start - 1, remedy)
        return None
    best = max((each.snapshot for each in stored if each.snapshot.topic_id == topic_id), key=_offsets, default=None)
    if best is None:
        other = max((each.snapshot for each in stored), key=_offsets)
        remedy = (
            "the data topic was created again under the same name: restore it, or delete the region's meta topic too"
        )
        raise _lost(topic, other.truncated_to, max(other.truncated_to, other.data_offset - 1), remedy)
    if log_end < best.data_offset:
        raise _lost(topic, log_end, best.data_offset - 1, "the data topic ends before its snapshot: restore it")
    if log_start > best.data_offset:
        remedy = "only the cleaner may remove records: restore the data topic"
        raise _lost(topic, best.data_offset, log_start - 1, remedy)
    return best


def check_complete(topic: str, meta: RegionMeta, log_start: int) -> None:
    """Raise `LogLost` if the log no longer has records that tables still need."""
    if meta.first_offset < min(log_start, meta.next_offset):
        remedy = "it had entries that are not marked deleted: restore the topic"
        raise _lost(topic, meta.first_offset, log_start - 1, remedy)


def _offsets(snapshot: RegionSnapshot) -> tuple[int, int]:
    return snapshot.data_offset, snapshot.truncated_to


def _lost(topic: str, first: int, last: int, remedy: str) -> LogLost:
    when = "while they were needed"
    return LogLost(topic=topic, partition=0, first=first, last=last, remedy=remedy, when=when)


class Truncation(msgspec.Struct, frozen=True):
    """The offsets below which the data topic and the meta topic may be truncated."""

    data_before: int
    meta_before: int


def copies_needed(stored: Sequence[StoredSnapshotChunks], *, topic_id: str, wanted: int) -> int:
    """Return how many snapshots must be written before the data topic may be truncated at `wanted`."""
    usable = sum(1 for each in stored if each.snapshot.topic_id == topic_id and each.snapshot.data_offset >= wanted)
    return max(1, SNAPSHOTS_KEPT - usable)


def plan_truncation(stored: Sequence[StoredSnapshotChunks], *, topic_id: str, wanted: int) -> Truncation | None:
    """Return where to truncate: at `wanted`, but not beyond the second-newest snapshot; None with fewer than two.

    Snapshots are ordered by the offset they cover, not by their position in the meta topic, so that a late snapshot of
    a fenced owner never displaces a newer one.
    """
    usable = sorted(
        (each for each in stored if each.snapshot.topic_id == topic_id),
        key=lambda each: (each.snapshot.data_offset, each.first_offset),
    )
    kept = usable[-SNAPSHOTS_KEPT:]
    if len(kept) < SNAPSHOTS_KEPT:
        return None
    return Truncation(min(wanted, kept[0].snapshot.data_offset), min(each.first_offset for each in kept))
