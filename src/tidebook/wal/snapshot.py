"""A RegionMeta as the meta topic keeps it: in chunks, each framed, all of them under one checksum."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final
from zlib import crc32

import msgspec

from tidebook.core.errors import Corrupt, UnknownVersion
from tidebook.core.frame import Frame
from tidebook.wal.mapping import PackedMapping, SeqOffsets
from tidebook.wal.meta import RegionMeta, TableMeta
from tidebook.wal.meter import Meter, MeterState

FRAME: Final = Frame(0x7D, 1, "a region's snapshot")
#: What a chunk's record takes beside its data, at most.
CHUNK_OVERHEAD_BYTES: Final = 64


class TableSnapshot(msgspec.Struct, frozen=True, array_like=True):
    """One table."""

    table: int
    life: int
    latest_marked_deleted: int
    current_high_watermark: int
    mapping: PackedMapping


class Snapshot(msgspec.Struct, frozen=True, array_like=True):
    """The fold of a region's verified records below `data_offset`."""

    #: Which life of the data topic it is of.
    topic_id: str
    data_offset: int
    #: Nothing below this is needed by this snapshot, nor by the one before it.
    truncated_to: int
    taken_ms: int
    #: The claim in force. Older ones are not needed: the mappings tell which records below count.
    term: int
    writer: bytes
    meter: MeterState
    tables: tuple[TableSnapshot, ...]


class Stored(msgspec.Struct, frozen=True):
    """A snapshot, and where it lies in the meta topic."""

    snapshot: Snapshot
    first_offset: int
    last_offset: int


class _Chunk(msgspec.Struct, frozen=True, array_like=True):
    snapshot_id: bytes
    index: int
    count: int
    crc: int
    data: bytes


_encoder = msgspec.msgpack.Encoder()
_decode_snapshot = msgspec.msgpack.Decoder(Snapshot).decode
_decode_chunk = msgspec.msgpack.Decoder(_Chunk).decode


def take_snapshot(meta: RegionMeta, *, topic_id: str, truncated_to: int, taken_ms: int) -> Snapshot:
    """The meta as it stands."""
    tables = tuple(
        TableSnapshot(
            table,
            held.life,
            held.latest_marked_deleted,
            held.current_high_watermark,
            held.mapping.packed(),
        )
        for table, held in sorted(meta.tables.items())
    )
    truncated_to = max(truncated_to, meta.truncated_to)
    meter = meta.meter.copy()
    meter.remove_below(truncated_to)
    return Snapshot(
        topic_id, meta.next_offset, truncated_to, taken_ms, meta.term, meta.writer, meter=meter.state, tables=tables
    )


def restore_meta(snapshot: Snapshot) -> RegionMeta:
    """Undo `take_snapshot`. Raises Corrupt where it contradicts itself."""
    meta = RegionMeta()
    meta.term, meta.writer = snapshot.term, snapshot.writer
    meta.next_offset, meta.truncated_to = snapshot.data_offset, snapshot.truncated_to
    meta.snapshot_ms, meta.restored_at = snapshot.taken_ms, snapshot.data_offset
    meta.meter = Meter(snapshot.meter)
    for held in snapshot.tables:
        meta.tables[held.table] = TableMeta(
            held.life,
            mapping=SeqOffsets.unpacked(held.mapping),
            latest_marked_deleted=held.latest_marked_deleted,
            current_high_watermark=held.current_high_watermark,
        )
    return meta


def encode_snapshot(snapshot: Snapshot, *, snapshot_id: bytes, limit_bytes: int) -> list[bytes]:
    """The records of a snapshot, none of them over the limit."""
    data = _encoder.encode(snapshot)
    size = limit_bytes - CHUNK_OVERHEAD_BYTES
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    crc = crc32(data)
    return [
        FRAME.seal(_encoder.encode(_Chunk(snapshot_id, index, len(pieces), crc, piece)))
        for index, piece in enumerate(pieces)
    ]


class Gathered(msgspec.Struct, frozen=True):
    """The good snapshots of a meta topic, oldest first, and how many records made none."""

    stored: tuple[Stored, ...]
    wasted: int


def gather_snapshots(records: Iterable[tuple[int, bytes | None]]) -> Gathered:
    """Put chunks together; what is damaged, or lacks a chunk, is left out.

    Raises UnknownVersion for what a newer Tidebook wrote: passing over it could bring old state back.
    """
    open_: dict[bytes, list[tuple[int, _Chunk]]] = {}
    stored: list[Stored] = []
    seen = used = 0
    for offset, value in records:
        seen += 1
        chunk = _read_chunk(value)
        if chunk is None:
            continue
        chunks = open_.setdefault(chunk.snapshot_id, [])
        if any(known.index == chunk.index for _, known in chunks):
            continue
        chunks.append((offset, chunk))
        if len(chunks) == chunk.count:
            snapshot = _assemble([each for _, each in sorted(chunks, key=lambda pair: pair[1].index)])
            if snapshot is not None:
                stored.append(Stored(snapshot, min(at for at, _ in chunks), max(at for at, _ in chunks)))
                used += len(chunks)
            del open_[chunk.snapshot_id]
    return Gathered(tuple(stored), wasted=seen - used)


def _read_chunk(value: bytes | None) -> _Chunk | None:
    if value is None:
        return None
    try:
        chunk = _decode_chunk(FRAME.unseal(value))
    except UnknownVersion:
        raise
    except (Corrupt, msgspec.MsgspecError):
        return None
    return chunk if 0 <= chunk.index < chunk.count else None


def _assemble(chunks: Sequence[_Chunk]) -> Snapshot | None:
    data = b"".join(chunk.data for chunk in chunks)
    if [chunk.index for chunk in chunks] != list(range(chunks[0].count)) or crc32(data) != chunks[0].crc:
        return None
    try:
        snapshot = _decode_snapshot(data)
        restore_meta(snapshot)
    except (Corrupt, msgspec.MsgspecError):
        return None
    return snapshot
