"""The columns of `format("tidebook")`, and the conversion of events to Arrow batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from tidebook.core.event import decode_events
from tidebook.core.payload import TYPE_NAMES
from tidebook.core.replication_plan import EventRow
from tidebook.pipeline.worker import arrow_schema

SCHEMA = (
    "topic string, id string, seq_nr long, timestamp timestamp, payload binary, payload_type string, "
    "tags array<string>, metadata string, partition int, offset long"
)
_ARROW = arrow_schema(SCHEMA)
PAGE_EVENTS = 10_000
PAGE_BYTES = 16_000_000


class EventPage:
    """Collects events as columns until there are enough for an Arrow batch."""

    __slots__ = ("_bytes", "_columns", "_topic")

    def __init__(self, topic: str) -> None:
        self._topic = topic
        self._clear()

    def _clear(self) -> None:
        self._columns: tuple[list[Any], ...] = tuple([] for _ in range(9))
        self._bytes = 0

    def add(self, ids_of: Sequence[str], partition: int, rows: Sequence[EventRow]) -> None:
        """Add event rows of one log partition, with their journal ids."""
        encoded = [row.kept for row in rows]
        events = decode_events(encoded)
        ids, numbers, times, payloads, types, tags, metadata, partitions, offsets = self._columns
        ids += ids_of
        numbers += [row.seq_nr for row in rows]
        times += [row.timestamp_ms for row in rows]
        payloads += [event.payload for event in events]
        types += [event.payload_type for event in events]
        tags += [event.tags for event in events]
        metadata += [event.metadata for event in events]
        partitions += [partition] * len(rows)
        offsets += [row.position.offset for row in rows]
        self._bytes += sum(map(len, encoded))

    @property
    def full(self) -> bool:
        """Return whether the page has reached a limit and should be taken."""
        return len(self._columns[0]) >= PAGE_EVENTS or self._bytes >= PAGE_BYTES

    def take(self) -> Iterator[pa.RecordBatch]:
        """Yield the page as one Arrow batch, unless it is empty, and clear it."""
        ids, numbers, times, payloads, types, tags, metadata, partitions, offsets = self._columns
        if not ids:
            return
        names = pa.DictionaryArray.from_arrays(pa.array(types, pa.int8()), pa.array(TYPE_NAMES, pa.string()))
        arrays = [
            pa.repeat(pa.scalar(self._topic, pa.string()), len(ids)),
            pa.array(ids, pa.string()),
            pa.array(numbers, pa.int64()),
            pa.array(times, pa.timestamp("ms", tz="UTC")).cast(_ARROW.field("timestamp").type),
            pa.array(payloads, pa.binary()),
            names.dictionary_decode(),
            pa.array(tags, pa.list_(pa.string())) if any(tags) else _no_tags(len(ids)),
            pa.array(metadata, pa.binary()).cast(pa.string()),
            pa.array(partitions, pa.int32()),
            pa.array(offsets, pa.int64()),
        ]
        self._clear()
        yield pa.RecordBatch.from_arrays(arrays, schema=_ARROW)


def _no_tags(n: int) -> pa.Array:
    """Return `n` empty lists; building the array directly is far cheaper than converting Python lists."""
    return pa.ListArray.from_arrays(pa.repeat(pa.scalar(0, pa.int32()), n + 1), pa.array([], pa.string()))
