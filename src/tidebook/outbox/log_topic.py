"""Message topics of an embedded log: the target to which the relay sends, and `LogTopic`, with which consumers read.

A file lock fences the relays: they all run on one machine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Protocol, assert_never
from zlib import crc32

import msgspec

from tidebook.core.errors import InvalidInput, NotFound, TidebookError, TooLarge, Unavailable
from tidebook.core.key import topic_name
from tidebook.core.record import is_record
from tidebook.log.port import Acknowledged, Log, OrderedBatch, Outgoing, Record, TopicState, last_record
from tidebook.outbox import port
from tidebook.outbox.fence import Fence
from tidebook.outbox.message import order_key
from tidebook.runtime.blocking_facade import BlockingFacade, blocking, iterating
from tidebook.runtime.blocking_portal import BlockingPortal

#: Marks a message whose payload is None, because this log stores only bytes.
TOMBSTONE_HEADER = "tidebook-tombstone"
NEW_TOPIC_PARTITIONS = 8
LIMIT_BYTES = 100_000_000
READ_MAX = 1000
LOCK_S_MAX = 0.5
LOCK_STEP_S = 0.005
PAGE_RECORDS = 500
#: The interval at which a following reader polls for a topic that does not exist yet.
TOPIC_POLL_S = 0.2


RunInLoop = Callable[[Coroutine[Any, Any, Any]], Any]
#: Returns whether, according to the store, a topic holds journals.
HoldsJournals = Callable[[str], Awaitable[bool]]


class Locks(Protocol):
    """Locks between the processes of a machine: a stopped process keeps them, a dead one does not."""

    def take(self, topic: str) -> bool: ...
    def release(self, topic: str) -> None: ...


class OrderedLog(Log, Protocol):
    """A log that appends a batch atomically."""

    async def append_in_order(self, batch: OrderedBatch) -> list[Acknowledged | TooLarge | None]:
        """Return each record's result: acknowledged, refused, or None after a refused record of the same chain.

        If it raises Unavailable, nothing of the batch was written, and earlier batches precede later ones.
        """
        ...


class LogTarget(port.RelayTarget):
    """Sends to an embedded log. `run` runs a coroutine on the log's event loop and returns its result."""

    def __init__(
        self,
        log: OrderedLog,
        run: RunInLoop,
        locks: Locks,
        *,
        holds_journals: HoldsJournals | None = None,
        create_topics: bool = True,
    ) -> None:
        self._log = log
        self._run = run
        self._locks = locks
        self._holds_journals = holds_journals
        self._create_topics = create_topics
        #: The ids of topics that were found to hold messages, not journals.
        self._message_topic_ids: set[str] = set()

    def topic(self, topic: str, *, fresh: bool = False) -> port.TargetTopic:
        """Return the topic, created if it is missing; raise InvalidInput if it holds journals."""
        state: TopicState = self._run(self._topic_state(topic))
        return port.TargetTopic(topic, state.topic_id, state.partitions, LIMIT_BYTES, False, Fence.LOCK, 0)

    async def _topic_state(self, topic: str) -> TopicState:
        if self._holds_journals is not None and await self._holds_journals(topic):
            raise port.refuse_journals(topic)
        state = await self._log.topic(topic)
        if state is None:
            if not self._create_topics:
                raise NotFound(f"topic {topic!r} does not exist and [outbox] create_topics is off: create it")
            return await self._log.create_topic(topic, NEW_TOPIC_PARTITIONS)
        if state.topic_id not in self._message_topic_ids:
            record = await last_record(self._log, state)
            if record is not None and is_record(record.value):
                raise port.refuse_journals(topic)
            self._message_topic_ids.add(state.topic_id)
        return state

    def ends(self, topic: port.TargetTopic, *, fresh: bool = False) -> dict[int, int]:

        async def fetch() -> dict[int, int]:
            return {p: await self._log.end(topic.topic, p) for p in range(topic.partitions)}

        ends: dict[int, int] = self._run(fetch())
        return ends

    def channel(self, topic: port.TargetTopic, *, fresh: bool, singly: bool = False) -> LogChannel:
        """Return a channel once this process holds the topic's lock; raise Unavailable if another process keeps it."""
        deadline = time.monotonic() + LOCK_S_MAX
        while not self._locks.take(topic.topic):
            if time.monotonic() < deadline:  # a relay releases it just after it unlocks the topic in the database
                time.sleep(LOCK_STEP_S)
                continue
            raise Unavailable(
                f"another process still holds the lock of topic {topic.topic!r}: it is stopped, or about to release it"
            )
        return LogChannel(topic, self._log, self._run)

    def release(self, topic: str) -> None:
        self._locks.release(topic)

    def scan(
        self, topic: port.TargetTopic, session: port.RelaySession, on_step: Callable[[], None]
    ) -> port.FoundMessages:
        """Search the log, up to its current end, for the messages of a session."""
        found: set[int] = set()
        lost = None
        for partition, end in self.ends(topic).items():
            first: int = self._run(self._log.start(topic.topic, partition))
            at = max(first, session.scan_from.get(partition, first))
            if at > session.scan_from.get(partition, at):
                lost = f"the log of partition {partition} now starts after the session's first offset"
            while at < end and len(found) < len(session.ids):
                on_step()
                batch = self._run(self._log.read(topic.topic, partition, start=at, stop=end, limit=READ_MAX))
                found |= {id for record in batch.records if (id := session.id_in(record.headers)) is not None}
                at = batch.next_offset
        return port.FoundMessages(frozenset(found), lost if len(found) < len(session.ids) else None)


class LogChannel:
    """Appends a batch atomically, so that no message overtakes one that failed."""

    def __init__(self, topic: port.TargetTopic, log: OrderedLog, run: RunInLoop) -> None:
        self._topic = topic
        self._log = log
        self._run = run
        self._outcome: port.Outcome | None = None

    def start(self, messages: Sequence[port.RelayedMessage], *, timestamp_ms: int) -> None:
        """Append the batch; return once it is durable or has failed, because this channel sends synchronously."""
        self._outcome = self._run(self._append(messages))

    async def _append(self, messages: Sequence[port.RelayedMessage]) -> port.Outcome:
        batch = OrderedBatch(
            self._topic.topic, [self._record(each) for each in messages], [order_key(each) for each in messages]
        )
        try:
            results = await self._log.append_in_order(batch)
        except TidebookError as error:
            return port.BatchOutcomeUnknown(str(error))
        sent: list[int] = []
        refused: list[port.BatchRefused] = []
        for message, result in zip(messages, results, strict=True):
            match result:
                case Acknowledged():
                    sent.append(message.id)
                case TooLarge():
                    refused.append(port.BatchRefused(message.id, str(result)))
                case None:
                    pass  # it is sent with the next batch, or held
                case _:
                    assert_never(result)
        return port.BatchPartlySent(tuple(sent), tuple(refused)) if refused else port.BatchSent()

    def _record(self, message: port.RelayedMessage) -> Outgoing:
        headers = [(name, value if isinstance(value, bytes) else b"") for name, value in message.headers]
        if message.value is None:
            headers.append((TOMBSTONE_HEADER, b""))
        key, partitions = order_key(message), self._topic.partitions
        partition = (time.monotonic_ns() >> 20 if key is None else crc32(key)) % partitions
        return Outgoing(self._topic.topic, partition, message.key, message.value or b"", tuple(headers))

    def wait(self, timeout_s: float) -> port.Outcome | None:
        """Return the outcome, which is known since `start`."""
        return self._outcome

    def drop(self) -> None:
        """Do nothing: no message is in flight."""


# ---- reading


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
        """Yield the messages from these offsets on, one partition after the other; with `follow`, also new ones.

        `offsets` contains the next offset to read in each partition; a partition that is missing is read from its
        start. Messages of one key are in one partition, in the order in which they were relayed. A topic that does not
        exist is empty. Raise LogLost if an offset was truncated, and InvalidInput if the topic holds journals.
        """
        state = await self._log.topic(self.topic)
        while state is None:
            if not follow:
                return
            await asyncio.sleep(TOPIC_POLL_S)
            state = await self._log.topic(self.topic)
        given = _check_offsets(offsets or {}, state)
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
        is_tombstone = len(headers) < len(record.headers)
        timestamp = datetime.fromtimestamp(record.timestamp_ms / 1000, UTC)
        payload = None if is_tombstone else record.value
        return LogMessage(self.topic, partition, record.offset, timestamp, record.key, payload, headers)

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


class SyncLogTopic(BlockingFacade[LogTopic]):
    """The blocking form of `LogTopic`."""

    def __init__(self, portal: BlockingPortal, target: LogTopic) -> None:
        super().__init__(portal, target)
        self.topic = target.topic

    offsets = blocking(LogTopic.offsets)
    read = iterating(LogTopic.read)


def _check_offsets(offsets: Mapping[int, int], state: TopicState) -> Mapping[int, int]:
    for partition, offset in offsets.items():
        if type(partition) is not int or not 0 <= partition < state.partitions:
            raise NotFound(f"topic {state.topic} has partitions 0 to {state.partitions - 1}, not {partition!r}")
        if type(offset) is not int or offset < 0:
            raise InvalidInput(f"an offset must be a whole number of at least 0, not {offset!r}")
    return offsets
