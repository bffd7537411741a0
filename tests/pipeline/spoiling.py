"""Overwrite single rows of a store with bytes that cannot be decoded, as a faulty disk or operator might."""

from __future__ import annotations

from typing import Any

from tidebook.core.key import Key, partition_of
from tidebook.core.position import write_stamp
from tidebook.core.replication_plan import TagRow
from tidebook.core.segments import event_segment, head_segment
from tidebook.sqlite.checksums import connect
from tidebook.wiring.book import Book
from tidebook.wiring.lazy_adapters import LazyStore

#: Greater than anything that Tidebook writes: of two cells with equal timestamps Cassandra keeps the greater value.
GARBAGE = b"\xff\xfe garbage"


class Spoiler:
    """Damages rows of a book's store, of either kind."""

    def __init__(self, book: Book) -> None:
        self._store: Any = book.store
        self._embedded = isinstance(book.store, LazyStore)

    async def head(self, key: Key) -> None:
        """Damage the head of a journal."""
        config = await self._store.topic_config(key.topic)
        await self._run(
            key,
            "UPDATE metajournal SET head = ? WHERE topic = ? AND id = ?",
            (GARBAGE, *key),
            "UPDATE metajournal USING TIMESTAMP ? SET head = ? WHERE topic = ? AND segment = ? AND id = ?",
            [GARBAGE, key.topic, head_segment(key.id, config.segments), key.id],
        )

    async def event(self, key: Key, seq_nr: int) -> None:
        """Damage the row with this number; on Cassandra several events may share it."""
        config = await self._store.topic_config(key.topic)
        segment = event_segment(seq_nr, config.segment_size)
        await self._run(
            key,
            "UPDATE journal SET encoded = ? WHERE topic = ? AND id = ? AND seq_nr = ?",
            (GARBAGE, *key, seq_nr),
            "UPDATE journal USING TIMESTAMP ? SET event = ? WHERE id = ? AND topic = ? AND segment = ? AND seq_nr = ?",
            [GARBAGE, key.id, key.topic, segment, seq_nr],
        )

    async def tag(self, row: TagRow) -> None:
        """Damage a row of a tag."""
        bucket = 0 if self._embedded else (await self._store._buckets.fixed_at(row.time_ms)).start(row.time_ms)
        place = (row.tag, row.time_ms, row.topic, row.partition, row.offset, row.index)
        await self._run(
            Key(row.topic, row.id),
            "UPDATE tag_views SET encoded = 'no bytes' WHERE tag = ? AND log_ms = ? AND topic = ? AND partition = ? "
            'AND "offset" = ? AND "index" = ?',
            place,
            "UPDATE tag_views USING TIMESTAMP ? SET event = ? WHERE tag = ? AND bucket = ? AND log_ms = ? "
            "AND topic = ? AND partition = ? AND log_offset = ? AND idx = ? AND epoch = ?",
            [GARBAGE, row.tag, bucket, *place[1:], row.epoch],
        )

    async def _run(self, key: Key, sql: str, bindings: tuple[Any, ...], cql: str, values: list[Any]) -> None:
        if self._embedded:
            connection = connect(self._store.path)
            connection.execute(sql, bindings)
            assert connection.changes() == 1
            connection.close()
            return
        from tidebook.store.cassandra.mutations import CqlStatement

        config = await self._store.topic_config(key.topic)
        pointer = await self._store.pointer(key.topic, partition_of(key.id, config.partitions))
        await self._store._session.write_once(CqlStatement(cql, [write_stamp(pointer.position), *values]))
