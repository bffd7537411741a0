"""The producer: records go in from the event loop, acknowledgements come back to it in batches.

`produce()` only queues a record, so the loop's thread calls it itself: at once where nothing is in flight, else once
a tick for all that was sent in that tick. The producer's own thread does nothing but poll; all acknowledgements of
one poll cross over in a single call. Under load, when many come at once, the thread stands still until there are none
left and the loop polls for itself: each of them needs the interpreter, and two threads would take it from one another.
So it does where a broker is near and records come one by one (`turns`).
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
from tidebook.core.metrics import Metrics
from tidebook.log.kafka.client import LOGGER, connect, producer_config
from tidebook.log.kafka.crossing import Crossing
from tidebook.log.kafka.faults import TOO_LARGE, not_acknowledged, not_sent
from tidebook.log.kafka.run import Run, runs
from tidebook.log.kafka.sending import Sending
from tidebook.log.kafka.settings import KafkaSettings
from tidebook.log.kafka.topics import FRAME_BYTES
from tidebook.log.kafka.turns import Turns
from tidebook.log.port import Many, OnSent, OnSentMany, Outgoing

#: A poll returns as soon as there is news; this only bounds how late a stop is noticed.
_POLL_S = 0.1
#: One tick of the event loop hands over at most so many records.
_TICK_RECORDS_MAX = 1000
_PROBE_S = 1.0
_FULL_WAIT_S = 0.005


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
        #: Not yet handed to the client.
        self._waiting: deque[Sending | Run] = deque()
        self._flushing: asyncio.Handle | None = None
        self._in_flight = 0
        self._in_flight_bytes = 0
        #: Runs that were handed to the client and are not all acknowledged.
        self._runs = 0
        self._turns = Turns()
        #: No broker answers: records wait here, where it is certain that they were not written.
        self._down = False
        #: When what is sent in this tick is given up, should it still wait here then.
        self._give_up_at = 0.0
        #: Set when closing: everything has been answered.
        self._drained: asyncio.Event | None = None
        # Owned by the thread, or by the loop while that polls:
        #: Records and what came of them, by turns: pairs would be so many more objects.
        self.done: list[Any] = []
        self._told_down = False
        self._stopping = False
        self._looking = ThreadPoolExecutor(1, "tidebook-kafka-looking")
        self._thread = threading.Thread(target=self._run, name="tidebook-kafka-producer", daemon=True)
        self._thread.start()

    # ---- in the event loop

    def send(self, record: Outgoing, on_sent: OnSent) -> None:
        """Send a record; the callback comes in a later tick."""
        if self._flushing is None or self._down:
            self._give_up_at = self._loop.time() + self._timeout_s
        alone = self._in_flight == 0 and not self._waiting
        self._waiting.append(Sending(self, record, on_sent, self._give_up_at))
        if alone and not self._down and self._produce(1):
            self._turns.nearness.sent(self._give_up_at - self._timeout_s)
            if not self._turns.loops:
                return
        else:
            self._turns.nearness.joined()
        self._flush_soon()

    def send_many(self, many: Many, on_sent: OnSentMany) -> None:
        """Send records; the callbacks come in later ticks."""
        if self._flushing is None or self._down:
            self._give_up_at = self._loop.time() + self._timeout_s
        self._turns.nearness.joined()
        for partition, places in runs(many):
            self._waiting.append(Run(many, partition, places, on_sent, self._run_done, self._give_up_at))
        self._flush_soon()

    def _flush(self) -> None:
        self._flushing = None
        waiting, full = self._waiting, False
        try:
            if not self._down:
                full = not self._produce(_TICK_RECORDS_MAX)
            self._give_up()
        finally:  # whatever failed, the thread must not stand still for it
            if self._turns.loops:
                self._poll()
        if waiting and self._flushing is None:
            self._give_up_at = self._loop.time() + self._timeout_s  # for what is sent until the next flush
            if full:
                self._flushing = self._loop.call_later(_FULL_WAIT_S, self._flush)
            elif self._down:
                self._flushing = self._loop.call_at(waiting[0].give_up_at, self._flush)
            else:
                self._flushing = self._loop.call_soon(self._flush)

    def _poll(self) -> None:
        """Take what has come meanwhile, in the loop's own thread; if that is nothing, the thread may wait for it."""
        if not self._retired and not self._told_down:
            self._ask(self._client, 0)
            if self.done:
                done, self.done = self.done, []
                self._turns.came()
                self._take(done, True)
                return
            if self._runs and self._turns.looks_again(self._flush_soon):
                return
            if self._turns.keeps(self._in_flight):
                if self._in_flight:
                    self._flush_soon()
                return
        self._turns.give_back()

    def _flush_soon(self) -> None:
        if self._flushing is None:
            self._flushing = self._loop.call_soon(self._flush)

    def _give_up(self) -> None:
        """Fail what has waited too long; none of it was written."""
        now = self._loop.time()
        while self._waiting and self._waiting[0].give_up_at <= now:
            sending = self._waiting.popleft()
            count, where = (len(sending.places), sending) if isinstance(sending, Run) else (1, sending.record)
            error = Unavailable(
                f"sending to {where.topic}/{where.partition}: no Kafka server took it for "
                f"{self._timeout_s:g} s: nothing was written"
            )
            if isinstance(sending, Run) and sending.in_flight:  # the client may have some of it
                count -= sending.handed
                for _ in range(count):
                    self._refuse(sending, error)
            else:
                self._loop.call_soon(sending.tell, error)
            self._metrics.count("kafka_send_failed", count, error="Unavailable")
        self._settle()

    def _produce(self, count: int) -> bool:
        """Hand the first records that wait to the client; False if it takes no more now."""
        waiting, produce = self._waiting, self._client.produce
        while waiting and count > 0:
            sending = waiting[0]
            if isinstance(sending, Run):
                count -= len(sending.places)
                if not self._produce_run(sending):
                    return False
                continue
            count -= 1
            record = sending.record
            try:
                if record.headers:
                    headers: list[tuple[str, str | bytes | None]] = list(record.headers)
                    produce(record.topic, record.value, record.key, record.partition, sending, headers=headers)
                else:
                    produce(record.topic, record.value, record.key, record.partition, sending)
                self._in_flight += 1
                self._in_flight_bytes += len(record.value)
            except BufferError:
                return False
            except KafkaException as error:
                if error.args[0].code() == KafkaError._FATAL:
                    self._replace()
                    return False
                self._loop.call_soon(sending.tell, self._refusal(error.args[0], record, sent=False))
            except (TypeError, ValueError) as error:
                refused = InvalidInput(f"sending to {record.topic}/{record.partition}: {error}")
                self._loop.call_soon(sending.tell, refused)
            waiting.popleft()
        return True

    def _produce_run(self, run: Run) -> bool:
        """The first that waits, all of it, if there is room for all of it."""
        if not run.in_flight:
            if not self._has_room(run):
                return False
            run.in_flight = True
            self._runs += 1
            self._in_flight += len(run.places)
            self._in_flight_bytes += run.size_bytes
        while run.handed < len(run.places):
            try:
                run.hand_over(self._client.produce)
            except BufferError:
                return False
            except KafkaException as error:
                if error.args[0].code() == KafkaError._FATAL:
                    self._replace()
                    return False
                self._refuse(run, self._refusal(error.args[0], run.record(run.handed), sent=False))
            except (TypeError, ValueError) as error:
                self._refuse(run, InvalidInput(f"sending to {run.topic}/{run.partition}: {error}"))
        self._waiting.popleft()
        return True

    def _refuse(self, run: Run, error: TidebookError) -> None:
        if run.refuse(error):
            self._loop.call_soon(self._take, [run, None], False)

    def _has_room(self, run: Run) -> bool:
        """Whether the client will take all of it: it counts keys too, of which we only know how long they may be."""
        settings, records = self._settings, self._in_flight + len(run.places)
        size_bytes = self._in_flight_bytes + run.size_bytes + records * FRAME_BYTES
        fits = records <= settings.in_flight_records_max and size_bytes <= settings.in_flight_bytes_max
        return fits or not self._in_flight

    def _take(self, done: list[Any], loops: bool) -> None:
        """Acknowledgements, in the order in which the broker gave them; then the loop polls, if it is to."""
        count = len(done) // 2
        size_bytes = 0
        self._turns.nearness.acknowledged(self._loop.time())
        turns = iter(done)
        for sending, result in zip(turns, turns, strict=True):
            try:
                if result is None:
                    self._runs -= 1
                    count += len(sending.places) - 1
                    size_bytes += sending.size_bytes
                    sending.tell_reported(self.undelivered)
                else:
                    size_bytes += len(sending.record.value)
                    sending.on_sent(result)
            except Exception as error:  # one sender's mistake must not cost the others their answers
                self._loop.call_exception_handler({"message": "a callback of Log.send failed", "exception": error})
        self._in_flight -= count
        self._in_flight_bytes -= size_bytes
        self._metrics.count("kafka_sent", count)
        self._settle()
        if loops:  # after those who were just woken have sent what they want to send
            self._turns.take()
            if self._flushing is not None:
                self._flushing.cancel()
            self._give_up_at = self._loop.time() + self._timeout_s
            self._flushing = self._loop.call_soon(self._flush)

    async def learn(self, topic: str) -> None:
        """Look at a topic anew: one that was sent to while it was gone would stay unknown for minutes."""
        # Not in the event loop's own threads: all of them may wait, without a loop, for an append to this topic.
        looking = partial(self._client.list_topics, topic, timeout=self._timeout_s)
        try:
            await self._loop.run_in_executor(self._looking, looking)
        except KafkaException:
            LOGGER.warning("the producer could not look at topic %s", topic)

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
        try:
            client = self._connect()
        except TidebookError as error:  # tried again with the next flush, until those who wait are given up
            LOGGER.warning("no new producer can be made: %s", error)
            return
        self._metrics.count("kafka_producer_replaced")
        self._retired.append(self._client)
        self._client = client

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
        self._turns.give_back()
        await asyncio.to_thread(self._thread.join)
        await asyncio.to_thread(self._looking.shutdown)
        self._crossing.close()

    # ---- in the producer's thread

    def _run(self) -> None:
        while not self._stopping:
            client = self._client
            self._ask(client, _POLL_S)
            if not self._retired and not self._told_down:
                loops = self._turns.pass_on(self.done)
                self._hand_over(loops)
                if loops and not self._turns.stand_still():
                    self._stopping = True
                continue
            self._hand_over()
            for retired in list(self._retired):
                retired.purge(blocking=True)  # the client takes it the wrong way round: this one does not wait (0069)
                self._ask(retired, 0)
                if len(retired) == 0:
                    self._retired.remove(retired)
                self._hand_over()
            if self._told_down:
                self._probe(client)
        for client in (self._client, *self._retired):
            client.purge()
            client.flush(1)
        self._hand_over()

    def _hand_over(self, loops: bool = False) -> None:
        if self.done:
            done, self.done = self.done, []
            self._tell(self._take, done, loops)

    def _ask(self, client: Producer, timeout_s: float) -> None:
        """Poll, in whichever thread's turn it is; a failing callback must not end the thread for all others."""
        try:
            client.poll(timeout_s)
        except Exception:
            LOGGER.exception("a callback of the Kafka client failed")
            self._metrics.count("kafka_callback_failed")
            time.sleep(timeout_s)

    def _run_done(self, run: Run) -> None:
        """In whichever thread polls."""
        self.done += (run, None)

    def undelivered(self, record: Outgoing, error: KafkaError | None) -> TidebookError:
        """The client's bad news, in whichever thread."""
        if error is not None:
            return self._refusal(error, record, sent=True)
        return OutcomeUnknown(  # a repeated batch that the broker knows, but no longer where
            f"sending to {record.topic}/{record.partition}: written, but the broker forgot where",
            partition=record.partition,
        )

    def _refusal(self, error: KafkaError, record: Outgoing, *, sent: bool) -> TidebookError:
        if error.code() in TOO_LARGE:
            limit_bytes = self._config["batch.size"]
            refused: TidebookError = TooLarge("the record", size_bytes=len(record.value), limit_bytes=limit_bytes)
        elif sent:
            refused = not_acknowledged(error, record.topic, record.partition)
        else:
            refused = not_sent(error, record.topic, record.partition)
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
