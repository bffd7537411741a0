"""An embedded log as the relay's target: a file lock fences, because all relays are on one machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar, assert_never
from zlib import crc32

from tidebook.core.errors import TidebookError, TooLarge, Unavailable
from tidebook.log.port import InOrder, Log, Outgoing
from tidebook.log.port import Sent as LogSent
from tidebook.log.relay_port import (
    SESSION_HEADER,
    Found,
    Outcome,
    Partly,
    Refusal,
    Relayed,
    Scan,
    Sent,
    TargetTopic,
    Unsure,
)

T = TypeVar("T")
Runner = Callable[[Coroutine[Any, Any, T]], T]

#: A message whose payload is None, where a log knows only bytes.
TOMBSTONE_HEADER = "tidebook-tombstone"
NEW_TOPIC_PARTITIONS = 8
LIMIT_BYTES = 100_000_000
READ_MAX = 1000
LOCK_S_MAX = 0.5
LOCK_STEP_S = 0.005


class Locks(Protocol):
    """Locks between the processes of a machine: a stopped process keeps them, an ended one does not."""

    def take(self, topic: str) -> bool: ...
    def release(self, topic: str) -> None: ...


class OrderedLog(Log, Protocol):
    """A log that takes a batch as a whole."""

    async def append_in_order(self, batch: InOrder) -> list[LogSent | TooLarge | None]:
        """What became of each record: sent, refused, or (None) held back behind one of its chain that was refused.

        Where it raises Unavailable nothing of the batch was written, and what was sent before it stands before it.
        """
        ...


class LogTarget:
    """Sends to a log that takes whole batches. `run` takes a coroutine to the loop that the log lives on."""

    def __init__(self, log: OrderedLog, run: Callable[[Coroutine[Any, Any, Any]], Any], locks: Locks) -> None:
        self._log = log
        self._run = run
        self._locks = locks

    def topic(self, topic: str, *, fresh: bool = False) -> TargetTopic:
        """The topic, made where it is missing: there is nobody else who would make it."""
        state = self._run(self._log.topic(topic)) or self._run(self._log.create_topic(topic, NEW_TOPIC_PARTITIONS))
        return TargetTopic(topic, state.topic_id, state.partitions, LIMIT_BYTES, False, "lock", 0)

    def ends(self, topic: TargetTopic, *, fresh: bool = False) -> dict[int, int]:
        """Where the next records will stand."""

        async def ask() -> dict[int, int]:
            return {p: await self._log.end(topic.topic, p) for p in range(topic.partitions)}

        ends: dict[int, int] = self._run(ask())
        return ends

    def channel(self, topic: TargetTopic, *, fresh: bool, singly: bool = False) -> LogChannel:
        """A channel, while the topic's lock is held."""
        deadline = time.monotonic() + LOCK_S_MAX
        while not self._locks.take(topic.topic):
            if time.monotonic() < deadline:  # whoever let go of the topic lets go of this in a moment
                time.sleep(LOCK_STEP_S)
                continue
            raise Unavailable(
                f"another process still has topic {topic.topic!r} in hand: it is stopped, or about to let go"
            )
        return LogChannel(topic, self._log, self._run)

    def release(self, topic: str) -> None:
        """Let others send to the topic."""
        self._locks.release(topic)

    def tend(self) -> None:
        """Nothing is kept open."""

    def scan(self, topic: TargetTopic, scan: Scan, on_step: Callable[[], None]) -> Found:
        """Read what the log holds now."""
        if scan.topic_uuid is not None and scan.topic_uuid != topic.uuid:
            return Found(frozenset(), f"the topic was made anew (it was {scan.topic_uuid}, it is {topic.uuid})")
        found: set[int] = set()
        lost = None
        for partition, end in self.ends(topic).items():
            first: int = self._run(self._log.start(topic.topic, partition))
            at = max(first, scan.scan_from.get(partition, first))
            if at > scan.scan_from.get(partition, at):
                lost = f"the log of partition {partition} now begins behind the session's first offset"
            while at < end and len(found) < len(scan.ids):
                on_step()
                batch = self._run(self._log.read(topic.topic, partition, start=at, stop=end, limit=READ_MAX))
                for record in batch.records:
                    found |= _ids(record.headers, scan)
                at = batch.next_offset
        return Found(frozenset(found), lost if len(found) < len(scan.ids) else None)

    def close(self) -> None:
        """The log is closed by who opened it."""


def _ids(headers: Sequence[tuple[str, bytes]], scan: Scan) -> set[int]:
    return {
        id
        for name, value in headers
        if name == SESSION_HEADER and value[:16] == scan.session
        if (id := int.from_bytes(value[16:24], "big")) in scan.ids
    }


class LogChannel:
    """Appends a batch; the log takes it as a whole, so that nothing passes by what fails."""

    def __init__(self, topic: TargetTopic, log: OrderedLog, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self._topic = topic
        self._log = log
        self._run = run
        self._outcome: Outcome | None = None

    def start(self, messages: Sequence[Relayed], *, timestamp_ms: int) -> None:
        """Append them all; it ends when they are durable."""
        self._outcome = self._run(self._append(messages))

    async def _append(self, messages: Sequence[Relayed]) -> Outcome:
        batch = InOrder(
            self._topic.topic,
            [self._record(each) for each in messages],
            [each.key if each.partition_key is None else each.partition_key for each in messages],
        )
        try:
            answers = await self._log.append_in_order(batch)
        except TidebookError as error:
            return Unsure(str(error))
        sent: list[int] = []
        refused: list[Refusal] = []
        for message, answer in zip(messages, answers, strict=True):
            match answer:
                case LogSent():
                    sent.append(message.id)
                case TooLarge():
                    refused.append(Refusal(message.id, str(answer)))
                case None:
                    pass  # it goes with the next batch, or is held
                case _:
                    assert_never(answer)
        return Partly(tuple(sent), tuple(refused)) if refused else Sent()

    def _record(self, message: Relayed) -> Outgoing:
        headers = [(name, value if isinstance(value, bytes) else b"") for name, value in message.headers]
        if message.value is None:
            headers.append((TOMBSTONE_HEADER, b""))
        partition = _partition(message, self._topic.partitions)
        return Outgoing(self._topic.topic, partition, message.key, message.value or b"", tuple(headers))

    def wait(self, timeout_s: float) -> Outcome | None:
        """Its outcome is known when `start` returns."""
        return self._outcome

    def drop(self) -> None:
        """Nothing is on its way."""


def _partition(message: Relayed, partitions: int) -> int:
    key = message.key if message.partition_key is None else message.partition_key
    if key is None:
        return (time.monotonic_ns() >> 20) % partitions
    return crc32(key) % partitions
