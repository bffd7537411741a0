"""The tail: one consumer per process that follows the partitions on which callers wait.

New records wake the waiters and are kept for a while, so that the waiters read them from memory.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable
from operator import methodcaller

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from tidebook.kafka.client import LOGGER, new_consumer
from tidebook.kafka.errors import OUT_OF_RANGE, UNKNOWN_TOPIC
from tidebook.kafka.settings import KafkaSettings
from tidebook.log.kafka.consumer_pool import LogSlice, Message, SlicePage
from tidebook.log.port import RecordPage
from tidebook.runtime.metrics import Metrics

PartitionKey = tuple[str, int]

#: How long the broker may delay its answer to a fetch without records, for which a new assignment has to wait.
_FETCH_WAIT_MS = 50
_POLL_S = 0.025
_CONSUME_RECORDS_MAX = 1000
_SWEEP_S = 1.0
#: The assumed size of a message object without its key and value.
_MESSAGE_BYTES = 300


class FollowedPartition:
    """The state of one followed partition in the event loop."""

    def __init__(self, next_offset: int) -> None:
        #: Every record below this exists; `messages` are the last of them, without a gap.
        self.next_offset = next_offset
        self.messages: list[Message] = []
        self.waiters: dict[asyncio.Future[bool], int] = {}
        self.used_at = 0.0
        self._bytes = 0

    def take(self, messages: list[Message], *, bytes_max: int) -> None:
        """Add the next messages, drop the oldest ones above `bytes_max`, and wake the waiters."""
        messages = [message for message in messages if message.offset() >= self.next_offset]
        if not messages:
            return
        self.messages += messages
        self.next_offset = messages[-1].offset() + 1
        self._bytes += sum(map(_size, messages))
        if self._bytes > bytes_max:
            drop = 0
            while self._bytes > bytes_max // 2 and drop < len(self.messages) - 1:
                self._bytes -= _size(self.messages[drop])
                drop += 1
            del self.messages[:drop]
        for waiter in [waiter for waiter, offset in self.waiters.items() if offset < self.next_offset]:
            del self.waiters[waiter]
            if not waiter.done():
                waiter.set_result(True)

    async def wait(self, offset: int, timeout_s: float | None) -> bool | None:
        """Wait for a record at or after `offset`; return False after the timeout, and None if no longer followed."""
        if self.next_offset > offset:
            return True
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.waiters[waiter] = offset
        try:
            async with asyncio.timeout(timeout_s):
                return await waiter or None
        except TimeoutError:
            return False
        finally:
            self.waiters.pop(waiter, None)

    def read(self, requested: LogSlice) -> RecordPage | None:
        """Return the next page of the slice if it is in memory, else None."""
        first_offset = self.messages[0].offset() if self.messages else self.next_offset
        if not first_offset <= requested.start < self.next_offset:
            return None
        page = SlicePage(requested)
        page.take(self.messages[bisect_left(self.messages, requested.start, key=methodcaller("offset")) :])
        next_offset = page.next_offset if page.full else min(requested.stop, self.next_offset)
        return RecordPage(tuple(page.records), next_offset)


def _size(message: Message) -> int:
    return _MESSAGE_BYTES + len(message.value() or b"") + len(message.key() or b"")


class LogTail:
    """The followed partitions of one process, and the thread that follows them."""

    def __init__(self, settings: KafkaSettings, metrics: Metrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._followed: dict[PartitionKey, FollowedPartition] = {}
        self._sweep_timer: asyncio.TimerHandle | None = None
        #: A partition with the offset to follow it from, or with None to unfollow it; None alone stops the thread.
        self._commands: queue.SimpleQueue[tuple[PartitionKey, int | None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    # ---- in the event loop

    def follow(self, partition_key: PartitionKey, end: int) -> FollowedPartition:
        """Follow a partition from its end, unless it is already followed."""
        followed = self._followed.get(partition_key)
        if followed is None:
            followed = self._followed[partition_key] = FollowedPartition(end)
            self._command(partition_key, end)
        followed.used_at = self._loop.time()
        if self._sweep_timer is None:
            self._sweep_timer = self._loop.call_later(_SWEEP_S, self._sweep)
        return followed

    def get(self, partition_key: PartitionKey) -> FollowedPartition | None:
        """Return the state of a followed partition, or None."""
        followed = self._followed.get(partition_key)
        if followed is not None:
            followed.used_at = self._loop.time()
        return followed

    def forget(self, topic: str) -> None:
        """Unfollow a topic that may have been deleted or truncated; its waiters then look up the end themselves."""
        for partition_key in [partition_key for partition_key in self._followed if partition_key[0] == topic]:
            self._unfollow(partition_key)

    async def close(self) -> None:
        """Unfollow all partitions and stop the thread."""
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        for partition_key in list(self._followed):
            self._unfollow(partition_key)
        if self._thread is not None:
            self._commands.put(None)
            await asyncio.to_thread(self._thread.join)

    def _command(self, partition_key: PartitionKey, offset: int | None) -> None:
        self._commands.put((partition_key, offset))
        if self._thread is None:
            client = new_consumer(self._settings, fetch_wait_ms=_FETCH_WAIT_MS)
            self._metrics.count("kafka_consumer_opened", kind="tail")
            self._thread = threading.Thread(target=self._run, args=(client,), name="tidebook-kafka-tail", daemon=True)
            self._thread.start()

    def _unfollow(self, partition_key: PartitionKey) -> None:
        followed = self._followed.pop(partition_key, None)
        if followed is None:
            return
        self._command(partition_key, None)
        for waiter in followed.waiters:
            if not waiter.done():
                waiter.set_result(False)

    def _sweep(self) -> None:
        idle_since = self._loop.time() - self._settings.tail_idle_ms / 1000
        for partition_key, followed in list(self._followed.items()):
            if not followed.waiters and followed.used_at < idle_since:
                self._unfollow(partition_key)
        self._sweep_timer = self._loop.call_later(_SWEEP_S, self._sweep) if self._followed else None

    def _take(self, by_partition: dict[PartitionKey, list[Message]]) -> None:
        for partition_key, messages in by_partition.items():
            followed = self._followed.get(partition_key)
            if followed is not None:
                followed.take(messages, bytes_max=self._settings.tail_bytes_max)

    # ---- in the tail's thread

    def _run(self, client: Consumer) -> None:
        assigned: set[PartitionKey] = set()
        while self._run_commands(client, assigned):
            message = client.poll(_POLL_S)
            if message is not None:
                self._dispatch([message, *client.consume(_CONSUME_RECORDS_MAX - 1, 0)])
        client.close()
        self._metrics.count("kafka_consumer_closed", kind="tail")

    def _run_commands(self, client: Consumer, assigned: set[PartitionKey]) -> bool:
        """Run the queued commands; if no partition is followed, wait for one. Return False to stop the thread."""
        while True:
            try:
                command = self._commands.get(block=not assigned)
            except queue.Empty:
                return True
            if command is None:
                return False
            partition_key, offset = command
            try:
                if partition_key in assigned:
                    client.incremental_unassign([TopicPartition(*partition_key)])
                    assigned.discard(partition_key)
                if offset is not None:
                    client.incremental_assign([TopicPartition(*partition_key, offset)])
                    assigned.add(partition_key)
            except KafkaException as error:
                LOGGER.warning("could not follow %s/%d: %s", *partition_key, error)
                self._call_in_loop(self._unfollow, partition_key)

    def _dispatch(self, messages: list[Message]) -> None:
        by_partition: defaultdict[PartitionKey, list[Message]] = defaultdict(list)
        for message in messages:
            error = message.error()
            if error is None:
                by_partition[message.topic(), message.partition()].append(message)
            elif error.code() in OUT_OF_RANGE or error.code() in UNKNOWN_TOPIC:
                self._call_in_loop(self._unfollow, (message.topic(), message.partition()))
            elif error.code() != KafkaError._PARTITION_EOF:
                LOGGER.info("the consumer of the followed partitions reported an error: %s", error)
        if by_partition:
            self._call_in_loop(self._take, dict(by_partition))

    def _call_in_loop(self, call: Callable[..., object], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:
            self._commands.put(None)  # the loop was closed without closing the tail
