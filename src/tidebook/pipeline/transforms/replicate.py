"""Replicating the records of Arrow batches, in the executors: one call a log partition's slice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import msgspec
import pyarrow as pa

from tidebook.core.errors import Fenced, LogLost, UnknownVersion
from tidebook.core.topic import TopicFacts
from tidebook.log.port import Record
from tidebook.pipeline.slice import replicate_slice
from tidebook.pipeline.worker import Worker
from tidebook.store.port import StoreWriter

#: What a task tells the driver of each slice that it carried out.
RESULT = "topic string, partition int, records long, offset long, time_ms long, stopped string"
RESULT_ARROW = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("records", pa.int64()),
        ("offset", pa.int64()),
        ("time_ms", pa.int64()),
        ("stopped", pa.string()),
    ]
)
#: How often a slice is planned again because another replicator was faster.
TRIES_MAX = 100


def replicate_batches(
    settings: str, facts: dict[str, TopicFacts]
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """A function for `mapInArrow`: replicates what it is given, in order, and yields one row a slice."""
    kept = msgspec.json.encode(facts)

    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        known = msgspec.json.decode(kept, type=dict[str, TopicFacts])
        worker = Worker.of(settings)
        for batch in batches:
            for topic, partition, records in slices_of(batch):
                row = worker.run(_replicate(worker, topic, partition, records, known[topic]))
                yield pa.RecordBatch.from_pylist([row], schema=RESULT_ARROW)

    return run


async def _replicate(
    worker: Worker, topic: str, partition: int, records: list[Record], facts: TopicFacts
) -> dict[str, object]:
    store = await worker.store()
    row: dict[str, object] = {"topic": topic, "partition": partition, "records": len(records), "stopped": None}
    try:
        pointer = await _until_done(store, topic, partition, records, facts)
    except UnknownVersion as error:
        pointer = await store.pointer(topic, partition)
        row["stopped"] = f"{error} ({'; '.join(error.__notes__)})"
    if pointer is not None:
        row["offset"], row["time_ms"] = pointer.position.offset, pointer.time_ms
    return row


async def _until_done(store: StoreWriter, topic: str, partition: int, records: list[Record], facts: TopicFacts):  # type: ignore[no-untyped-def]
    for _ in range(TRIES_MAX):
        try:
            return await replicate_slice(store, topic, partition, records, facts)
        except Fenced:
            continue  # another replicator moved the pointer: what it did is left out now
    return await replicate_slice(store, topic, partition, records, facts)


def slices_of(batch: pa.RecordBatch) -> Iterator[tuple[str, int, list[Record]]]:
    """Runs of records of one log partition, as they come."""
    columns = [batch.column(i).to_pylist() for i in range(6)]
    topic, partition, run = None, -1, []
    for row in zip(*columns, strict=True):
        if (row[0], row[1]) != (topic, partition):
            if run:
                yield topic, partition, run  # type: ignore[misc]
            topic, partition, run = row[0], row[1], []
        run.append(Record(row[2], row[3], row[4], row[5]))
    if run:
        yield topic, partition, run  # type: ignore[misc]
