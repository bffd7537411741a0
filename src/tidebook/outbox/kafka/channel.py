"""Send a relay's batches with a Kafka producer, in order and without gaps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from tidebook.kafka.errors import TOO_LARGE
from tidebook.outbox import port
from tidebook.outbox.kafka.producer import ClientCall, RelayProducer, choose_partition, fatal_cause

#: Error codes for a message that the broker will never accept.
REFUSALS = TOO_LARGE | {KafkaError.INVALID_RECORD}
_TOO_OLD = "Invalid timestamp"
#: How long to wait for the reports of purged messages.
CLOSE_S_MAX = 1.0
#: How long to wait for the second part of a failure.
SECOND_REPORT_S_MAX = 5.0
#: The timeout of one commit call; it is repeated until the batch's deadline.
COMMIT_S = 1.0
ABORT_S_MAX = 10.0


class FirstFailure:
    """Records the first failure that is reported for a batch.

    The client references it for every message until the message's report is delivered. If it referenced the channel
    instead, a report that never comes would keep the producer alive and sending.
    """

    def __init__(self) -> None:
        self.error: KafkaError | None = None

    def __call__(self, error: KafkaError | None, message: Any) -> None:
        self.error = self.error or error


class KafkaChannel:
    """An idempotent producer, used by one thread: sends a batch and returns its outcome.

    Only failures are reported: a batch without one is in the log once the producer's queue is empty. With `singly`,
    messages are sent one by one, so that a refusal identifies its message.
    """

    def __init__(
        self, producer: RelayProducer, topic: port.TargetTopic, remove_producer: Callable[[], object], *, singly: bool
    ) -> None:
        self.topic = topic
        self._producer = producer
        self._remove_producer = remove_producer
        self._singly = singly
        self._queued = 0
        self._fatal: KafkaError | None = None
        self._reset((), 0)

    def start(self, messages: Sequence[port.RelayedMessage], *, timestamp_ms: int) -> None:
        """Queue the batch in the producer, or with `singly` its first message."""
        self._reset(messages, timestamp_ms)
        self._produce()

    def _reset(self, messages: Sequence[port.RelayedMessage], timestamp_ms: int) -> None:
        self._messages = messages
        self._timestamp_ms = timestamp_ms
        self._produced = 0
        self._failure = FirstFailure()
        self._report_deadline: float | None = None

    def _produce(self) -> None:
        """Queue the rest of the batch, or with `singly` its next message."""
        topic, partitions = self.topic.topic, self.topic.partitions
        produce, on_delivery, stamp = self._producer.produce, self._failure, self._timestamp_ms
        done = self._produced
        count = 1 if self._singly else len(self._messages)
        try:
            for message in self._messages[done : done + count]:
                partition = choose_partition(message.partition_key, partitions)
                # Positional (`callback`, then its alias): keywords would cost as much as the rest of the call.
                produce(topic, message.value, message.key, partition, on_delivery, None, stamp, message.headers)
                done += 1
        except KafkaException as error:
            self._fatal = error.args[0]
            self._queued = len(self._producer)
        except BufferError:
            pass  # the queue is full: `wait` produces the rest
        finally:
            self._produced = done

    def wait(self, timeout_s: float) -> port.Outcome | None:
        """Serve the producer for at most `timeout_s`; return the outcome once the batch has ended."""
        if self._fatal is None:
            try:
                self._queued = self._producer.flush(timeout_s)
            except (KafkaException, SystemError) as error:
                self._fatal = fatal_cause(error, self._producer)
                self._queued = len(self._producer)
        if self._failure.error is not None or self._fatal is not None:
            return self._failed_outcome() if self._failure_is_complete(timeout_s) else None
        if self._queued:
            return None
        if self._produced < len(self._messages):
            self._produce()
            return None
        return self._complete(timeout_s)

    def _failure_is_complete(self, timeout_s: float) -> bool:
        """Serve the producer; return whether both parts of a failure have arrived, or will not come.

        Without gaps, a failure is reported twice, in either order: by a message's delivery report and by a fatal error.
        Both are needed: the reports of a batch that is too old say only that its records are invalid.
        """
        now = time.monotonic()
        if self._report_deadline is None:
            self._report_deadline = now + SECOND_REPORT_S_MAX
        end = min(now + timeout_s, self._report_deadline)
        while not self._has_all_reports() and (left_s := end - time.monotonic()) > 0:
            try:
                self._producer.poll(left_s)
            except (KafkaException, SystemError) as error:
                self._fatal = self._fatal or fatal_cause(error, self._producer)
            self._queued = len(self._producer)
        return self._has_all_reports() or time.monotonic() >= self._report_deadline

    def _has_all_reports(self) -> bool:
        """Return whether both parts have arrived; with an empty queue, no delivery report will come."""
        return self._fatal is not None and (self._failure.error is not None or not self._queued)

    def _complete(self, timeout_s: float) -> port.Outcome | None:
        return port.BatchSent()

    def _failed_outcome(self) -> port.Outcome:
        """Return the outcome for the first failure. Only a scan determines whether messages in flight have arrived."""
        error = self._failure.error or self._fatal
        assert error is not None
        codes = {each.code() for each in (self._failure.error, self._fatal) if each is not None}
        late = KafkaError.INVALID_TIMESTAMP in codes or _TOO_OLD in (self._fatal.str() if self._fatal else "")
        if codes & REFUSALS and not late:
            if self._singly and self._failure.error is not None:
                sent = tuple(message.id for message in self._messages[: self._produced - 1])
                return port.BatchPartlySent(
                    sent, (port.BatchRefused(self._messages[self._produced - 1].id, error.str()),)
                )
            return port.BatchOutcomeUnknown(f"Kafka refused a message of the batch: {error.str()}", suspect=True)
        return port.BatchOutcomeUnknown(f"{error.name()}: {error.str()}", late=late)

    def drop(self) -> None:
        self._remove_producer()
        producer = self._producer
        try:
            # The client inverts this argument: with False it waits for every broker thread, without a limit and with
            # the GIL held, which stops every thread of the process.
            producer.purge(blocking=True)
            producer.flush(CLOSE_S_MAX)
        except (KafkaException, SystemError):
            pass  # the producer has failed and can only be closed
        producer.log_client_lines()
        self._messages = ()
        # The client leaks an exception that it raises while it runs callbacks, and with it this frame and this
        # channel. Through them the producer would stay alive and reconnect to its brokers forever.
        del self._producer, producer


class KafkaTransactionChannel(KafkaChannel):
    """Sends each batch as one transaction: a newer channel of the topic fences this one.

    The client's transaction calls may exceed their timeout, and never return if the producer fails during the call.
    Each runs in a separate thread, and `wait` returns in time, so that the relay can send its heartbeats.
    """

    _call: ClientCall | None = None
    _committing = False

    def start(self, messages: Sequence[port.RelayedMessage], *, timestamp_ms: int) -> None:
        """Begin the transaction; `wait` produces the messages."""
        self._reset(messages, timestamp_ms)
        self._committing = False
        self._call = ClientCall(self._producer.begin_transaction)

    def wait(self, timeout_s: float) -> port.Outcome | None:
        if self._committing:
            return self._complete(timeout_s)
        if self._call is not None:
            if not self._call.wait(timeout_s):
                return None
            self._fatal = self._call_error()
            if self._fatal is None:
                self._produce()
        return super().wait(timeout_s)

    def _call_error(self) -> KafkaError | None:
        """Return the error of the call that has just ended, or None."""
        call, self._call = self._call, None
        assert call is not None
        try:
            call.result()
        except (KafkaException, SystemError) as error:
            return fatal_cause(error, self._producer)
        return None

    def _has_all_reports(self) -> bool:
        """Return True: an error of a transaction can be aborted and is not fatal, so there is no second part."""
        return True

    def _complete(self, timeout_s: float) -> port.Outcome | None:
        if self._call is None:
            self._committing = True
            self._call = ClientCall(partial(self._producer.commit_transaction, COMMIT_S))
        if not self._call.wait(timeout_s):
            return None
        failure = self._call_error()
        if failure is None:
            return super()._complete(timeout_s)
        if failure.retriable() and not failure.fatal():
            return None
        return port.BatchOutcomeUnknown(f"{failure.name()}: {failure.str()}")

    def _failed_outcome(self) -> port.Outcome:
        """Abort the transaction, which leaves nothing in the log: a refused message is reported without a scan."""
        outcome = super()._failed_outcome()
        if isinstance(outcome, port.BatchPartlySent):
            self._call = ClientCall(partial(self._producer.abort_transaction, ABORT_S_MAX))
            if not self._call.wait(ABORT_S_MAX):
                return port.BatchOutcomeUnknown("a transaction could not be aborted in time", suspect=True)
            failure = self._call_error()
            if failure is not None:
                return port.BatchOutcomeUnknown(f"a transaction could not be aborted: {failure.str()}", suspect=True)
            return port.BatchPartlySent((), outcome.refused)
        return outcome

    def drop(self) -> None:
        super().drop()
        if self._call is not None:
            self._call.abandon()
            self._call = None
