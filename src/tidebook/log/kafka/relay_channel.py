"""A Kafka producer that sends a relay's batches in order, without gaps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from tidebook.log.kafka.faults import TOO_LARGE
from tidebook.log.kafka.relay_partition import partition_of
from tidebook.log.kafka.relay_producer import Call, RelayProducer, fatal_cause
from tidebook.log.relay_port import Outcome, Partly, Refusal, Relayed, Sent, TargetTopic, Unsure

#: What a broker says of a message that it will never take, whoever sends it and whenever.
REFUSALS = TOO_LARGE | {KafkaError.INVALID_RECORD}
_TOO_OLD = "Invalid timestamp"
#: By the key.
ANY_PARTITION = -1
BATCH_BYTES_MAX = 1_000_000
#: The most that the client takes for a message.
MESSAGE_BYTES_MAX = 1_000_000_000
#: A batch's own bytes in the broker's count.
BATCH_OVERHEAD_BYTES = 1_000
QUEUE_MESSAGES_MAX = 1_000_000
QUEUE_KIB_MAX = 2_000_000
#: How long the reports of what was purged are waited for.
CLOSE_S_MAX = 1.0
#: How long the other half of a failure's story is waited for.
TOLD_S_MAX = 5.0
#: How long one call to commit may take; it is called again, until the batch's time is over.
COMMIT_S = 1.0
END_S_MAX = 10.0


def transaction_settings(name: str, *, timeout_ms: int) -> dict[str, Any]:
    """What a transactional producer adds: a name by which a newer one fences it."""
    return {"transactional.id": name, "transaction.timeout.ms": timeout_ms, "message.timeout.ms": timeout_ms}


def producer_settings(client: Mapping[str, Any], *, limit_bytes: int, compression: str) -> dict[str, Any]:
    """Settings that keep the order: one session, no gaps, and no timeout of a message's own."""
    return {
        **client,
        "enable.idempotence": True,
        "enable.gapless.guarantee": True,
        "acks": "all",
        "message.timeout.ms": 0,
        "partitioner": "murmur2_random",
        "delivery.report.only.error": True,
        "compression.type": compression,
        "linger.ms": 5,  # flush does not wait for it
        # One message too many would fail its whole batch: a batch never passes the topic's limit.
        "message.max.bytes": min(MESSAGE_BYTES_MAX, max(limit_bytes, BATCH_BYTES_MAX)),
        "batch.size": max(1, min(BATCH_BYTES_MAX, limit_bytes - BATCH_OVERHEAD_BYTES)),
        "queue.buffering.max.messages": QUEUE_MESSAGES_MAX,
        "queue.buffering.max.kbytes": QUEUE_KIB_MAX,
    }


class Failures:
    """Keeps the first failure that is reported of a batch.

    The client holds on to it for every message until its report is served. A channel in its place would hold its
    producer, and that would never end, and go on sending, where a report does not come.
    """

    def __init__(self) -> None:
        self.first: KafkaError | None = None

    def __call__(self, error: KafkaError | None, message: Any) -> None:
        self.first = self.first or error


class KafkaChannel:
    """One idempotent producer, used by one thread: it sends a batch, and tells how it ended.

    Only failures are reported: a batch without one is in the log when the producer's queue is empty. `singly` sends
    message by message, so that a refusal names its message.
    """

    def __init__(
        self, producer: RelayProducer, topic: TargetTopic, forget: Callable[[], None], *, singly: bool = False
    ) -> None:
        self.topic = topic
        self._producer = producer
        self._forget = forget
        self._singly = singly
        self._messages: Sequence[Relayed] = ()
        self._timestamp_ms = 0
        self._next = 0
        self._left = 0
        self._failures = Failures()
        self._broken: KafkaError | None = None
        self._told_until: float | None = None

    def start(self, messages: Sequence[Relayed], *, timestamp_ms: int) -> None:
        """Hand the batch to the producer, or its first message where it goes singly."""
        self._take(messages, timestamp_ms)
        self._produce(1 if self._singly else len(messages))

    def _take(self, messages: Sequence[Relayed], timestamp_ms: int) -> None:
        self._messages = messages
        self._timestamp_ms = timestamp_ms
        self._next = 0
        self._failures = Failures()
        self._told_until = None

    def _produce(self, count: int) -> None:
        topic, partitions = self.topic.topic, self.topic.partitions
        produce, failed, stamp = self._producer.produce, self._failures, self._timestamp_ms
        done = self._next
        try:
            for message in self._messages[done : done + count]:
                chosen = message.partition_key
                partition = ANY_PARTITION if chosen is None else partition_of(chosen, partitions)
                # By position (`callback`, then its other name): names would cost as much as the rest of the call.
                produce(topic, message.value, message.key, partition, failed, None, stamp, message.headers)
                done += 1
        except KafkaException as error:
            self._broken = error.args[0]
            self._left = len(self._producer)
        except BufferError:
            pass  # full: what is in the queue goes first, and the rest follows from `wait`
        finally:
            self._next = done

    def wait(self, timeout_s: float) -> Outcome | None:
        """Serve the producer until the batch has ended, at most for so long."""
        if self._broken is None:
            self._serve(timeout_s)
        if self._failures.first is not None or self._broken is not None:
            return self._failed() if self._told(timeout_s) else None
        if self._left:
            return None
        if self._next < len(self._messages):
            self._produce(1 if self._singly else len(self._messages))
            return None
        return self._complete(timeout_s)

    def _serve(self, timeout_s: float) -> None:
        """Deliver reports. A fatal error is raised out of it."""
        try:
            self._left = self._producer.flush(timeout_s)
        except (KafkaException, SystemError) as error:
            self._broken = fatal_cause(error, self._producer)
            self._left = len(self._producer)

    def _told(self, timeout_s: float) -> bool:
        """Whether the failure's story is complete, or its end does not come; serves the producer for so long.

        A failure without gaps is told twice, in either order: by a message's report, and by a fatal error. Neither is
        enough: of a batch that is too old the reports say only that its records are invalid.
        """
        now = time.monotonic()
        if self._told_until is None:
            self._told_until = now + TOLD_S_MAX
        end = min(now + timeout_s, self._told_until)
        while not self._both_told() and (left_s := end - time.monotonic()) > 0:
            try:
                self._producer.poll(left_s)
            except (KafkaException, SystemError) as error:
                self._broken = self._broken or fatal_cause(error, self._producer)
            self._left = len(self._producer)
        return self._both_told() or time.monotonic() >= self._told_until

    def _both_told(self) -> bool:
        """Where nothing is left in the producer's queue, no report will come."""
        return self._broken is not None and (self._failures.first is not None or not self._left)

    def _complete(self, timeout_s: float) -> Outcome | None:
        return Sent()

    def _failed(self) -> Outcome:
        """What the first failure means. What is still on its way may yet arrive: only a scan tells."""
        error = self._failures.first or self._broken
        assert error is not None
        codes = {each.code() for each in (self._failures.first, self._broken) if each is not None}
        late = KafkaError.INVALID_TIMESTAMP in codes or _TOO_OLD in (self._broken.str() if self._broken else "")
        if codes & REFUSALS and not late:
            if self._singly and self._failures.first is not None:
                sent = tuple(message.id for message in self._messages[: self._next - 1])
                return Partly(sent, (Refusal(self._messages[self._next - 1].id, error.str()),))
            return Unsure(f"Kafka refused a message of the batch: {error.str()}", suspect=True)
        return Unsure(f"{error.name()}: {error.str()}", late=late)

    def drop(self) -> None:
        """Forget what is not acknowledged; the producer ends with its last reference."""
        self._forget()
        try:
            # The client takes this argument the wrong way round: with False it waits for every broker's thread, without
            # a limit and with the interpreter's lock, so that every thread of the process stands still.
            self._producer.purge(blocking=True)
            self._producer.flush(CLOSE_S_MAX)
        except (KafkaException, SystemError):
            pass  # it is past use; its end is all that is left
        self._producer.tell()
        self._messages = ()


class KafkaTransactionChannel(KafkaChannel):
    """A batch is one transaction: a newer channel of the topic fences this one.

    The client's calls for a transaction may outlast the time they are given, for ever where the producer failed
    meanwhile. Each runs in a thread of its own, and `wait` returns in time, so that the hold gives signs of life.
    """

    _call: Call | None = None
    _committing = False

    def start(self, messages: Sequence[Relayed], *, timestamp_ms: int) -> None:
        """Begin the transaction; the messages follow from `wait`."""
        self._take(messages, timestamp_ms)
        self._committing = False
        self._call = Call(self._producer.begin_transaction)

    def wait(self, timeout_s: float) -> Outcome | None:
        if self._committing:
            return self._complete(timeout_s)
        if self._call is not None:
            if not self._call.wait(timeout_s):
                return None
            self._broken = self._ended()
            if self._broken is None:
                self._produce(1 if self._singly else len(self._messages))
        return super().wait(timeout_s)

    def _ended(self) -> KafkaError | None:
        """What the call under way, which has ended, failed with."""
        call, self._call = self._call, None
        assert call is not None
        try:
            call.result()
        except (KafkaException, SystemError) as error:
            return fatal_cause(error, self._producer)
        return None

    def _both_told(self) -> bool:
        """A transaction that failed can be aborted, and so is no fatal error: one part is all there is."""
        return True

    def _complete(self, timeout_s: float) -> Outcome | None:
        if self._call is None:
            self._committing = True
            self._call = Call(partial(self._producer.commit_transaction, COMMIT_S))
        if not self._call.wait(timeout_s):
            return None
        failure = self._ended()
        if failure is None:
            return super()._complete(timeout_s)
        if failure.retriable() and not failure.fatal():
            return None
        return Unsure(f"{failure.name()}: {failure.str()}")

    def _failed(self) -> Outcome:
        """An aborted transaction leaves nothing behind, so that a refused message can be told at once."""
        outcome = super()._failed()
        if isinstance(outcome, Partly):
            self._call = Call(partial(self._producer.abort_transaction, END_S_MAX))
            if not self._call.wait(END_S_MAX):
                return Unsure("a transaction could not be aborted in time", suspect=True)
            failure = self._ended()
            if failure is not None:
                return Unsure(f"a transaction could not be aborted: {failure.str()}", suspect=True)
            return Partly((), outcome.refused)
        return outcome

    def drop(self) -> None:
        """Forget what is not acknowledged; a call that is still under way is left to itself."""
        super().drop()
        if self._call is not None:
            self._call.give_up()
            self._call = None
