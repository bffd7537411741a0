"""An embedded log as the relay's target. A file lock fences, because all relays are on one machine."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar, assert_never
from zlib import crc32

from tidebook.core.errors import NotFound, TidebookError, TooLarge, Unavailable
from tidebook.core.record import is_record
from tidebook.log.port import Acknowledged, Log, OrderedBatch, Outgoing, TopicState, last_record
from tidebook.outbox.target_port import (
    SESSION_HEADER,
    BatchOutcomeUnknown,
    BatchPartlySent,
    BatchRefused,
    BatchSent,
    FoundMessages,
    Outcome,
    RelayedMessage,
    Scan,
    TargetTopic,
    refuse_journals,
)

T = TypeVar("T")
Runner = Callable[[Coroutine[Any, Any, T]], T]

#: Marks a message whose payload is None, because this log stores only bytes.
TOMBSTONE_HEADER = "tidebook-tombstone"
NEW_TOPIC_PARTITIONS = 8
LIMIT_BYTES = 100_000_000
READ_MAX = 1000
LOCK_S_MAX = 0.5
LOCK_STEP_S = 0.005


#: Returns whether the store knows a topic as one of journals.
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


class LogTarget:
    """Sends to an embedded log. `run` runs a coroutine on the log's event loop and returns its result."""

    def __init__(
        self,
        log: OrderedLog,
        run: Callable[[Coroutine[Any, Any, Any]], Any],
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
        #: Ids of topics that were found to hold no journals.
        self._checked: set[str] = set()

    def topic(self, topic: str, *, fresh: bool = False) -> TargetTopic:
        """Return the topic, created if it is missing; raise InvalidInput if it holds journals."""
        state: TopicState = self._run(self._topic_state(topic))
        return TargetTopic(topic, state.topic_id, state.partitions, LIMIT_BYTES, False, "lock", 0)

    async def _topic_state(self, topic: str) -> TopicState:
        if self._holds_journals is not None and await self._holds_journals(topic):
            raise refuse_journals(topic)
        state = await self._log.topic(topic)
        if state is None:
            if not self._create_topics:
                raise NotFound(f"topic {topic!r} does not exist and [outbox] create_topics is off: create it")
            return await self._log.create_topic(topic, NEW_TOPIC_PARTITIONS)
        if state.topic_id not in self._checked:
            record = await last_record(self._log, state)
            if record is not None and is_record(record.value):
                raise refuse_journals(topic)
            self._checked.add(state.topic_id)
        return state

    def ends(self, topic: TargetTopic, *, fresh: bool = False) -> dict[int, int]:
        """Return the offsets that the next records get."""

        async def fetch() -> dict[int, int]:
            return {p: await self._log.end(topic.topic, p) for p in range(topic.partitions)}

        ends: dict[int, int] = self._run(fetch())
        return ends

    def channel(self, topic: TargetTopic, *, fresh: bool, singly: bool = False) -> LogChannel:
        """Return a channel once this process holds the topic's lock; raise Unavailable if another keeps it."""
        deadline = time.monotonic() + LOCK_S_MAX
        while not self._locks.take(topic.topic):
            if time.monotonic() < deadline:  # the relay that unlocked the topic releases this lock right after
                time.sleep(LOCK_STEP_S)
                continue
            raise Unavailable(
                f"another process still holds the lock of topic {topic.topic!r}: it is stopped, or about to release it"
            )
        return LogChannel(topic, self._log, self._run)

    def release(self, topic: str) -> None:
        """Release the topic's lock."""
        self._locks.release(topic)

    def maintain(self) -> None:
        """Do nothing: no connection is kept open."""

    def scan(self, topic: TargetTopic, scan: Scan, on_step: Callable[[], None]) -> FoundMessages:
        """Read what the log holds now."""
        if scan.topic_uuid is not None and scan.topic_uuid != topic.uuid:
            return FoundMessages(
                frozenset(), f"the topic was re-created (its id was {scan.topic_uuid}, and is {topic.uuid})"
            )
        found: set[int] = set()
        lost = None
        for partition, end in self.ends(topic).items():
            first: int = self._run(self._log.start(topic.topic, partition))
            at = max(first, scan.scan_from.get(partition, first))
            if at > scan.scan_from.get(partition, at):
                lost = f"the log of partition {partition} now starts after the session's first offset"
            while at < end and len(found) < len(scan.ids):
                on_step()
                batch = self._run(self._log.read(topic.topic, partition, start=at, stop=end, limit=READ_MAX))
                for record in batch.records:
                    found |= _ids(record.headers, scan)
                at = batch.next_offset
        return FoundMessages(frozenset(found), lost if len(found) < len(scan.ids) else None)

    def close(self) -> None:
        """Do nothing: the log belongs to the caller."""


def _ids(headers: Sequence[tuple[str, bytes]], scan: Scan) -> set[int]:
    return {
        id
        for name, value in headers
        if name == SESSION_HEADER and value[:16] == scan.session
        if (id := int.from_bytes(value[16:24], "big")) in scan.ids
    }


class LogChannel:
    """Appends a batch atomically, so that no message overtakes one that failed."""

    def __init__(self, topic: TargetTopic, log: OrderedLog, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self._topic = topic
        self._log = log
        self._run = run
        self._outcome: Outcome | None = None

    def start(self, messages: Sequence[RelayedMessage], *, timestamp_ms: int) -> None:
        """Append the batch; return once it is durable."""
        self._outcome = self._run(self._append(messages))

    async def _append(self, messages: Sequence[RelayedMessage]) -> Outcome:
        batch = OrderedBatch(
            self._topic.topic,
            [self._record(each) for each in messages],
            [each.key if each.partition_key is None else each.partition_key for each in messages],
        )
        try:
            results = await self._log.append_in_order(batch)
        except TidebookError as error:
            return BatchOutcomeUnknown(str(error))
        sent: list[int] = []
        refused: list[BatchRefused] = []
        for message, result in zip(messages, results, strict=True):
            match result:
                case Acknowledged():
                    sent.append(message.id)
                case TooLarge():
                    refused.append(BatchRefused(message.id, str(result)))
                case None:
                    pass  # it is sent with the next batch, or held
                case _:
                    assert_never(result)
        return BatchPartlySent(tuple(sent), tuple(refused)) if refused else BatchSent()

    def _record(self, message: RelayedMessage) -> Outgoing:
        headers = [(name, value if isinstance(value, bytes) else b"") for name, value in message.headers]
        if message.value is None:
            headers.append((TOMBSTONE_HEADER, b""))
        partition = _partition(message, self._topic.partitions)
        return Outgoing(self._topic.topic, partition, message.key, message.value or b"", tuple(headers))

    def wait(self, timeout_s: float) -> Outcome | None:
        """Return the outcome, which is known since `start`."""
        return self._outcome

    def drop(self) -> None:
        """Do nothing: no message is in flight."""


def _partition(message: RelayedMessage, partitions: int) -> int:
    key = message.key if message.partition_key is None else message.partition_key
    if key is None:
        return (time.monotonic_ns() >> 20) % partitions
    return crc32(key) % partitions
