"""Events as Spark sees them: the columns of `format("tidebook")`, and pages of Arrow."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from tidebook.core.event import decode_event
from tidebook.core.payload import TYPE_NAMES

SCHEMA = (
    "topic string, id string, seq_nr long, timestamp timestamp, payload binary, payload_type string, "
    "tags array<string>, metadata string, partition int, offset long"
)
ARROW = pa.schema(
    [
        ("topic", pa.string()),
        ("id", pa.string()),
        ("seq_nr", pa.int64()),
        ("timestamp", pa.timestamp("us", tz="UTC")),
        ("payload", pa.binary()),
        ("payload_type", pa.string()),
        ("tags", pa.list_(pa.string())),
        ("metadata", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
    ]
)
PAGE_EVENTS = 10_000
PAGE_BYTES = 16_000_000


class EventPage:
    """Events on their way to Arrow, one list a column."""

    __slots__ = ("_bytes", "_columns", "_topic")

    def __init__(self, topic: str) -> None:
        self._topic = topic
        self._clear()

    def _clear(self) -> None:
        self._columns: tuple[list[object], ...] = tuple([] for _ in range(9))
        self._bytes = 0

    def add(self, id: str, seq_nr: int, timestamp_ms: int, kept: bytes, partition: int, offset: int) -> None:
        """Take an event as the store or the log keeps it."""
        event = decode_event(kept)
        ids, numbers, times, payloads, types, tags, metadata, partitions, offsets = self._columns
        ids.append(id)
        numbers.append(seq_nr)
        times.append(timestamp_ms * 1000)
        payloads.append(event.payload)
        types.append(event.payload_type)
        tags.append(event.tags)
        metadata.append(event.metadata)
        partitions.append(partition)
        offsets.append(offset)
        self._bytes += len(kept)

    @property
    def full(self) -> bool:
        """Whether it is time to hand the page on."""
        return len(self._columns[0]) >= PAGE_EVENTS or self._bytes >= PAGE_BYTES

    def take(self) -> Iterator[pa.RecordBatch]:
        """The page, if it holds anything; the next one begins empty."""
        ids, numbers, times, payloads, types, tags, metadata, partitions, offsets = self._columns
        if not ids:
            return
        names = pa.DictionaryArray.from_arrays(pa.array(types, pa.int8()), pa.array(TYPE_NAMES, pa.string()))
        arrays = [
            pa.repeat(pa.scalar(self._topic, pa.string()), len(ids)),
            pa.array(ids, pa.string()),
            pa.array(numbers, pa.int64()),
            pa.array(times, pa.int64()).cast(pa.timestamp("us", tz="UTC")),
            pa.array(payloads, pa.binary()),
            names.dictionary_decode(),
            pa.array(tags, pa.list_(pa.string())),
            pa.array(metadata, pa.binary()).cast(pa.string()),
            pa.array(partitions, pa.int32()),
            pa.array(offsets, pa.int64()),
        ]
        self._clear()
        yield pa.RecordBatch.from_arrays(arrays, schema=ARROW)
