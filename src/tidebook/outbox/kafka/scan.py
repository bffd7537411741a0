"""Read a Kafka topic: scan it for the messages of one session, and check whether it holds journals."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from tidebook.core.errors import Unavailable
from tidebook.core.record import is_record
from tidebook.kafka.errors import TRANSIENT
from tidebook.outbox.fence import Fence
from tidebook.outbox.port import FoundMessages, RelaySession, refuse_journals

READ_MAX = 1000
STEP_S = 0.2
#: The search for the last record begins this many offsets before the end, because offsets have gaps.
LOOK_BACK_OFFSETS = 100
#: librdkafka's offset for n records before the end is this value minus n.
_TAIL = -2000
#: For how long a scan may make no progress: another producer's open transaction hides the records after it.
STALL_S_MAX = 10.0


@contextmanager
def open_consumer(client: Mapping[str, Any], positions: list[TopicPartition], **settings: str) -> Iterator[Consumer]:
    """Open a consumer that is assigned these positions; raise Unavailable if Kafka's client fails."""
    topic = positions[0].topic
    config = {
        **client,
        "group.id": "tidebook-outbox-scan",  # required by the client; nothing is committed
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "enable.partition.eof": True,
        "auto.offset.reset": "error",
        "fetch.wait.max.ms": 100,
    }
    try:
        consumer = Consumer(config | {name.replace("_", "."): value for name, value in settings.items()})
        try:
            consumer.assign(positions)
            yield consumer
        finally:
            consumer.close()
    except KafkaException as error:
        raise Unavailable(f"topic {topic!r} cannot be read: {error}") from error


def scan_range(
    client: Mapping[str, Any],
    topic: str,
    session: RelaySession,
    *,
    starts: Mapping[int, int],
    ends: Mapping[int, int],
    on_step: Callable[[], None],
) -> FoundMessages:
    """Scan from `scan_from` (or the log's start) up to `ends`; stop early once all messages are found."""
    positions = {p: max(session.scan_from.get(p, 0), start) for p, start in starts.items()}
    truncated = sorted(p for p, start in starts.items() if session.scan_from.get(p, start) < start)
    lost = f"the log of partition {truncated[0]} now starts after the session's first offset" if truncated else None
    remaining = {p: end for p, end in ends.items() if positions[p] < end}
    if not remaining:
        return FoundMessages(frozenset(), lost)
    found: set[int] = set()
    gaps = False
    # A transaction that was aborted is skipped. Without transactions everything is read: another producer's open
    # transaction would otherwise hide the records after it for as long as it is open.
    isolation = "read_committed" if session.fence is Fence.TRANSACTION else "read_uncommitted"
    assigned = [TopicPartition(topic, p, positions[p]) for p in remaining]
    progress_at = time.monotonic()
    with open_consumer(client, assigned, isolation_level=isolation) as consumer:
        while remaining and len(found) < len(session.ids):
            on_step()
            first = consumer.poll(STEP_S)  # `consume` with a timeout would wait for READ_MAX messages
            read: list[Any] = [] if first is None else [first, *consumer.consume(READ_MAX - 1, 0)]
            if time.monotonic() > progress_at + STALL_S_MAX:
                places = ", ".join(f"partition {p} at {positions[p]} of {end}" for p, end in sorted(remaining.items()))
                raise Unavailable(
                    f"topic {topic!r} cannot be read to its end ({places}): Kafka does not answer, or a transaction "
                    "that is still open hides what follows it"
                )
            for message in read:
                error = message.error()
                partition = message.partition()
                gaps = gaps or message.offset() > positions[partition]
                if error is None:
                    if (id := session.id_in(message.headers())) is not None:
                        found.add(id)
                    position = message.offset() + 1
                elif error.code() == KafkaError._PARTITION_EOF:
                    position = message.offset()
                else:
                    raise Unavailable(f"topic {topic!r} cannot be read: {error.str()}")
                if position > positions[partition]:
                    positions[partition], progress_at = position, time.monotonic()
                if partition in remaining and position >= remaining[partition]:
                    del remaining[partition]
    return FoundMessages(frozenset(found), lost if len(found) < len(session.ids) else None, gaps)


def refuse_journal_topic(client: Mapping[str, Any], topic: str, partitions: int) -> None:
    """Raise InvalidInput if one of the topic's last records belongs to a journal; an empty topic is accepted."""
    remaining = set(range(partitions))
    deadline = time.monotonic() + STALL_S_MAX
    assigned = [TopicPartition(topic, p, _TAIL - LOOK_BACK_OFFSETS) for p in remaining]
    # A truncated log may hold fewer records than that; then reading starts at its first record.
    with open_consumer(client, assigned, isolation_level="read_uncommitted", auto_offset_reset="earliest") as consumer:
        while remaining and time.monotonic() < deadline:
            message = consumer.poll(STEP_S)
            if message is None:
                continue
            error = message.error()
            if error is None:
                if is_record(message.value()):
                    raise refuse_journals(topic)
                return
            if error.code() == KafkaError._PARTITION_EOF:
                remaining.discard(message.partition() or 0)  # the partition is empty, or has only transaction markers
            elif error.code() not in TRANSIENT:
                raise Unavailable(f"topic {topic!r} cannot be read: {error.str()}")
    if remaining:
        raise Unavailable(f"topic {topic!r} cannot be read to its end: Kafka does not answer")
