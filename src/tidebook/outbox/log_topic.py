"""Read the messages that an outbox relayed to an embedded log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from datetime import UTC, datetime

import msgspec

from tidebook.core.errors import InvalidInput, NotFound
from tidebook.core.key import topic_name
from tidebook.core.record import is_record
from tidebook.log.port import Log, Record, TopicState
from tidebook.outbox.log_target import TOMBSTONE_HEADER
from tidebook.runtime.blocking_portal import BlockingPortal

PAGE_RECORDS = 500
#: How often a following reader polls for a topic that does not exist yet.
TOPIC_POLL_S = 0.2


class LogMessage(msgspec.Struct, frozen=True):
    """A message in the log. Offsets grow within a partition; to resume after it, start at `offset + 1`."""

    topic: str
    partition: int
    offset: int
    timestamp: datetime
    key: bytes | None
    #: None for a tombstone, a message that was published without a payload.
    payload: bytes | None
    headers: tuple[tuple[str, bytes], ...]


class LogTopic:
    """The messages of one topic of an embedded log.

    >>> async def print_all(book):
    ...     async for message in book.log_topic("mail").read():
    ...         print(message.key, message.payload)
    """

    def __init__(self, log: Log, topic: str) -> None:
        self.topic = topic_name(topic)
        self._log = log

    async def offsets(self) -> dict[int, int]:
        """Return the offset that the next message of each partition gets; empty if the topic does not exist."""
        state = await self._log.topic(self.topic)
        if state is None:
            return {}
        return {partition: await self._log.end(self.topic, partition) for partition in range(state.partitions)}

    async def read(
        self, *, offsets: Mapping[int, int] | None = None, follow: bool = False
    ) -> AsyncIterator[LogMessage]:
        """Yield the messages from these offsets on, one partition after the other; with `follow`, also later ones.

        `offsets` has the next offset to read of each partition; a partition that is left out is read from its start.
        Messages of one key are in one partition, in the order in which they were relayed. A topic that does not exist
        is empty. Raise LogLost if an offset was truncated, and InvalidInput if the topic holds journals.
        """
        state = await self._log.topic(self.topic)
        while state is None:
            if not follow:
                return
            await asyncio.sleep(TOPIC_POLL_S)
            state = await self._log.topic(self.topic)
        given = _checked(offsets or {}, state)
        position = {
            partition: given[partition] if partition in given else await self._log.start(self.topic, partition)
            for partition in range(state.partitions)
        }
        while True:
            for partition in position:
                end = await self._log.end(self.topic, partition)
                while position[partition] < end:
                    batch = await self._log.read(
                        self.topic, partition, start=position[partition], stop=end, limit=PAGE_RECORDS
                    )
                    for record in batch.records:
                        position[partition] = record.offset + 1
                        yield self._message(partition, record)
                    position[partition] = batch.next_offset
            if not follow:
                return
            await self._wait(position)

    def _message(self, partition: int, record: Record) -> LogMessage:
        if not record.headers and is_record(record.value):
            raise InvalidInput(f"topic {self.topic} holds journals: read them with book.journal({self.topic!r})")
        headers = tuple(each for each in record.headers if each[0] != TOMBSTONE_HEADER)
        deleted = len(headers) < len(record.headers)
        moment = datetime.fromtimestamp(record.timestamp_ms / 1000, UTC)
        payload = None if deleted else record.value
        return LogMessage(self.topic, partition, record.offset, moment, record.key, payload, headers)

    async def _wait(self, position: Mapping[int, int]) -> None:
        """Wait until some partition has a message at its position."""
        waits = [
            asyncio.ensure_future(self._log.wait(self.topic, partition, offset=offset))
            for partition, offset in position.items()
        ]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                each.result()
        finally:
            for each in waits:
                each.cancel()
            await asyncio.gather(*waits, return_exceptions=True)


class SyncLogTopic:
    """The blocking variant of `LogTopic`."""

    def __init__(self, portal: BlockingPortal, topic: LogTopic) -> None:
        self._portal = portal
        self._topic = topic
        self.topic = topic.topic

    def offsets(self) -> dict[int, int]:
        return self._portal.run(self._topic.offsets())

    def read(self, *, offsets: Mapping[int, int] | None = None, follow: bool = False) -> Iterator[LogMessage]:
        return self._portal.iterate(self._topic.read(offsets=offsets, follow=follow))


def _checked(offsets: Mapping[int, int], state: TopicState) -> Mapping[int, int]:
    for partition, offset in offsets.items():
        if type(partition) is not int or not 0 <= partition < state.partitions:
            raise NotFound(f"topic {state.topic} has partitions 0 to {state.partitions - 1}, not {partition!r}")
        if type(offset) is not int or offset < 0:
            raise InvalidInput(f"an offset is a whole number from 0, not {offset!r}")
    return offsets
