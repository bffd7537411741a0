"""The log in a SQLite file."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import apsw

from tidebook.core.errors import InvalidInput, TidebookError, TooLarge, Unavailable
from tidebook.core.key import topic_name
from tidebook.log.port import (
    Acknowledged,
    OnSent,
    OnSentMany,
    OrderedBatch,
    Outgoing,
    RecordColumns,
    RecordPage,
    TopicState,
    one_of,
)
from tidebook.log.sqlite import topic_writes
from tidebook.log.sqlite.append import Appender, channel_of
from tidebook.log.sqlite.chunks import PartitionBounds
from tidebook.log.sqlite.ordered_append import OrderedAppender
from tidebook.log.sqlite.reading import LogReader, PageRequest
from tidebook.log.sqlite.tables import FILE, SCHEMA
from tidebook.runtime.clock import Clock, Ids, RandomIds, SystemClock
from tidebook.runtime.metrics import Metrics
from tidebook.sqlite.shared_files import SharedFile
from tidebook.sqlite.wakeups import POLL_S
from tidebook.sqlite.write_queue import WriteOperation, nothing

PARTITIONS_MAX = 10_000


class SqliteLog:
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
        self._file = SharedFile.open(folder, FILE, SCHEMA, metrics=metrics)
        self._database = self._file.database
        self._writer = self._file.writer
        self._ids = ids or RandomIds()
        self._append = Appender(clock or SystemClock()).run
        self._append_ordered = OrderedAppender(self._append).run
        self._reader = LogReader()
        self._closed = False
        self.indexed_by_key = indexed_by_key
        self.end_is_linearizable = end_is_linearizable

    @property
    def path(self) -> Path:
        """The path of the file."""
        return self._file.path

    def damage(self) -> list[str]:
        """Read the whole file and return the problems that SQLite finds; an empty list if there are none."""
        return self._database.damage()

    async def create_topic(
        self, topic: str, partitions: int, *, limit_bytes: int | None = None, keep_forever: bool = False
    ) -> TopicState:
        """Create a topic, or return the existing one unchanged. Records are always kept until `truncate`."""
        topic_name(topic)
        if type(partitions) is not int or not 1 <= partitions <= PARTITIONS_MAX:
            raise InvalidInput(f"a topic has 1 to {PARTITIONS_MAX:,} partitions, not {partitions!r}")
        wanted = topic_writes.NewTopic(topic, self._ids.new().hex(), partitions, limit_bytes)
        state: TopicState = await self._run(topic_writes.create_topic, wanted)
        return state

    async def topic(self, topic: str) -> TopicState | None:
        """Return the topic as it is now, or None if there is none."""
        rows = self._select("SELECT name, topic_id, partitions FROM topic WHERE name = ?", (topic,))
        return TopicState(*rows[0]) if rows else None

    async def topics(self) -> list[str]:
        """Return the names of all topics, in order."""
        return [name for (name,) in self._select("SELECT name FROM topic ORDER BY name", ())]

    async def delete_topic(self, topic: str) -> None:
        """Delete a topic and its records; raise NotFound if there is none."""
        await self._run(topic_writes.delete_topic, topic)
        await self._sweep()

    def send(self, record: Outgoing, on_sent: OnSent) -> None:
        """Append a record; call `on_sent` once it is durable or has failed. Concurrent records share a commit."""
        try:
            if self._closed:
                raise Unavailable(f"{self._file.path} is closed")
            self._writer.post(self._append, record, on_sent, len(record.value))
        except TidebookError as error:
            if self._database.forked:
                on_sent(error)  # now: the event loop of the caller may not run in this child
            else:
                asyncio.get_running_loop().call_soon(on_sent, error)

    def send_many(self, many: RecordColumns, on_sent: OnSentMany) -> None:
        """Do the same as `send` for each record, in this order."""
        for index in range(len(many.values)):
            self.send(many.record(index), one_of(on_sent, index))

    async def append(self, record: Outgoing) -> Acknowledged:
        """Append a record; return once it is durable, or raise the error."""
        sent: Acknowledged = await self._run(self._append, record, len(record.value))
        return sent

    async def append_in_order(self, batch: OrderedBatch) -> list[Acknowledged | TooLarge | None]:
        """Append a batch in one transaction; return an outcome per record.

        A record over the topic's limit is rejected with TooLarge; the outcome of those after it in its chain is None.
        """
        size_bytes = sum(len(record.value) for record in batch.records)
        outcomes: list[Acknowledged | TooLarge | None] = await self._run(self._append_ordered, batch, size_bytes)
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
    ) -> RecordPage:
        """Return a page of records with `start` ≤ offset < `stop`; it ends at the partition's end if that is lower."""
        page = PageRequest(topic, partition, start, stop, limit, limit_bytes)
        try:
            with self._database.reading() as connection:
                return self._reader.page(connection, page, key)
        except apsw.Error as error:
            raise self._database.failure(error) from error

    async def start(self, topic: str, partition: int) -> int:
        """Return the first offset that was not truncated."""
        return self._bounds(topic, partition).start

    async def end(self, topic: str, partition: int) -> int:
        """Return the offset that the next record gets."""
        return self._bounds(topic, partition).end

    async def truncate(self, topic: str, partition: int, *, before: int) -> None:
        """Remove the records below `before`, or below the end if that is lower."""
        await self._run(topic_writes.truncate, (topic, partition, before))
        await self._sweep()

    async def wait(self, topic: str, partition: int, *, offset: int, timeout_s: float | None = None) -> bool:
        """Return True as soon as the partition's end is above `offset`, or False after `timeout_s` (None: no limit)."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        channel, wakeups = channel_of(topic, partition), self._file.wakeups
        while True:
            seen = wakeups.count(channel)
            if self._bounds(topic, partition).end > offset:
                return True
            left_s = POLL_S if deadline is None else deadline - time.monotonic()
            if left_s <= 0:
                return False
            await wakeups.wait(channel, since=seen, timeout_s=left_s)

    async def close(self) -> None:
        """Wait for the records that were sent, then release the file. A second call does nothing."""
        if self._closed or self._database.forked:
            return
        self._closed = True
        try:
            await self._writer.run(nothing, None)
        except TidebookError:  # the senders have got the same error
            pass
        finally:
            await asyncio.to_thread(self._file.release)

    async def _run(self, run: WriteOperation, argument: Any, size_bytes: int = 0) -> Any:
        if self._closed:
            raise Unavailable(f"{self._file.path} is closed")
        return await self._writer.run(run, argument, size_bytes)

    async def _sweep(self) -> None:
        while await self._run(topic_writes.sweep, None):
            pass

    def _bounds(self, topic: str, partition: int) -> PartitionBounds:
        try:
            with self._database.reading() as connection:
                return self._reader.bounds(connection, topic, partition)
        except apsw.Error as error:
            raise self._database.failure(error) from error

    def _select(self, sql: str, bindings: tuple[Any, ...]) -> list[Any]:
        try:
            with self._database.reading() as connection:
                return connection.execute(sql, bindings).fetchall()
        except apsw.Error as error:
            raise self._database.failure(error) from error
