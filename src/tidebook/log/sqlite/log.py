"""The log in a SQLite file."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import apsw
import msgspec

from tidebook.core.errors import Corrupt, InvalidInput, LogLost, NotFound, TidebookError, TooLarge, Unavailable
from tidebook.core.key import topic_name
from tidebook.log import port
from tidebook.log.sqlite import writes
from tidebook.log.sqlite.tables import FILE, SCHEMA
from tidebook.runtime.clock import Clock, Ids, RandomIds, SystemClock
from tidebook.runtime.metrics import Metrics
from tidebook.sqlite.shared_files import SqliteAdapter

PARTITIONS_MAX = 10_000

#: One statement reads the bounds of a partition and its records, so that no truncation can happen in between. Its first
#: row has the bounds even if there is no record.
_PAGE = """SELECT p.start_offset, p.next_offset, r.id - (p.id << 40), r.time_ms, r.key, r.value, r.headers
    FROM partition p LEFT JOIN record r ON r.id >= (p.id << 40) + ?3 AND r.id < (p.id << 40) + min(?4, p.next_offset) {}
    WHERE p.topic = ?1 AND p.number = ?2 ORDER BY r.id LIMIT ?5"""
_PAGE_OF_ALL, _PAGE_OF_KEY = _PAGE.format(""), _PAGE.format("AND r.key = ?6")

_decode_headers = msgspec.msgpack.Decoder(tuple[tuple[str, bytes], ...]).decode


class SqliteLog(SqliteAdapter):
    """Implements `tidebook.log.port.Log` in the file `log.db` of a folder, which several processes may have open."""

    def __init__(
        self,
        folder: str | Path,
        *,
        clock: Clock | None = None,
        ids: Ids | None = None,
        metrics: Metrics | None = None,
        indexed_by_key: bool = True,
        end_is_linearizable: bool = True,
    ) -> None:
        super().__init__(folder, FILE, SCHEMA, metrics)
        self._ids = ids or RandomIds()
        appender = writes.Appender(clock or SystemClock())
        self._append, self._append_ordered = appender.append, appender.append_ordered
        self.indexed_by_key = indexed_by_key
        self.end_is_linearizable = end_is_linearizable

    async def create_topic(
        self, topic: str, partitions: int, *, limit_bytes: int | None = None, keep_forever: bool = False
    ) -> port.TopicState:
        """Create a topic, or return the existing one unchanged. Records are always kept until `truncate`."""
        topic_name(topic)
        if type(partitions) is not int or not 1 <= partitions <= PARTITIONS_MAX:
            raise InvalidInput(f"partitions must be a number from 1 to {PARTITIONS_MAX:,}, not {partitions!r}")
        new = (topic, self._ids.new().hex(), partitions, limit_bytes)
        state: port.TopicState = await self._run(writes.create_topic, new)
        return state

    async def topic(self, topic: str) -> port.TopicState | None:
        rows = self._select("SELECT name, topic_id, partitions FROM topic WHERE name = ?", (topic,))
        return port.TopicState(*rows[0]) if rows else None

    async def topics(self) -> list[str]:
        return [name for (name,) in self._select("SELECT name FROM topic ORDER BY name", ())]

    async def delete_topic(self, topic: str) -> None:
        await self._run(writes.delete_topic, topic)
        await self._sweep()

    def send(self, record: port.Outgoing, on_sent: port.OnSent) -> None:
        """Append a record; call `on_sent` once it is durable or has failed. Concurrent records share a commit."""
        try:
            if self._closed:
                raise Unavailable(f"{self._file.path} is closed")
            self._file.writer.post(self._append, record, on_sent, len(record.value))
        except TidebookError as error:
            if self._database.forked:
                on_sent(error)  # now: the event loop of the caller may not run in this child
            else:
                asyncio.get_running_loop().call_soon(on_sent, error)

    def send_many(self, columns: port.RecordColumns, on_sent: port.OnSentMany) -> None:
        for index in range(len(columns.values)):
            self.send(columns.record(index), port.callback_for(on_sent, index))

    async def append(self, record: port.Outgoing) -> port.Acknowledged:
        sent: port.Acknowledged = await self._run(self._append, record, len(record.value))
        return sent

    async def append_in_order(self, batch: port.OrderedBatch) -> list[port.Acknowledged | TooLarge | None]:
        """Append a batch in one transaction; return an outcome per record.

        A record over the topic's limit is rejected with TooLarge; the outcome of those after it in its chain is None.
        """
        size_bytes = sum(len(record.value) for record in batch.records)
        outcomes: list[port.Acknowledged | TooLarge | None] = await self._run(self._append_ordered, batch, size_bytes)
        return outcomes

    async def read(
        self,
        topic: str,
        partition: int,
        *,
        start: int,
        stop: int,
        key: bytes | None = None,
        limit: int = 1000,
        limit_bytes: int = 4_000_000,
    ) -> port.RecordPage:
        bindings: tuple[Any, ...] = (topic, partition, start, stop, max(1, limit))
        if key is None:
            return self._read(_read_page, _PAGE_OF_ALL, bindings, limit_bytes)
        return self._read(_read_page, _PAGE_OF_KEY, (*bindings, key), limit_bytes)

    async def start(self, topic: str, partition: int) -> int:
        return self._bounds(topic, partition)[0]

    async def end(self, topic: str, partition: int) -> int:
        return self._bounds(topic, partition)[1]

    async def truncate(self, topic: str, partition: int, *, before: int) -> None:
        await self._run(writes.truncate, (topic, partition, before))
        await self._sweep()

    async def wait(self, topic: str, partition: int, *, offset: int, timeout_s: float | None = None) -> bool:
        channel = writes.channel_of(topic, partition)
        return await self._wait(channel, lambda: self._bounds(topic, partition)[1] > offset, timeout_s)

    async def _sweep(self) -> None:
        while await self._run(writes.sweep, None):
            pass

    def _bounds(self, topic: str, partition: int) -> tuple[int, int]:
        """Return the start and the end of a partition; raise NotFound if there is none."""
        sql = "SELECT start_offset, next_offset FROM partition WHERE topic = ? AND number = ?"
        rows = self._select(sql, (topic, partition))
        if not rows:
            raise _no_partition(topic, partition)
        return rows[0][0], rows[0][1]


def _read_page(connection: apsw.Connection, sql: str, bindings: tuple[Any, ...], limit_bytes: int) -> port.RecordPage:
    topic, partition, start, stop, limit = bindings[:5]
    records: list[port.Record] = []
    size_bytes, next_offset = 0, start
    rows: Any = connection.execute(sql, bindings)
    try:
        for first, end, offset, time_ms, key, value, headers in rows:
            if not records:
                if start < first:
                    raise LogLost(topic=topic, partition=partition, first=start, last=first - 1)
                next_offset = max(start, min(stop, end))
                if offset is None:  # there is no such record
                    break
            size_bytes += len(value)
            if records and size_bytes > limit_bytes:
                next_offset = records[-1].offset + 1
                break
            records.append(port.Record(offset, time_ms, key, value, _headers(headers) if headers else ()))
        else:
            if not records:
                raise _no_partition(topic, partition)
            if len(records) == limit:
                next_offset = records[-1].offset + 1
    finally:
        rows.close()
    if sql is _PAGE_OF_ALL and len(records) != next_offset - start:  # the offsets of this log have no gaps
        raise Corrupt(f"{topic}/{partition}: records are missing from the log: restore a copy of log.db")
    return port.RecordPage(tuple(records), next_offset)


def _headers(data: bytes) -> tuple[tuple[str, bytes], ...]:
    try:
        return _decode_headers(data)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"the headers of a record are damaged ({error}): restore a copy of log.db") from error


def _no_partition(topic: str, partition: int) -> NotFound:
    return NotFound(f"the log has no partition {partition} of topic {topic!r}")
