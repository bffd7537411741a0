"""Snapshots of a region's state: taken, restored, and stored in the meta topic as chunks with one checksum."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final
from zlib import crc32

import msgspec

from tidebook.core.bounds import STRICT_DECODE_ERRORS, Counter, Identity, Number, TimeMs
from tidebook.core.errors import Corrupt, UnknownVersion
from tidebook.core.frame import Frame
from tidebook.wal.byte_index import ByteIndex, ByteIndexState
from tidebook.wal.mapping import PackedMapping, SeqOffsets
from tidebook.wal.meta import RegionMeta, TableMeta

FRAME: Final = Frame(0x7D, 1, "a region's snapshot")
#: An upper bound of the size of a chunk's record without its data.
CHUNK_OVERHEAD_BYTES: Final = 64


class TableSnapshot(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The state of one table in a snapshot."""

    table: Number
    incarnation: Counter
    latest_marked_deleted: Counter
    current_high_watermark: Counter
    mapping: PackedMapping


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
    meter: ByteIndexState
    tables: tuple[TableSnapshot, ...]


class StoredSnapshotChunks(msgspec.Struct, frozen=True):
    """A snapshot and the offsets of its chunks in the meta topic."""

    snapshot: RegionSnapshot
    first_offset: int
    last_offset: int


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
        )
        for table, table_meta in sorted(meta.tables.items())
    )
    truncated_to = max(truncated_to, meta.truncated_to)
    meter = meta.meter.copy()
    meter.remove_below(truncated_to)
    return RegionSnapshot(
        topic_id, meta.next_offset, truncated_to, taken_ms, meta.term, meta.writer, meter=meter.state, tables=tables
    )


def restore_meta(snapshot: RegionSnapshot) -> RegionMeta:
    """Return the state that a snapshot was taken of; raise `Corrupt` if the snapshot is inconsistent."""
    meta = RegionMeta()
    meta.term, meta.writer = snapshot.term, snapshot.writer
    meta.next_offset, meta.truncated_to = snapshot.data_offset, snapshot.truncated_to
    meta.snapshot_ms, meta.restored_at = snapshot.taken_ms, snapshot.data_offset
    meta.meter = ByteIndex(snapshot.meter)
    for stored in snapshot.tables:
        if max(stored.incarnation, stored.current_high_watermark - 1) >= snapshot.data_offset:
            raise Corrupt("a table of a region's snapshot reaches past the snapshot")
        meta.tables[stored.table] = TableMeta(
            stored.incarnation,
            mapping=SeqOffsets.unpacked(stored.mapping),
            latest_marked_deleted=stored.latest_marked_deleted,
            current_high_watermark=stored.current_high_watermark,
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


class CollectedSnapshots(msgspec.Struct, frozen=True):
    """The complete snapshots of a meta topic, in order of completion, and the number of unused records."""

    stored: tuple[StoredSnapshotChunks, ...]
    wasted: int


def collect_snapshots(records: Iterable[tuple[int, bytes | None]]) -> CollectedSnapshots:
    """Assemble chunks into snapshots; skip damaged and incomplete ones.

    Raise `UnknownVersion` for a chunk of a newer Tidebook: skipping it could restore an outdated state.
    """
    partial: dict[bytes, list[tuple[int, _Chunk]]] = {}
    stored: list[StoredSnapshotChunks] = []
    seen = used = 0
    for offset, value in records:
        seen += 1
        chunk = _read_chunk(value)
        if chunk is None:
            continue
        chunks = partial.setdefault(chunk.snapshot_id, [])
        if any(known.index == chunk.index for _, known in chunks):
            continue
        chunks.append((offset, chunk))
        if len(chunks) == chunk.count:
            snapshot = _assemble([each for _, each in sorted(chunks, key=lambda pair: pair[1].index)])
            if snapshot is not None:
                stored.append(StoredSnapshotChunks(snapshot, min(at for at, _ in chunks), max(at for at, _ in chunks)))
                used += len(chunks)
            del partial[chunk.snapshot_id]
    return CollectedSnapshots(tuple(stored), wasted=seen - used)


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
