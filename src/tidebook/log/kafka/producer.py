"""The producer: records go in from the event loop, acknowledgements come back to it in batches.

`produce()` only queues a record, so the loop's thread calls it itself: at once where nothing is in flight, else once
a tick for all that was sent in that tick. The producer's own thread does nothing but poll; all acknowledgements of
one poll cross over in a single call.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from functools import partial

from confluent_kafka import KafkaError, KafkaException, Producer

from tidebook.core.errors import InvalidInput, OutcomeUnknown, TidebookError, TooLarge, Unavailable
from tidebook.core.metrics import Metrics
from tidebook.log.kafka.client import LOGGER, connect, producer_config
from tidebook.log.kafka.crossing import Crossing
from tidebook.log.kafka.faults import TOO_LARGE, not_acknowledged, not_sent
from tidebook.log.kafka.reading import Message
from tidebook.log.kafka.settings import KafkaSettings
from tidebook.log.port import OnSent, Outgoing, Sent

#: A poll returns as soon as there is news; this only bounds how late a stop is noticed.
_POLL_S = 0.1
#: One tick of the event loop hands over at most so many records.
_TICK_RECORDS_MAX = 1000
_PROBE_S = 1.0
_FULL_WAIT_S = 0.005

_Result = tuple[OnSent, Sent | TidebookError]


class KafkaProducer:
    """One idempotent producer, replaced when it fails for good."""

    def __init__(self, settings: KafkaSettings, metrics: Metrics, *, batch_bytes: int) -> None:
        self._settings = settings
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._crossing = Crossing()
        self._config = producer_config(settings, batch_bytes=batch_bytes)
        self._timeout_s = settings.send_timeout_ms / 1000
        self._client = self._connect()
        #: Clients that failed for good, polled until all their records are answered.
        self._retired: list[Producer] = []
        #: Not yet handed to the client: (record, callback, when to give up).
        self._waiting: deque[tuple[Outgoing, OnSent, float]] = deque()
        self._flushing: asyncio.Handle | None = None
        self._in_flight = 0
        #: No broker answers: records wait here, where it is certain that they were not written.
        self._down = False
        #: When what is sent in this tick is given up, should it still wait here then.
        self._give_up_at = 0.0
        #: Set when closing: everything has been answered.
        self._drained: asyncio.Event | None = None
        self._on_delivery = self._delivered
        # Owned by the thread:
        self._done: list[_Result] = []
        self._told_down = False
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="tidebook-kafka-producer", daemon=True)
        self._thread.start()

    # ---- in the event loop

    def send(self, record: Outgoing, on_sent: OnSent) -> None:
        """Send a record; the callback comes in a later tick."""
        if self._in_flight == 0 and not self._waiting and not self._down and self._produce(record, on_sent):
            return
        if self._flushing is None or self._down:
            self._give_up_at = self._loop.time() + self._timeout_s
            if self._flushing is None:
                self._flushing = self._loop.call_soon(self._flush)
        self._waiting.append((record, on_sent, self._give_up_at))

    def _flush(self) -> None:
        self._flushing = None
        waiting = self._waiting
        if not self._down:
            for _ in range(min(len(waiting), _TICK_RECORDS_MAX)):
                item = waiting.popleft()
                if not self._produce(item[0], item[1]):
                    waiting.appendleft(item)
                    self._flushing = self._loop.call_later(_FULL_WAIT_S, self._flush)
                    break
        self._give_up()
        if waiting and self._flushing is None:
            if self._down:
                self._flushing = self._loop.call_at(waiting[0][2], self._flush)
            else:
                self._flushing = self._loop.call_soon(self._flush)

    def _give_up(self) -> None:
        """Fail what has waited too long; none of it was written."""
        now = self._loop.time()
        while self._waiting and self._waiting[0][2] <= now:
            record, on_sent, _ = self._waiting.popleft()
            error = Unavailable(
                f"sending to {record.topic}/{record.partition}: no Kafka server took it for "
                f"{self._timeout_s:g} s: nothing was written"
            )
            self._loop.call_soon(on_sent, error)
            self._metrics.count("kafka_send_failed", error="Unavailable")
        self._settle()

    def _produce(self, record: Outgoing, on_sent: OnSent) -> bool:
        """Hand a record to the client; False if it takes none now."""
        try:
            if record.headers:
                headers: list[tuple[str, str | bytes | None]] = list(record.headers)
                self._client.produce(
                    record.topic,
                    record.value,
                    record.key,
                    record.partition,
                    partial(self._on_delivery, on_sent),
                    headers=headers,
                )
            else:
                self._client.produce(
                    record.topic, record.value, record.key, record.partition, partial(self._on_delivery, on_sent)
                )
        except BufferError:
            return False
        except KafkaException as error:
            if error.args[0].code() == KafkaError._FATAL:
                self._replace()
                return False
            self._loop.call_soon(
                on_sent, self._refusal(error.args[0], record.topic, record.partition, len(record.value), sent=False)
            )
            return True
        except (TypeError, ValueError) as error:
            self._loop.call_soon(on_sent, InvalidInput(f"sending to {record.topic}/{record.partition}: {error}"))
            return True
        self._in_flight += 1
        return True

    def _take(self, results: list[_Result]) -> None:
        """Acknowledgements, in the order in which the broker gave them."""
        self._in_flight -= len(results)
        self._metrics.count("kafka_sent", len(results))
        for on_sent, result in results:
            try:
                on_sent(result)
            except Exception as error:  # one sender's mistake must not cost the others their answers
                self._loop.call_exception_handler({"message": "a callback of Log.send failed", "exception": error})
        self._settle()

    def _settle(self) -> None:
        if self._drained is not None and self._in_flight == 0 and not self._waiting:
            self._drained.set()

    def _brokers(self, down: bool) -> None:
        self._down = down
        self._metrics.gauge("kafka_brokers_down", int(down))
        if not down and self._waiting:
            if self._flushing is not None:
                self._flushing.cancel()
            self._flushing = self._loop.call_soon(self._flush)

    def _replace(self) -> None:
        """A fatal error ends an idempotent producer: its open records are unknown, the next ones get a new one."""
        self._metrics.count("kafka_producer_replaced")
        self._retired.append(self._client)
        self._client = self._connect()

    def _fatal(self, client: Producer) -> None:
        if client is self._client:
            self._replace()

    async def close(self) -> None:
        """Finish what was sent; what is not acknowledged in time is unknown."""
        self._drained = asyncio.Event()
        self._settle()
        try:
            async with asyncio.timeout(self._timeout_s + 1):
                await self._drained.wait()
        except TimeoutError:
            LOGGER.warning("records were not acknowledged before closing")
        self._stopping = True
        await asyncio.to_thread(self._thread.join)
        self._crossing.close()

    # ---- in the producer's thread

    def _run(self) -> None:
        while not self._stopping:
            client = self._client
            client.poll(_POLL_S)
            self._hand_over()
            for retired in list(self._retired):
                retired.purge(in_queue=True, in_flight=True, blocking=False)
                retired.poll(0)
                if len(retired) == 0:
                    self._retired.remove(retired)
                self._hand_over()
            if self._told_down:
                self._probe(client)
        for client in (self._client, *self._retired):
            client.purge()
            client.flush(1)
        self._hand_over()

    def _hand_over(self) -> None:
        if self._done:
            results, self._done = self._done, []
            self._tell(self._take, results)

    def _delivered(self, on_sent: OnSent, error: KafkaError | None, message: Message) -> None:
        partition = message.partition()
        if error is None:
            offset = message.offset()
            if offset >= 0:
                self._done.append((on_sent, Sent(partition, offset, message.timestamp()[1])))
                return
            # A repeated batch that the broker knows, but no longer where.
            unknown = OutcomeUnknown(
                f"sending to {message.topic()}/{partition}: written, but the broker forgot where", partition=partition
            )
            self._done.append((on_sent, unknown))
            return
        refused = self._refusal(error, message.topic(), partition, len(message.value() or b""), sent=True)
        self._done.append((on_sent, refused))

    def _refusal(self, error: KafkaError, topic: str, partition: int, size_bytes: int, *, sent: bool) -> TidebookError:
        if error.code() in TOO_LARGE:
            limit_bytes = self._config["batch.size"]
            refused: TidebookError = TooLarge("the record", size_bytes=size_bytes, limit_bytes=limit_bytes)
        elif sent:
            refused = not_acknowledged(error, topic, partition)
        else:
            refused = not_sent(error, topic, partition)
        self._metrics.count("kafka_send_failed", error=type(refused).__name__)
        return refused

    def _connect(self) -> Producer:
        connected: list[Producer] = []

        def on_error(error: KafkaError) -> None:
            if error.fatal() and connected:
                self._tell(self._fatal, connected[0])
            elif error.code() == KafkaError._ALL_BROKERS_DOWN and not self._told_down:
                self._told_down = True
                self._tell(self._brokers, True)

        connected.append(connect(Producer, self._config | {"error_cb": on_error}, logger=LOGGER))
        return connected[0]

    def _probe(self, client: Producer) -> None:
        """While no broker answers, ask for one that does."""
        try:
            client.list_topics(timeout=_PROBE_S)
        except KafkaException:
            return
        self._told_down = False
        self._tell(self._brokers, False)

    def _tell(self, call: Callable[..., object], *args: object) -> None:
        if not self._crossing.tell(call, *args):
            self._stopping = True  # the loop was closed under us
