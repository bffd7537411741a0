"""Scan a Kafka topic for the messages of one session."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from tidebook.core.errors import Unavailable
from tidebook.core.record import is_record
from tidebook.kafka.errors import TRANSIENT
from tidebook.outbox.port import FoundMessages, Scan, refuse_journals

READ_MAX = 1000
STEP_S = 0.2
#: How many offsets before the end one of the last records is looked for: offsets have gaps.
LOOK_BACK_OFFSETS = 100
#: librdkafka's offset for n records before the end is this value minus n.
_TAIL = -2000
#: How long a scan may make no progress: another producer's open transaction may hide what follows it.
STALL_S_MAX = 10.0


def scan_settings(client: Mapping[str, Any], *, committed: bool) -> dict[str, Any]:
    """Return the settings of a consumer that is assigned partitions and stops at a lost offset.

    With `committed`, aborted transactions are skipped. Without it everything is read: another producer's open
    transaction would otherwise hide what follows it for as long as it lasts.
    """
    return {
        **client,
        "group.id": "tidebook-outbox-scan",  # required by the client; nothing is committed
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "enable.partition.eof": True,
        "auto.offset.reset": "error",
        "isolation.level": "read_committed" if committed else "read_uncommitted",
        "fetch.wait.max.ms": 100,
    }


def scan_range(
    client: Mapping[str, Any],
    topic: str,
    scan: Scan,
    *,
    starts: Mapping[int, int],
    ends: Mapping[int, int],
    on_step: Callable[[], None],
) -> FoundMessages:
    """Scan from `scan_from` (or the log's start) up to `ends`; stop early once all messages are found."""
    positions = {p: max(scan.scan_from.get(p, 0), start) for p, start in starts.items()}
    truncated = sorted(p for p, start in starts.items() if scan.scan_from.get(p, start) < start)
    lost = f"the log of partition {truncated[0]} now starts after the session's first offset" if truncated else None
    remaining = {p: end for p, end in ends.items() if positions[p] < end}
    found: set[int] = set()
    gaps = False
    if not remaining:
        return FoundMessages(frozenset(), lost)
    try:
        consumer = Consumer(scan_settings(client, committed=scan.committed))
    except KafkaException as refused:
        raise Unavailable(f"reading topic {topic!r}: {refused}") from refused
    progress_at = time.monotonic()
    try:
        consumer.assign([TopicPartition(topic, p, positions[p]) for p in remaining])
        while remaining and len(found) < len(scan.ids):
            on_step()
            first = consumer.poll(STEP_S)  # `consume` with a timeout would wait for READ_MAX messages
            read: list[Any] = [] if first is None else [first, *consumer.consume(READ_MAX - 1, 0)]
            if time.monotonic() > progress_at + STALL_S_MAX:
                raise _stalled(topic, positions, remaining)
            for message in read:
                error = message.error()
                partition = message.partition()
                gaps = gaps or message.offset() > positions[partition]
                if error is None:
                    if (id := scan.id_in(message.headers())) is not None:
                        found.add(id)
                    position = message.offset() + 1
                elif error.code() == KafkaError._PARTITION_EOF:
                    position = message.offset()
                else:
                    raise Unavailable(f"reading topic {topic!r}: {error.str()}")
                if position > positions[partition]:
                    positions[partition], progress_at = position, time.monotonic()
                if partition in remaining and position >= remaining[partition]:
                    del remaining[partition]
    except KafkaException as error:
        raise Unavailable(f"reading topic {topic!r}: {error}") from error
    finally:
        consumer.close()
    return FoundMessages(frozenset(found), lost if len(found) < len(scan.ids) else None, gaps)


def _stalled(topic: str, positions: Mapping[int, int], remaining: Mapping[int, int]) -> Unavailable:
    places = ", ".join(f"partition {p} at {positions[p]} of {end}" for p, end in sorted(remaining.items()))
    return Unavailable(
        f"topic {topic!r} cannot be read to its end ({places}): Kafka does not answer, or a transaction that is still "
        "open hides what follows it"
    )


def refuse_journal_topic(client: Mapping[str, Any], topic: str, partitions: int) -> None:
    """Raise InvalidInput if one of the topic's last records belongs to a journal; an empty topic is accepted."""
    remaining = set(range(partitions))
    try:
        # A truncated log may hold fewer records than that: its first record serves as well.
        consumer = Consumer(scan_settings(client, committed=False) | {"auto.offset.reset": "earliest"})
    except KafkaException as refused:
        raise Unavailable(f"reading topic {topic!r}: {refused}") from refused
    deadline = time.monotonic() + STALL_S_MAX
    try:
        consumer.assign([TopicPartition(topic, p, _TAIL - LOOK_BACK_OFFSETS) for p in remaining])
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
                raise Unavailable(f"reading topic {topic!r}: {error.str()}")
    except KafkaException as error:
        raise Unavailable(f"reading topic {topic!r}: {error}") from error
    finally:
        consumer.close()
    if remaining:
        raise Unavailable(f"topic {topic!r} cannot be read to its end: Kafka does not answer")
