"""The log on one machine."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import apsw

from tidebook.core.clock import Clock, Ids, RandomIds, SystemClock
from tidebook.core.errors import InvalidInput, TidebookError, TooLarge, Unavailable
from tidebook.core.key import topic_name
from tidebook.core.metrics import Metrics
from tidebook.folder.inbox import Run, nothing
from tidebook.folder.opened import File
from tidebook.folder.ping import POLL_S
from tidebook.log.embedded import changes
from tidebook.log.embedded.appends import Appends, channel_of
from tidebook.log.embedded.chunks import Bounds
from tidebook.log.embedded.ordered import OrderedAppends
from tidebook.log.embedded.reading import Page, Reading
from tidebook.log.embedded.tables import FILE, SCHEMA
from tidebook.log.port import Batch, InOrder, Many, OnSent, OnSentMany, Outgoing, Sent, TopicState, one_of

PARTITIONS_MAX = 10_000


class EmbeddedLog:
    """A log in `log.db` of a folder, which several processes may have open."""

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
        self._file = File.open(folder, FILE, SCHEMA, metrics=metrics)
        self._database = self._file.database
        self._writer = self._file.writer
        self._ids = ids or RandomIds()
        self._append = Appends(clock or SystemClock()).run
        self._append_in_order = OrderedAppends(self._append).run
        self._reading = Reading()
        self._closed = False
        self.indexed_by_key = indexed_by_key
        self.end_is_linearizable = end_is_linearizable

    @property
    def path(self) -> Path:
        """Its file."""
        return self._file.path

    def damage(self) -> list[str]:
        """What SQLite finds wrong when it reads the whole file; empty where all is well."""
        return self._database.damage()

    async def create_topic(
        self, topic: str, partitions: int, *, limit_bytes: int | None = None, keep_forever: bool = False
    ) -> TopicState:
        """Make a topic, or return it as it is. All topics here are kept until `truncate`."""
        topic_name(topic)
        if type(partitions) is not int or not 1 <= partitions <= PARTITIONS_MAX:
            raise InvalidInput(f"a topic has 1 to {PARTITIONS_MAX:,} partitions, not {partitions!r}")
        wanted = changes.NewTopic(topic, self._ids.new().hex(), partitions, limit_bytes)
        state: TopicState = await self._run(changes.create_topic, wanted)
        return state

    async def topic(self, topic: str) -> TopicState | None:
        """The topic as it is now, or None."""
        rows = self._select("SELECT name, topic_id, partitions FROM topic WHERE name = ?", (topic,))
        return TopicState(*rows[0]) if rows else None

    async def topics(self) -> list[str]:
        """The names of all topics."""
        return [name for (name,) in self._select("SELECT name FROM topic ORDER BY name", ())]

    async def delete_topic(self, topic: str) -> None:
        """Remove a topic and all it holds; one of the same name that is made later is another one."""
        await self._run(changes.delete_topic, topic)
        await self._sweep()

    def send(self, record: Outgoing, on_sent: OnSent) -> None:
        """Append a record and call back once it is durable. Records sent in the same breath share the cost."""
        try:
            if self._closed:
                raise Unavailable(f"{self._file.path} is closed")
            self._writer.post(self._append, record, on_sent, len(record.value))
        except TidebookError as error:
            asyncio.get_running_loop().call_soon(on_sent, error)

    def send_many(self, many: Many, on_sent: OnSentMany) -> None:
        """`send` for many, in this order."""
        for place in range(len(many.values)):
            self.send(many.record(place), one_of(on_sent, place))

    async def append(self, record: Outgoing) -> Sent:
        """`send`, awaited."""
        sent: Sent = await self._run(self._append, record, len(record.value))
        return sent

    async def append_in_order(self, batch: InOrder) -> list[Sent | TooLarge | None]:
        """Append a batch in one transaction; nothing passes a record of its chain that is refused."""
        size_bytes = sum(len(record.value) for record in batch.records)
        outcomes: list[Sent | TooLarge | None] = await self._run(self._append_in_order, batch, size_bytes)
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
    ) -> Batch:
        """Records of offsets `start` ≤ offset < `stop`, and never past the end: then `next_offset` is the end."""
        page = Page(topic, partition, start, stop, limit, limit_bytes)
        try:
            return self._reading.page(self._database.reader(), page, key)
        except apsw.Error as error:
            raise self._database.failure(error) from error

    async def start(self, topic: str, partition: int) -> int:
        """The first offset that is still there."""
        return self._bounds(topic, partition).start

    async def end(self, topic: str, partition: int) -> int:
        """The offset that the next record gets."""
        return self._bounds(topic, partition).end

    async def truncate(self, topic: str, partition: int, *, before: int) -> None:
        """Remove the records below `before`, or below the end where that is less."""
        await self._run(changes.truncate, (topic, partition, before))
        await self._sweep()

    async def wait(self, topic: str, partition: int, *, offset: int, timeout_s: float | None = None) -> bool:
        """Wait until `end` is above `offset`; False when the time ran out first."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        channel, pings = channel_of(topic, partition), self._file.pings
        while True:
            heard = pings.count(channel)
            if self._bounds(topic, partition).end > offset:
                return True
            left_s = POLL_S if deadline is None else deadline - time.monotonic()
            if left_s <= 0:
                return False
            await pings.wait(channel, since=heard, timeout_s=left_s)

    async def close(self) -> None:
        """Finish what was sent, then let go."""
        if self._closed:
            return
        self._closed = True
        try:
            await self._writer.run(nothing, None)
        except TidebookError:  # whoever sent something was told the same
            pass
        finally:
            await asyncio.to_thread(self._file.release)

    async def _run(self, run: Run, argument: Any, size_bytes: int = 0) -> Any:
        if self._closed:
            raise Unavailable(f"{self._file.path} is closed")
        return await self._writer.run(run, argument, size_bytes)

    async def _sweep(self) -> None:
        while await self._run(changes.sweep, None):
            pass

    def _bounds(self, topic: str, partition: int) -> Bounds:
        try:
            return self._reading.bounds(self._database.reader(), topic, partition)
        except apsw.Error as error:
            raise self._database.failure(error) from error

    def _select(self, sql: str, bindings: tuple[Any, ...]) -> list[Any]:
        try:
            return self._database.reader().execute(sql, bindings).fetchall()
        except apsw.Error as error:
            raise self._database.failure(error) from error
