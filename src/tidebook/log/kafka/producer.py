"""The producer: the event loop produces and handles delivery reports; a thread waits for them and wakes the loop.

`produce()` only queues a record, so the loop calls it, for all records of an iteration together. The client
acquires the GIL for each report, so two threads would compete for it under load. Therefore, after a poll with reports,
the thread hands them to the loop and waits. The loop handles them, lets the senders send again, and polls until there
are no more reports; then it is the thread's turn again. Only one of them polls at a time, so reports stay in order.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import repeat
from operator import itemgetter
from typing import Any

import msgspec
from confluent_kafka import KafkaError, KafkaException, Message, Producer

from tidebook.core.errors import InvalidInput, OutcomeUnknown, TidebookError, TooLarge, Unavailable
from tidebook.kafka.client import LOGGER, connect, producer_config
from tidebook.kafka.errors import TOO_LARGE, not_acknowledged, not_sent
from tidebook.kafka.settings import KafkaSettings
from tidebook.log.port import Acknowledged, AcknowledgedBatch, OnSent, OnSentMany, Outgoing, RecordColumns
from tidebook.runtime.metrics import Metrics

#: A poll of the thread returns as soon as there is a report; this only bounds how soon a stop is noticed.
_POLL_S = 0.1
#: How soon the waiting thread notices that its loop was closed.
_LOOP_CHECK_S = 1.0
#: The maximum number of records that one iteration of the event loop produces.
_ITERATION_RECORDS_MAX = 1000
#: The timeout of the request that checks whether a broker is reachable again.
_PROBE_S = 1.0
#: The pause before records are produced again after the client's queue was full.
_FULL_WAIT_S = 0.005
#: How long `close` waits for the results of records that it has purged from the client.
_PURGE_S = 1.0
_DRAIN_POLL_S = 0.002
#: The maximum size of a batch, estimated as if all of its records had the size of the largest one.
BATCH_BYTES = 1_000_000


class LoopBridge:
    """Runs calls from any thread in one event loop, in order, at half the cost of `call_soon_threadsafe`.

    The standard call wakes the loop through a socket pair (one send, two receives) and runs in the next iteration. An
    eventfd needs one write and one read, and the calls run in the iteration that was woken.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._calls: deque[tuple[Callable[..., object], tuple[object, ...]]] = deque()
        self._eventfd = -1
        if sys.platform == "linux":  # elsewhere there is no eventfd
            self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._loop.add_reader(self._eventfd, self._on_wakeup)

    def call_in_loop(self, call: Callable[..., object], *args: object) -> bool:
        """Run this call in the loop; thread-safe. Return False if the loop is closed."""
        if self._loop.is_closed():
            return False
        self._calls.append((call, args))
        try:
            if self._eventfd >= 0:
                os.eventfd_write(self._eventfd, 1)
            else:
                self._loop.call_soon_threadsafe(self._run_calls)
        except (RuntimeError, OSError):
            return False
        return True

    def close(self) -> None:
        """Run the remaining calls and close the eventfd; call it in the loop, when no thread can call any more."""
        self._run_calls()
        if self._eventfd >= 0:
            self._loop.remove_reader(self._eventfd)
            os.close(self._eventfd)
            self._eventfd = -1

    def _on_wakeup(self) -> None:
        os.eventfd_read(self._eventfd)
        self._run_calls()

    def _run_calls(self) -> None:
        while self._calls:
            call, args = self._calls.popleft()
            try:
                call(*args)
            except Exception as error:  # like the loop itself: one failing call must not prevent the next
                self._loop.call_exception_handler({"message": "a call from a thread failed", "exception": error})


class Delivery(msgspec.Struct, gc=False):
    """A record that was sent by `send`; the client calls it with the delivery report."""

    producer: KafkaProducer
    record: Outgoing
    on_sent: Any
    #: The loop time at which the record fails if it was not passed to the client by then.
    deadline: float
    #: The delivery report, or the error of a record that was not passed to the client.
    report: tuple[KafkaError | None, Any] | TidebookError | None = None

    def reject(self, error: TidebookError) -> None:
        """Fail the record without passing it to the client."""
        self.report = error
        self.producer.done.append(self)

    def __call__(self, error: KafkaError | None, message: Any) -> None:
        """Resolve the record, or queue it for the loop; the client calls this in the thread that polls."""
        producer = self.producer
        # Earlier records that are done must be resolved first. If `report` is already set, the caller is `resolve`.
        if self.report is None and (producer.thread_polls or producer.done):
            self.report = error, message
            producer.done.append(self)
            return
        producer.in_flight -= 1
        result: Acknowledged | TidebookError
        try:
            offset = message.offset()
            if error is None and offset is not None:
                result = Acknowledged(self.record.partition, offset, message.timestamp()[1])
            else:
                result = producer.delivery_error(self.record, error)
        except Exception as failure:
            result = OutcomeUnknown(f"the acknowledgement could not be read: {failure!r}")
        try:
            self.on_sent(result)
        except Exception as failure:
            producer.callback_failed(failure)

    def resolve(self) -> None:
        """Call the sender back with the result."""
        if isinstance(self.report, tuple):
            self(*self.report)
            return
        try:
            self.on_sent(self.report)
        except Exception as failure:
            self.producer.callback_failed(failure)


class ProduceBatch:
    """Records of one partition in send order; they are produced together and their sender is called back once."""

    __slots__ = (
        "_columns", "_done", "_irregular", "_is_resolved", "_keys", "_offsets", "_on_sent", "_producer",
        "_rejected", "_timestamps_ms", "_values", "awaited", "deadline", "indexes", "partition", "produced",
    )  # fmt: skip

    def __init__(
        self,
        producer: KafkaProducer,
        columns: RecordColumns,
        partition: int,
        indexes: Sequence[int],
        on_sent: OnSentMany,
        deadline: float,
    ) -> None:
        self.partition = partition
        self.indexes = indexes
        #: How many records were passed to the client, including those that it rejected.
        self.produced = 0
        #: The loop time at which the records fail that were not passed to the client by then.
        self.deadline = deadline
        self._producer = producer
        self._columns = columns
        take = itemgetter(slice(0), *indexes)  # the slice makes the result a tuple even for a single index
        self._values: Sequence[bytes] = take(columns.values)[1:]
        self._keys: Sequence[bytes] = take(columns.keys)[1:]
        self._on_sent = on_sent
        #: The offsets of the leading reports: those before the first failure and the first one out of record order.
        #: They are read immediately, because keeping thousands of reports makes the garbage collector run.
        self._offsets: list[int] = []
        self._timestamps_ms: list[int] = []
        #: All later reports, from the first failure or the first one out of order on.
        self._irregular: list[Message] = []
        #: The errors of the records that the client rejected, by position in the batch.
        self._rejected: dict[int, TidebookError] = {}
        #: How many records get a report, which are all that were not rejected.
        self.awaited = len(indexes)
        self._done = producer.done
        self._is_resolved = False

    @property
    def record(self) -> Outgoing:
        """Return the record to produce next."""
        return self._columns.record(self.indexes[self.produced])

    def produce_rest(self, produce: Callable[..., None]) -> None:
        """Produce the remaining records; on error, `record` is the one that failed."""
        produced = self.produced
        topic, partition, values, keys = self._columns.topic, self.partition, self._values, self._keys
        if produced:
            values, keys = values[produced:], keys[produced:]
        try:
            # One call per record, but no Python code between them: less than half the cost of `produce_batch()`.
            for _ in map(produce, repeat(topic), values, keys, repeat(partition), repeat(self.report)):
                produced += 1
        finally:
            self.produced = produced

    def reject(self, error: TidebookError) -> None:
        """Fail the next record without passing it to the client."""
        self._rejected[self.produced] = error
        self.produced += 1
        self.awaited -= 1
        if len(self._offsets) + len(self._irregular) == self.awaited:
            self._done.append(self)

    def report(self, error: KafkaError | None, message: Message) -> None:
        """Add the report of a record; the client calls this in the thread that polls."""
        offsets, irregular = self._offsets, self._irregular
        offset: int | None = None
        timestamp_ms = 0
        try:
            if error is None and not irregular and message.value() == self._values[len(offsets)]:
                offset, timestamp_ms = message.offset(), message.timestamp()[1]
        except Exception:
            offset = None  # `resolve` raises the same error, and reports it
        if offset is None:
            irregular.append(message)
        else:
            offsets.append(offset)
            self._timestamps_ms.append(timestamp_ms)
        if len(offsets) + len(irregular) == self.awaited:
            self._done.append(self)

    def resolve(self) -> None:
        """Call the sender back with all results."""
        if self._is_resolved:  # a report and a rejection may both have been the last one
            return
        self._is_resolved = True
        self._producer.in_flight -= self.awaited
        try:
            outcomes = list(self._outcomes())
        except Exception as failure:
            unknown = OutcomeUnknown(
                f"sending to {self._columns.topic}/{self.partition}: the acknowledgements could not be read: "
                f"{failure!r}",
                partition=self.partition,
            )
            outcomes = [(self.indexes, [unknown] * len(self.indexes))]
        for indexes, results in outcomes:
            try:
                self._on_sent(indexes, results)
            except Exception as error:
                self._producer.callback_failed(error)

    def _outcomes(self) -> Iterator[tuple[Sequence[int], Sequence[Acknowledged | TidebookError]]]:
        """Yield the indexes of records with their results."""
        acknowledged = AcknowledgedBatch(self.partition, self._offsets, self._timestamps_ms)
        if len(acknowledged) == len(self.indexes):
            yield self.indexes, acknowledged
            return
        # A report repeats the key and value of its record; records that are equal in both are interchangeable.
        unmatched: defaultdict[tuple[bytes | None, bytes | None], deque[int]] = defaultdict(deque)
        for number, index in enumerate(self.indexes):
            if number in self._rejected:
                yield (index,), (self._rejected[number],)
            else:
                unmatched[self._keys[number], self._values[number]].append(index)
        for key, value, each in zip(self._keys, self._values, acknowledged, strict=False):
            yield (unmatched[key, value].popleft(),), (each,)
        for report in self._irregular:
            index, error, offset = unmatched[report.key(), report.value()].popleft(), report.error(), report.offset()
            if error is None and offset is not None:
                yield (index,), (Acknowledged(self.partition, offset, report.timestamp()[1]),)
            else:
                yield (index,), (self._producer.delivery_error(self._columns.record(index), error),)


def split_columns(columns: RecordColumns) -> Iterator[tuple[int, Sequence[int]]]:
    """Yield each partition with the indexes of its records, split at `BATCH_BYTES`."""
    by_partition: defaultdict[int, list[int]] = defaultdict(list)
    for index, partition in enumerate(columns.partitions):
        by_partition[partition].append(index)
    largest = max(map(len, columns.values), default=0)
    length = max(1, BATCH_BYTES // max(1, largest))
    for partition, indexes in by_partition.items():
        for start in range(0, len(indexes), length):
            yield partition, indexes[start : start + length]


class KafkaProducer:
    """An idempotent producer; its client is replaced after a fatal error."""

    def __init__(self, settings: KafkaSettings, metrics: Metrics, *, batch_bytes: int) -> None:
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._bridge = LoopBridge()
        self._config = producer_config(settings, batch_bytes=batch_bytes)
        self._timeout_s = settings.send_timeout_ms / 1000
        self._metadata_timeout_s = settings.request_timeout_ms / 1000
        self._client_number = 0  # counts the clients created; the last one is in use
        self._client = self._connect()
        #: Clients with a fatal error; they are polled until all their records have a result.
        self._retired: list[Producer] = []
        #: Records and batches that were not passed to the client yet.
        self._waiting: deque[Delivery | ProduceBatch] = deque()
        #: How many records were passed to a client and are not resolved; a batch counts when all of it was passed.
        self.in_flight = 0
        #: Records and batches that have their reports, and that the loop has to resolve; the polling thread adds them.
        self.done: deque[Delivery | ProduceBatch] = deque()
        self._flush_handle: asyncio.Handle | None = None
        #: The deadline of records that are sent in this iteration.
        self._deadline = 0.0
        #: Whether no broker is reachable: records then wait in `_waiting`, and are certainly not written.
        self._down = False
        #: Whether the thread polls; otherwise the loop polls, and the thread waits for the lock.
        self.thread_polls = True
        self._thread_may_poll = threading.Lock()
        self._thread_may_poll.acquire()
        #: Whether records were produced since the last poll of the loop.
        self._has_produced = False
        self._stopping = False
        self._stopped: asyncio.Task[None] | None = None
        self._metadata_executor = ThreadPoolExecutor(1, "tidebook-kafka-metadata")
        self._thread = threading.Thread(target=self._run, name="tidebook-kafka-producer", daemon=True)
        self._thread.start()

    # ---- in the event loop

    def send(self, record: Outgoing, on_sent: OnSent) -> None:
        """Send a record; `on_sent` is called in a later iteration of the loop."""
        if self._flush_handle is None or self._down:
            self._flush_soon()
        self._waiting.append(Delivery(self, record, on_sent, self._deadline))

    def send_many(self, columns: RecordColumns, on_sent: OnSentMany) -> None:
        """Send records immediately, unless earlier ones wait; `on_sent` is called in later iterations of the loop."""
        first = not self._waiting
        deadline = self._loop.time() + self._timeout_s
        for partition, indexes in split_columns(columns):
            self._waiting.append(ProduceBatch(self, columns, partition, indexes, on_sent, deadline))
        if first:
            self._produce_waiting()

    def _flush_soon(self, at: float | None = None) -> None:
        """Flush at this time; by default after the callers that were just resumed have sent their next records."""
        if self._flush_handle is not None:
            self._flush_handle.cancel()
        self._deadline = self._loop.time() + self._timeout_s
        self._flush_handle = self._loop.call_soon(self._flush) if at is None else self._loop.call_at(at, self._flush)

    def _flush(self) -> None:
        """Produce the waiting records, fail the expired ones, and resolve those that are done.

        Poll before resolving if it is the loop's turn.
        """
        self._flush_handle = None
        try:
            self._produce_waiting()
            self._fail_waiting(self._loop.time(), f"no broker accepted the record within {self._timeout_s:g} s")
        finally:  # even after an error, or the thread would wait forever
            if self.thread_polls:
                self._resolve_done()
            else:
                self._poll_in_loop()

    def _produce_waiting(self) -> None:
        """Produce the waiting records; schedule a flush of those that the client does not accept now."""
        is_full = False
        if not self._down:
            is_full = not self._produce(_ITERATION_RECORDS_MAX)
        if self._flush_handle is None:
            if self.done:
                self._flush_soon()
            elif self._waiting:
                full_until = self._loop.time() + _FULL_WAIT_S if is_full else None
                self._flush_soon(self._waiting[0].deadline if self._down else full_until)

    def _produce(self, count: int) -> bool:
        """Produce about `count` waiting records; return False if the client accepts no more now."""
        waiting, produce = self._waiting, self._client.produce
        self._has_produced |= bool(waiting)
        while waiting and count > 0:
            delivery = waiting[0]
            try:
                if isinstance(delivery, ProduceBatch):
                    count -= len(delivery.indexes)
                    delivery.produce_rest(produce)
                else:
                    count -= 1
                    record = delivery.record
                    if record.headers:
                        headers: Any = list(record.headers)
                        produce(record.topic, record.value, record.key, record.partition, delivery, headers=headers)
                    else:
                        produce(record.topic, record.value, record.key, record.partition, delivery)
            except BufferError:
                return False
            except KafkaException as error:
                if error.args[0].code() == KafkaError._FATAL:
                    self._replace(self._client_number)
                    return False
                self._reject(delivery, self.delivery_error(delivery.record, error.args[0], sent=False))
            except (TypeError, ValueError) as error:
                record = delivery.record
                self._reject(delivery, InvalidInput(f"sending to {record.topic}/{record.partition}: {error}"))
            else:
                waiting.popleft()
                self.in_flight += delivery.awaited if isinstance(delivery, ProduceBatch) else 1
        return True

    def _reject(self, delivery: Delivery | ProduceBatch, error: TidebookError) -> None:
        """Fail the next record of the first waiting delivery."""
        delivery.reject(error)
        if isinstance(delivery, ProduceBatch):
            if delivery.produced < len(delivery.indexes):
                return
            self.in_flight += delivery.awaited
        self._waiting.popleft()

    def _fail_waiting(self, deadline: float, why: str) -> None:
        """Fail the waiting records with this deadline or an earlier one; none of them was written."""
        while self._waiting and self._waiting[0].deadline <= deadline:
            delivery = self._waiting[0]
            record = delivery.record
            error = Unavailable(f"sending to {record.topic}/{record.partition}: {why}: nothing was written")
            self._reject(delivery, error)
            self._metrics.count("kafka_send_failed", error="Unavailable")

    def _resolve_done(self) -> None:
        """Call back the senders of all records that are done, in order."""
        before = self.in_flight
        while self.done:
            self.done.popleft().resolve()
        self._count_sent(before)

    def _count_sent(self, before: int) -> None:
        if self.in_flight < before:
            self._metrics.count("kafka_sent", before - self.in_flight)

    def _poll_in_loop(self) -> None:
        """Resolve all reports, and poll again in the next iteration; if there are none, it is the thread's turn.

        The thread calls this through the bridge when it has reports, and then waits.
        """
        self.thread_polls = False
        before = self.in_flight
        self._resolve_done()
        polled_from = self.in_flight
        self._poll(self._client, 0)
        for retired in list(self._retired):
            retired.purge(blocking=True)  # this does not block, see `_drain`
            self._poll(retired, 0)
            if len(retired) == 0:
                self._retired.remove(retired)
        self._count_sent(polled_from)
        self._resolve_done()
        has_produced, self._has_produced = self._has_produced, False
        if self.in_flight < before or has_produced:
            self._flush_soon()
        else:
            self.thread_polls = True
            self._thread_may_poll.release()

    def callback_failed(self, error: Exception) -> None:
        """Report the error of a sender's callback; other senders must still get their results."""
        self._loop.call_exception_handler({"message": "a callback of Log.send failed", "exception": error})

    def delivery_error(self, record: Outgoing, error: KafkaError | None, *, sent: bool = True) -> TidebookError:
        """Return the error of a record that was not delivered, or that the client did not accept (`sent=False`)."""
        failed: TidebookError
        if error is None:  # a duplicate batch whose offset the broker no longer knows
            return OutcomeUnknown(
                f"sending to {record.topic}/{record.partition}: written, but the broker no longer knows the offset",
                partition=record.partition,
            )
        if error.code() in TOO_LARGE:
            failed = TooLarge("the record", size_bytes=len(record.value), limit_bytes=self._config["batch.size"])
        else:
            failed = (not_acknowledged if sent else not_sent)(error, record.topic, record.partition)
        self._metrics.count("kafka_send_failed", error=type(failed).__name__)
        return failed

    async def refresh_metadata(self, topic: str) -> None:
        """Refresh the client's metadata of a topic: it may have cached for minutes that the topic does not exist."""
        # In a separate thread: all threads of the loop's executor may be blocked by appends to this topic.
        lookup = partial(self._client.list_topics, topic, timeout=self._metadata_timeout_s)
        try:
            await self._loop.run_in_executor(self._metadata_executor, lookup)
        except KafkaException:
            LOGGER.warning("the producer could not read the metadata of topic %s", topic)

    def _set_brokers_down(self, down: bool) -> None:
        self._down = down
        self._metrics.gauge("kafka_brokers_down", int(down))
        if not down and self._waiting:
            self._flush_soon()

    def _replace(self, number: int) -> None:
        """Replace the client after a fatal error; its unacknowledged records have an unknown outcome."""
        if number != self._client_number:
            return
        try:
            client = self._connect()
        except TidebookError as error:  # the next flush retries, until the waiting records expire
            LOGGER.warning("no new producer can be created: %s", error)
            return
        self._metrics.count("kafka_producer_replaced")
        self._retired.append(self._client)
        self._client = client

    def _connect(self) -> Producer:
        number = self._client_number + 1

        def on_error(error: KafkaError) -> None:
            if error.fatal():
                self._bridge.call_in_loop(self._replace, number)
            elif error.code() == KafkaError._ALL_BROKERS_DOWN and not self._down:
                self._bridge.call_in_loop(self._set_brokers_down, True)

        client, self._client_number = connect(Producer, self._config | {"error_cb": on_error}, logger=LOGGER), number
        return client

    async def close(self) -> None:
        """Wait for the records in flight, up to the send timeout; the outcome of the rest is unknown.

        If the caller is cancelled, it does not wait for them, but still stops the thread and frees the client.
        """
        try:
            await self._drain(self._timeout_s + 1)
        finally:
            self._stopped = asyncio.create_task(self._stop())
            await asyncio.shield(self._stopped)

    async def _stop(self) -> None:
        if self.in_flight or self._waiting:
            LOGGER.warning("the producer was closed before all records were acknowledged")
        self._fail_waiting(math.inf, "the log was closed")
        self._stopping = True
        await asyncio.to_thread(self._thread.join)
        await asyncio.to_thread(self._metadata_executor.shutdown)
        self._bridge.close()
        if self._flush_handle is not None:
            self._flush_handle.cancel()
        self.thread_polls = False
        clients = [self._client, *self._retired]
        await self._drain(_PURGE_S, clients)
        # Drop the references between client and producer, in a thread because freeing a client waits for its threads.
        del self._client, self._retired
        await asyncio.to_thread(clients.clear)

    async def _drain(self, timeout_s: float, purged: Sequence[Producer] = ()) -> None:
        """Wait until every record has a result; `purged` clients are polled here and give up the records they have."""
        deadline = self._loop.time() + timeout_s
        while (self.in_flight or self._waiting or self.done) and self._loop.time() < deadline:
            for client in purged:
                client.purge(blocking=True)  # the binding inverts the flag: this does not block (decision 0069)
                self._poll(client, 0)
            self._resolve_done()
            await asyncio.sleep(_DRAIN_POLL_S)

    # ---- in the producer's thread

    def _run(self) -> None:
        while not self._stopping and not self._loop.is_closed():
            client = self._client
            reports = self._poll(client, _POLL_S)
            if reports == 1 and len(self.done) == self.in_flight == 1 and not self._retired:
                # A lone record: nothing else is in flight for which the loop could poll.
                if not self._bridge.call_in_loop(self._resolve_done):
                    return
            elif reports or self.done or self._retired:
                if not self._bridge.call_in_loop(self._poll_in_loop):
                    return
                while not self._thread_may_poll.acquire(timeout=_LOOP_CHECK_S):
                    if self._loop.is_closed():
                        return
            if self._down:
                try:
                    client.list_topics(timeout=_PROBE_S)
                except KafkaException:
                    continue
                self._bridge.call_in_loop(self._set_brokers_down, False)

    # ---- in either thread

    def _poll(self, client: Producer, timeout_s: float) -> int:
        """Poll a client, and return how many callbacks it made; a failing callback must not stop the polling."""
        try:
            return client.poll(timeout_s)
        except Exception:
            LOGGER.exception("a callback of the Kafka client failed")
            self._metrics.count("kafka_callback_failed")
            time.sleep(timeout_s)
            return 0
