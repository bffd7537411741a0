"""The producer: records are sent from the event loop, and acknowledgements return to it in batches.

`produce()` only queues a record, so the loop calls it directly: at once if nothing is in flight, else once an iteration
for all records of that iteration. The producer's own thread only polls, and passes all acknowledgements of one poll to
the loop in a single call. Under load the thread waits, and the loop polls until no acknowledgement is left: each one
needs the GIL, for which two threads would compete. `PollOwnership` decides this, also for lone records.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer

from tidebook.core.errors import InvalidInput, OutcomeUnknown, TidebookError, TooLarge, Unavailable
from tidebook.kafka.client import LOGGER, connect, producer_config
from tidebook.kafka.errors import TOO_LARGE, not_acknowledged, not_sent
from tidebook.kafka.settings import KafkaSettings
from tidebook.log.kafka.delivery import DeliveryCallback
from tidebook.log.kafka.loop_bridge import LoopBridge
from tidebook.log.kafka.poll_ownership import PollOwnership
from tidebook.log.kafka.produce_batch import ProduceBatch, produce_batches
from tidebook.log.kafka.topics import FRAME_BYTES
from tidebook.log.port import OnSent, OnSentMany, Outgoing, RecordColumns
from tidebook.runtime.metrics import Metrics

#: A poll returns as soon as there is an event; this only bounds how soon a stop is noticed.
_POLL_S = 0.1
#: The maximum number of records that one iteration of the event loop produces.
_TICK_RECORDS_MAX = 1000
_PROBE_S = 1.0
_FULL_WAIT_S = 0.005


class KafkaProducer:
    """An idempotent producer; its client is replaced after a fatal error."""

    def __init__(self, settings: KafkaSettings, metrics: Metrics, *, batch_bytes: int) -> None:
        self._settings = settings
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._bridge = LoopBridge()
        self._config = producer_config(settings, batch_bytes=batch_bytes)
        self._timeout_s = settings.send_timeout_ms / 1000
        self._client_number = 0  # counts the clients created; the last one is in use
        self._client = self._connect()
        #: Clients with a fatal error, polled until all their records have a result.
        self._retired: list[Producer] = []
        #: Records that the client was not given yet.
        self._waiting: deque[DeliveryCallback | ProduceBatch] = deque()
        self._flush_handle: asyncio.Handle | None = None
        self._in_flight = 0
        self._in_flight_bytes = 0
        #: Batches of which some were given to the client and not all are acknowledged.
        self._batches_in_flight = 0
        self._ownership = PollOwnership()
        #: No broker is reachable: records wait here, where they are certainly not written.
        self._down = False
        #: The deadline of records that are sent in this iteration.
        self._deadline = 0.0
        #: Set by `close`, to be notified when every record has a result.
        self._drained: asyncio.Event | None = None
        # Owned by the polling thread:
        #: A flat list [callback, result, …], because a tuple for each pair would cost an object.
        self.completed: list[Any] = []
        self._reported_down = False
        self._stopping = False
        self._metadata_executor = ThreadPoolExecutor(1, "tidebook-kafka-metadata")
        self._thread = threading.Thread(target=self._run, name="tidebook-kafka-producer", daemon=True)
        self._thread.start()

    # ---- in the event loop

    def send(self, record: Outgoing, on_sent: OnSent) -> None:
        """Send a record; `on_sent` is called in a later iteration of the loop."""
        if self._flush_handle is None or self._down:
            self._deadline = self._loop.time() + self._timeout_s
        alone = self._in_flight == 0 and not self._waiting
        self._waiting.append(DeliveryCallback(self, record, on_sent, self._deadline))
        if alone and not self._down and self._produce(1):
            self._ownership.ack_latency.sent(self._deadline - self._timeout_s)
            if not self._ownership.loop_owns:
                return
        else:
            self._ownership.ack_latency.discard_sample()
        self._flush_soon()

    def send_many(self, columns: RecordColumns, on_sent: OnSentMany) -> None:
        """Send records; `on_sent` is called in later iterations of the loop."""
        if self._flush_handle is None or self._down:
            self._deadline = self._loop.time() + self._timeout_s
        self._ownership.ack_latency.discard_sample()
        for partition, indexes in produce_batches(columns):
            self._waiting.append(ProduceBatch(columns, partition, indexes, on_sent, self._batch_done, self._deadline))
        self._flush_soon()

    def _flush(self) -> None:
        self._flush_handle = None
        waiting, full = self._waiting, False
        try:
            if not self._down:
                full = not self._produce(_TICK_RECORDS_MAX)
            self._expire_waiting()
        finally:  # even after an error, or the thread would wait forever
            if self._ownership.loop_owns:
                self._poll_in_loop()
        if waiting and self._flush_handle is None:
            self._deadline = self._loop.time() + self._timeout_s  # for records that are sent before the next flush
            if full:
                self._flush_handle = self._loop.call_later(_FULL_WAIT_S, self._flush)
            elif self._down:
                self._flush_handle = self._loop.call_at(waiting[0].deadline, self._flush)
            else:
                self._flush_handle = self._loop.call_soon(self._flush)

    def _poll_in_loop(self) -> None:
        """Poll in the event loop; hand polling back to the thread if there is nothing to wait for."""
        if not self._retired and not self._reported_down:
            self._poll_client(self._client, 0)
            if self.completed:
                completed, self.completed = self.completed, []
                self._ownership.reset_empty_polls()
                self._resolve_completed(completed, True)
                return
            if self._batches_in_flight and self._ownership.retry_soon(self._flush_soon):
                return
            if self._ownership.should_keep(self._in_flight):
                if self._in_flight:
                    self._flush_soon()
                return
        self._ownership.release()

    def _flush_soon(self) -> None:
        if self._flush_handle is None:
            self._flush_handle = self._loop.call_soon(self._flush)

    def _expire_waiting(self) -> None:
        """Fail the records that have waited past their deadline; none of them was written."""
        now = self._loop.time()
        while self._waiting and self._waiting[0].deadline <= now:
            delivery = self._waiting.popleft()
            count, where = (
                (len(delivery.indexes), delivery) if isinstance(delivery, ProduceBatch) else (1, delivery.record)
            )
            error = Unavailable(
                f"sending to {where.topic}/{where.partition}: no Kafka server accepted it for "
                f"{self._timeout_s:g} s: nothing was written"
            )
            if isinstance(delivery, ProduceBatch) and delivery.in_flight:  # the client may have a part of it
                count -= delivery.produced
                for _ in range(count):
                    self._reject(delivery, error)
            else:
                self._loop.call_soon(delivery.resolve, error)
            self._metrics.count("kafka_send_failed", count, error="Unavailable")
        self._check_drained()

    def _produce(self, count: int) -> bool:
        """Produce up to `count` waiting records; return False if the client accepts no more now."""
        waiting, produce = self._waiting, self._client.produce
        while waiting and count > 0:
            delivery = waiting[0]
            if isinstance(delivery, ProduceBatch):
                count -= len(delivery.indexes)
                if not self._produce_batch(delivery):
                    return False
                continue
            count -= 1
            record = delivery.record
            try:
                if record.headers:
                    headers: list[tuple[str, str | bytes | None]] = list(record.headers)
                    produce(record.topic, record.value, record.key, record.partition, delivery, headers=headers)
                else:
                    produce(record.topic, record.value, record.key, record.partition, delivery)
                self._in_flight += 1
                self._in_flight_bytes += len(record.value)
            except BufferError:
                return False
            except KafkaException as error:
                if error.args[0].code() == KafkaError._FATAL:
                    self._replace(self._client_number)
                    return False
                self._loop.call_soon(delivery.resolve, self._error(error.args[0], record, sent=False))
            except (TypeError, ValueError) as error:
                rejected = InvalidInput(f"sending to {record.topic}/{record.partition}: {error}")
                self._loop.call_soon(delivery.resolve, rejected)
            waiting.popleft()
        return True

    def _produce_batch(self, batch: ProduceBatch) -> bool:
        """Produce the first waiting batch if there is room for all of it; return False if it has to wait."""
        if not batch.in_flight:
            if not self._has_room(batch):
                return False
            batch.in_flight = True
            self._batches_in_flight += 1
            self._in_flight += len(batch.indexes)
            self._in_flight_bytes += batch.size_bytes
        while batch.produced < len(batch.indexes):
            try:
                batch.produce_all(self._client.produce)
            except BufferError:
                return False
            except KafkaException as error:
                if error.args[0].code() == KafkaError._FATAL:
                    self._replace(self._client_number)
                    return False
                self._reject(batch, self._error(error.args[0], batch.record(batch.produced), sent=False))
            except (TypeError, ValueError) as error:
                self._reject(batch, InvalidInput(f"sending to {batch.topic}/{batch.partition}: {error}"))
        self._waiting.popleft()
        return True

    def _reject(self, batch: ProduceBatch, error: TidebookError) -> None:
        if batch.reject(error):
            self._loop.call_soon(self._resolve_completed, [batch, None], False)

    def _has_room(self, batch: ProduceBatch) -> bool:
        """Return whether the client has room for the batch; it also counts keys, of which only the maximum is known."""
        settings, records = self._settings, self._in_flight + len(batch.indexes)
        size_bytes = self._in_flight_bytes + batch.size_bytes + records * FRAME_BYTES
        fits = records <= settings.in_flight_records_max and size_bytes <= settings.in_flight_bytes_max
        return fits or not self._in_flight

    def _resolve_completed(self, completed: list[Any], loop_owns: bool) -> None:
        """Resolve results in the order in which the broker sent them; with `loop_owns`, let the loop poll next."""
        count = len(completed) // 2
        size_bytes = 0
        self._ownership.ack_latency.acknowledged(self._loop.time())
        flat = iter(completed)
        for delivery, result in zip(flat, flat, strict=True):
            try:
                if result is None:
                    self._batches_in_flight -= 1
                    count += len(delivery.indexes) - 1
                    size_bytes += delivery.size_bytes
                    delivery.resolve_reported(self.delivery_error)
                else:
                    size_bytes += len(delivery.record.value)
                    delivery.on_sent(result)
            except Exception as error:  # a failing callback must not cost other senders their results
                self._loop.call_exception_handler({"message": "a callback of Log.send failed", "exception": error})
        self._in_flight -= count
        self._in_flight_bytes -= size_bytes
        self._metrics.count("kafka_sent", count)
        self._check_drained()
        if loop_owns:  # after the callers that were just resumed have sent their next records
            self._ownership.take()
            if self._flush_handle is not None:
                self._flush_handle.cancel()
            self._deadline = self._loop.time() + self._timeout_s
            self._flush_handle = self._loop.call_soon(self._flush)

    async def refresh_metadata(self, topic: str) -> None:
        """Refresh the metadata of a topic: one that was sent to while it did not exist stays unknown for minutes."""
        # In a thread of its own: all threads of the loop's executor may be blocked by appends to this topic.
        lookup = partial(self._client.list_topics, topic, timeout=self._timeout_s)
        try:
            await self._loop.run_in_executor(self._metadata_executor, lookup)
        except KafkaException:
            LOGGER.warning("the producer could not read the metadata of topic %s", topic)

    def _check_drained(self) -> None:
        if self._drained is not None and self._in_flight == 0 and not self._waiting:
            self._drained.set()

    def _set_brokers_down(self, down: bool) -> None:
        self._down = down
        self._metrics.gauge("kafka_brokers_down", int(down))
        if not down and self._waiting:
            if self._flush_handle is not None:
                self._flush_handle.cancel()
            self._flush_handle = self._loop.call_soon(self._flush)

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

    async def close(self) -> None:
        """Wait for the records in flight, up to the send timeout; the outcome of the rest is unknown."""
        self._drained = asyncio.Event()
        self._check_drained()
        try:
            async with asyncio.timeout(self._timeout_s + 1):
                await self._drained.wait()
        except TimeoutError:
            LOGGER.warning("records were not acknowledged before closing")
        self._stopping = True
        self._ownership.release()
        await asyncio.to_thread(self._thread.join)
        await asyncio.to_thread(self._metadata_executor.shutdown)
        self._bridge.close()
        # Client and producer reference each other, so it would never be freed; and freeing it waits for its threads.
        clients = [self._client, *self._retired]
        del self._client, self._retired
        await asyncio.to_thread(clients.clear)

    # ---- in the producer's thread

    def _run(self) -> None:
        while not self._stopping:
            client = self._client
            self._poll_client(client, _POLL_S)
            if not self._retired and not self._reported_down:
                loop_owns = self._ownership.should_hand_to_loop(self.completed)
                self._pass_on(loop_owns)
                if loop_owns and not self._ownership.wait_for_turn():
                    self._stopping = True
                continue
            self._pass_on()
            for retired in list(self._retired):
                retired.purge(blocking=True)  # librdkafka's binding inverts the flag: this does not block (0069)
                self._poll_client(retired, 0)
                if len(retired) == 0:
                    self._retired.remove(retired)
                self._pass_on()
            if self._reported_down:
                self._probe(client)
        for client in (self._client, *self._retired):
            client.purge()
            client.flush(1)
        self._pass_on()

    def _pass_on(self, loop_owns: bool = False) -> None:
        if self.completed:
            completed, self.completed = self.completed, []
            self._call_in_loop(self._resolve_completed, completed, loop_owns)

    def _poll_client(self, client: Producer, timeout_s: float) -> None:
        """Poll a client in the current thread; a failing callback must not stop the polling."""
        try:
            client.poll(timeout_s)
        except Exception:
            LOGGER.exception("a callback of the Kafka client failed")
            self._metrics.count("kafka_callback_failed")
            time.sleep(timeout_s)

    def _batch_done(self, batch: ProduceBatch) -> None:
        """Add a completed batch; runs in the polling thread."""
        self.completed += (batch, None)

    def delivery_error(self, record: Outgoing, error: KafkaError | None) -> TidebookError:
        """Return the error of a record that was not delivered; runs in either thread."""
        if error is not None:
            return self._error(error, record, sent=True)
        return OutcomeUnknown(  # a duplicate batch whose offset the broker no longer knows
            f"sending to {record.topic}/{record.partition}: written, but the broker no longer knows the offset",
            partition=record.partition,
        )

    def _error(self, error: KafkaError, record: Outgoing, *, sent: bool) -> TidebookError:
        if error.code() in TOO_LARGE:
            size_bytes, limit_bytes = len(record.value), self._config["batch.size"]
            rejected: TidebookError = TooLarge("the record", size_bytes=size_bytes, limit_bytes=limit_bytes)
        else:
            rejected = (not_acknowledged if sent else not_sent)(error, record.topic, record.partition)
        self._metrics.count("kafka_send_failed", error=type(rejected).__name__)
        return rejected

    def _connect(self) -> Producer:
        number = self._client_number + 1

        def on_error(error: KafkaError) -> None:
            if error.fatal():
                self._call_in_loop(self._replace, number)
            elif error.code() == KafkaError._ALL_BROKERS_DOWN and not self._reported_down:
                self._reported_down = True
                self._call_in_loop(self._set_brokers_down, True)

        client, self._client_number = connect(Producer, self._config | {"error_cb": on_error}, logger=LOGGER), number
        return client

    def _probe(self, client: Producer) -> None:
        """While no broker is reachable, try to reach one."""
        try:
            client.list_topics(timeout=_PROBE_S)
        except KafkaException:
            return
        self._reported_down = False
        self._call_in_loop(self._set_brokers_down, False)

    def _call_in_loop(self, call: Callable[..., object], *args: object) -> None:
        if not self._bridge.call_in_loop(call, *args):
            self._stopping = True  # the loop was closed without closing the producer
