"""The relay's Kafka producers: their settings, their partitioner, and a client that is closed in the background."""

from __future__ import annotations

import _thread
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer

LOGGER = logging.getLogger("tidebook.outbox")
LINES_MAX = 100
#: Makes the client choose the partition by the key.
ANY_PARTITION = -1
BATCH_BYTES_MAX = 1_000_000
#: The client's maximum for one message.
MESSAGE_BYTES_MAX = 1_000_000_000
#: The bytes that the broker adds for the batch itself.
BATCH_OVERHEAD_BYTES = 1_000
QUEUE_MESSAGES_MAX = 1_000_000
QUEUE_KIB_MAX = 2_000_000
#: No more producers are opened while this many are closing, each in a thread.
CLOSING_MAX = 32
_M = 0x5BD1E995
_SEED = 0x9747B28C
_32 = 0xFFFFFFFF
_FATAL = "Fatal error: "
#: The message that the client logs, with `debug = "eos"`, once an idempotent producer has its id.
_HAS_ID = "-> Assigned"
#: The client's warnings about settings that are intended.
_CONFIG_WARNING = "CONFWARN"


def producer_settings(client: Mapping[str, Any], *, limit_bytes: int, compression: str) -> dict[str, Any]:
    """Return producer settings that keep the order: idempotent, without gaps, and with no per-message timeout."""
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
        # A batch over the topic's limit would fail as a whole, so it never exceeds it.
        "message.max.bytes": min(MESSAGE_BYTES_MAX, max(limit_bytes, BATCH_BYTES_MAX)),
        "batch.size": max(1, min(BATCH_BYTES_MAX, limit_bytes - BATCH_OVERHEAD_BYTES)),
        "queue.buffering.max.messages": QUEUE_MESSAGES_MAX,
        "queue.buffering.max.kbytes": QUEUE_KIB_MAX,
    }


@lru_cache(maxsize=65_536)
def murmur2(data: bytes) -> int:
    """Return the hash used by Kafka's Java client and by librdkafka's `murmur2` partitioners.

    >>> murmur2(b"21") == -973932308 & 0xFFFFFFFF
    True
    """
    length = len(data)
    h = _SEED ^ length
    words = length & ~3
    for at in range(0, words, 4):
        k = int.from_bytes(data[at : at + 4], "little") * _M & _32
        k ^= k >> 24
        h = (h * _M & _32) ^ (k * _M & _32)
    if rest := data[words:]:
        h ^= int.from_bytes(rest, "little")
        h = h * _M & _32
    h ^= h >> 13
    h = h * _M & _32
    return h ^ h >> 15


def choose_partition(partition_key: bytes | None, partitions: int) -> int:
    """Return the partition that Kafka's clients choose for a key; without one, the client uses the message's key."""
    return ANY_PARTITION if partition_key is None else (murmur2(partition_key) & 0x7FFFFFFF) % partitions


class ClientLog:
    """Buffers the client's log lines.

    A producer that logged to itself would be a reference cycle: it would be closed, and wait for its threads, in
    whichever thread next collects garbage.
    """

    def __init__(self) -> None:
        self.lines: deque[tuple[int, tuple[str, ...]]] = deque(maxlen=LINES_MAX)

    def log(self, level: int, format: str, *parts: str) -> None:
        """Buffer a line; the client calls this as a logger's method."""
        self.lines.append((level, parts))


#: Producers that are closing, and abandoned calls.
_closing: set[object] = set()


def closing_count() -> int:
    """Return how many producers are closing, plus how many abandoned client calls have not returned."""
    return len(_closing)


def _close(holder: list[RelayProducer]) -> None:
    """Close a producer by dropping its last reference, which waits for the client's threads and requests."""
    token = object()
    _closing.add(token)
    holder.clear()  # the last reference
    _closing.discard(token)


class ClientCall:
    """A call of the client that may never return, run in a separate thread."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._done = threading.Event()
        self._error: BaseException | None = None
        threading.Thread(target=self._run, args=(call,), name="tidebook-outbox-call", daemon=True).start()

    def _run(self, call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()
            _closing.discard(self)

    def wait(self, timeout_s: float) -> bool:
        """Wait for at most `timeout_s`; return whether the call has ended."""
        return self._done.wait(timeout_s)

    def result(self) -> None:
        """Raise the call's exception, if any."""
        if self._error is not None:
            raise self._error

    def abandon(self) -> None:
        """Abandon the call; it is counted by `closing_count` until it returns."""
        _closing.add(self)
        if self._done.is_set():
            _closing.discard(self)


class RelayProducer(Producer):
    """A producer that records a fatal error from the client's log, and is closed in a separate thread.

    Closing a producer waits for the client's threads, and so for a broker that does not answer: the relay's thread
    would send no heartbeats during that time.

    The client raises a fatal error out of `poll` and `flush`, and runs callbacks while the exception is propagating.
    Every call that they make then fails, a lock that they take is never released, and the error itself is wrapped or
    lost. The client logs the error before that: its lines are buffered, and logged after the call has returned.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.client_log = ClientLog()
        self._fatal = ""
        self._has_id = False
        super().__init__(dict(config), logger=self.client_log)

    def __del__(self) -> None:
        with suppress(RuntimeError):  # the interpreter is shutting down: the producer is closed here
            _thread.start_new_thread(_close, ([self],))

    def fatal(self) -> str:
        """Return the message of the fatal error; empty if there was none."""
        self.log_client_lines()
        return self._fatal

    def has_id(self) -> bool:
        """Return whether the broker has assigned the producer id, needed to send; requires `debug = "eos"`."""
        self.log_client_lines()
        return self._has_id

    def log_client_lines(self) -> None:
        """Log the buffered lines, and note whether they report a fatal error or a producer id."""
        lines = self.client_log.lines
        while lines:
            level, parts = lines.popleft()
            LOGGER.log(logging.DEBUG if parts[0] == _CONFIG_WARNING else level, "outbox: %s", " ".join(parts))
            self._has_id = self._has_id or parts[-1].endswith(_HAS_ID)
            if _FATAL in parts[-1]:
                self._fatal = self._fatal or parts[-1].partition(_FATAL)[2]


def fatal_cause(error: BaseException, producer: RelayProducer) -> KafkaError:
    """Return the Kafka error inside an exception; callbacks may have wrapped a fatal one repeatedly, or lost it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, KafkaException):
            failure: KafkaError = cause.args[0]
            return failure
        cause = cause.__cause__ or cause.__context__
    return KafkaError(KafkaError._FATAL, producer.fatal() or str(error))
