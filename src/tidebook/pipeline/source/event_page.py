"""Events as Arrow batches: the columns of `format("tidebook")`, and the forms of a payload."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args

import msgspec
import pyarrow as pa
from pyspark.sql.types import VariantVal

from tidebook.core.errors import Corrupt
from tidebook.core.event import decode_events
from tidebook.core.payload import JSON, TEXT, TYPE_NAMES
from tidebook.core.replication_plan import EventRow
from tidebook.pipeline.arrow import arrow_schema

#: How a payload is delivered: as bytes, JSON text or Spark's Variant. Payloads of type bytes are null in the last two.
PayloadForm = Literal["binary", "json", "variant"]
PAYLOAD_FORMS: tuple[PayloadForm, ...] = get_args(PayloadForm)

_SPARK_TYPES: dict[PayloadForm, str] = {"binary": "binary", "json": "string", "variant": "variant"}
_COLUMNS = (
    "topic string, id string, seq_nr long, timestamp timestamp, type string, payload binary, payload_type string, "
    "tags array<string>, metadata string, partition int, offset long"
)
#: Spark recognizes a Variant by the metadata of its second field.
_VARIANT_FIELDS = [
    pa.field("value", pa.binary(), nullable=False),
    pa.field("metadata", pa.binary(), nullable=False, metadata={b"variant": b"true"}),
]
_ARROW_TYPES: dict[PayloadForm, pa.DataType] = {
    "binary": pa.binary(),
    "json": pa.string(),
    "variant": pa.struct(_VARIANT_FIELDS),
}
PAGE_EVENTS = 10_000
PAGE_BYTES = 16_000_000

_encode_json = msgspec.json.Encoder().encode


def events_schema(form: PayloadForm = "binary") -> str:
    """Return the columns as a DDL schema of Spark."""
    return _COLUMNS.replace("payload binary", f"payload {_SPARK_TYPES[form]}")


class EventPage:
    """Collects events of one topic until there are enough for an Arrow batch."""

    def __init__(self, topic: str, form: PayloadForm = "binary") -> None:
        self._topic = topic
        self._form = form
        schema = arrow_schema(_COLUMNS)
        self._schema = schema.set(schema.get_field_index("payload"), pa.field("payload", _ARROW_TYPES[form]))
        self._clear()

    def _clear(self) -> None:
        self._columns: tuple[list[Any], ...] = tuple([] for _ in range(10))
        self._bytes = 0

    def add(self, ids: Sequence[str], partition: int, rows: Sequence[EventRow]) -> None:
        """Add event rows of one log partition, with their journal ids."""
        encoded = [row.encoded for row in rows]
        events = decode_events(encoded)
        added: tuple[Sequence[Any], ...] = (
            ids,
            [row.seq_nr for row in rows],
            [row.timestamp_ms for row in rows],
            [event.type for event in events],
            [event.payload for event in events],
            [event.payload_type for event in events],
            [event.tags for event in events],
            [event.metadata for event in events],
            [partition] * len(rows),
            [row.position.offset for row in rows],
        )
        for column, more in zip(self._columns, added, strict=True):
            column += more
        self._bytes += sum(map(len, encoded))

    @property
    def full(self) -> bool:
        """Return whether the page has reached a limit and should be taken."""
        return len(self._columns[0]) >= PAGE_EVENTS or self._bytes >= PAGE_BYTES

    def take(self) -> Iterator[pa.RecordBatch]:
        """Yield the page as one Arrow batch, unless it is empty, and clear it."""
        ids, numbers, times, types, payloads, kinds, tags, metadata, partitions, offsets = self._columns
        if not ids:
            return
        names = pa.DictionaryArray.from_arrays(pa.array(kinds, pa.int8()), pa.array(TYPE_NAMES, pa.string()))
        # Building an array of empty lists directly is far cheaper than converting Python lists.
        no_tags = (pa.repeat(pa.scalar(0, pa.int32()), len(ids) + 1), pa.array([], pa.string()))
        arrays = [
            pa.repeat(pa.scalar(self._topic, pa.string()), len(ids)),
            pa.array(ids, pa.string()),
            pa.array(numbers, pa.int64()),
            pa.array(times, pa.timestamp("ms", tz="UTC")).cast(self._schema.field("timestamp").type),
            pa.array(types, pa.string()),
            _payload_array(payloads, kinds, self._form),
            names.dictionary_decode(),
            pa.array(tags, pa.list_(pa.string())) if any(tags) else pa.ListArray.from_arrays(*no_tags),
            pa.array(metadata, pa.binary()).cast(pa.string()),
            pa.array(partitions, pa.int32()),
            pa.array(offsets, pa.int64()),
        ]
        self._clear()
        yield pa.RecordBatch.from_arrays(arrays, schema=self._schema)


def _payload_array(payloads: Sequence[bytes], kinds: Sequence[int], form: PayloadForm) -> pa.Array:
    if form == "binary":
        return pa.array(payloads, pa.binary())
    texts = [_json_text(payload, kind) for payload, kind in zip(payloads, kinds, strict=True)]
    if form == "json":
        return pa.array(texts, pa.binary()).cast(pa.string())
    values = [None if text is None else VariantVal.parseJson(text.decode()) for text in texts]
    return pa.StructArray.from_arrays(
        [
            pa.array([b"" if value is None else value.value for value in values], pa.binary()),
            pa.array([b"" if value is None else value.metadata for value in values], pa.binary()),
        ],
        fields=_VARIANT_FIELDS,
        mask=pa.array([value is None for value in values], pa.bool_()),
    )


def _json_text(payload: bytes, kind: int) -> bytes | None:
    """Return a payload as JSON: text becomes a JSON string, and bytes have no JSON form."""
    if kind == JSON:
        return payload
    if kind != TEXT:
        return None
    try:
        return _encode_json(payload.decode())
    except UnicodeDecodeError as error:
        raise Corrupt(f"a payload's bytes are damaged: {error}") from error
