"""Convert rows to Arrow batches; a separate module, because leases avoid the slow import of Arrow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa

Batches = Iterable[pa.RecordBatch]
#: A function for `mapInArrow`.
Task = Callable[[Batches], Iterator[pa.RecordBatch]]

_ARROW_TYPES = {
    "string": pa.string(),
    "binary": pa.binary(),
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "double": pa.float64(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "array<string>": pa.list_(pa.string()),
}


def arrow_schema(columns: str) -> pa.Schema:
    """Return the Arrow schema of columns in the form of Spark's DDL, such as "topic string, offset long"."""
    return pa.schema([(name, _ARROW_TYPES[kind]) for name, kind in (each.split() for each in columns.split(","))])


def rows_to_arrow(rows: Sequence[Sequence[Any]], schema: pa.Schema) -> pa.RecordBatch:
    """Return one or more rows as one Arrow batch."""
    columns = zip(*rows, strict=True)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
