"""Reading a topic for the messages of one session."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from tidebook.core.errors import Unavailable
from tidebook.log.relay_port import SESSION_HEADER, Found, Scan

READ_MAX = 1000
STEP_S = 0.2
#: How long a scan may stand still: a transaction of somebody else's may hide what lies behind it.
STILL_S_MAX = 10.0


def scan_settings(client: Mapping[str, Any], *, committed: bool) -> dict[str, Any]:
    """By assignment, and never past a lost offset.

    `committed`: of transactions, those that were committed. Else everything: somebody else's transaction that is left
    open would hide what follows it for as long as it lasts.
    """
    return {
        **client,
        "group.id": "tidebook-outbox-scan",  # the client insists on one; nothing is committed
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
) -> Found:
    """Look through `scan_from` (or the log's start) up to `ends`; stops early when all are found."""
    at = {p: max(scan.scan_from.get(p, 0), start) for p, start in starts.items()}
    gone = sorted(p for p, start in starts.items() if scan.scan_from.get(p, start) < start)
    lost = f"the log of partition {gone[0]} now begins behind the session's first offset" if gone else None
    left = {p: end for p, end in ends.items() if at[p] < end}
    found: set[int] = set()
    holes = False
    if not left:
        return Found(frozenset(), lost)
    try:
        consumer = Consumer(scan_settings(client, committed=scan.committed))
    except KafkaException as refused:
        raise Unavailable(f"reading topic {topic!r}: {refused}") from refused
    moved_at = time.monotonic()
    try:
        consumer.assign([TopicPartition(topic, p, at[p]) for p in left])
        while left and len(found) < len(scan.ids):
            on_step()
            first = consumer.poll(STEP_S)  # a `consume` with a timeout would wait for READ_MAX of them
            read: list[Any] = [] if first is None else [first, *consumer.consume(READ_MAX - 1, 0)]
            if time.monotonic() > moved_at + STILL_S_MAX:
                raise _standing_still(topic, at, left)
            for message in read:
                error = message.error()
                partition = message.partition()
                holes = holes or message.offset() > at[partition]
                if error is None:
                    _look(message, scan, found)
                    position = message.offset() + 1
                elif error.code() == KafkaError._PARTITION_EOF:
                    position = message.offset()
                else:
                    raise Unavailable(f"reading topic {topic!r}: {error.str()}")
                if position > at[partition]:
                    at[partition], moved_at = position, time.monotonic()
                if partition in left and position >= left[partition]:
                    del left[partition]
    except KafkaException as error:
        raise Unavailable(f"reading topic {topic!r}: {error}") from error
    finally:
        consumer.close()
    return Found(frozenset(found), lost if len(found) < len(scan.ids) else None, holes)


def _standing_still(topic: str, at: Mapping[int, int], left: Mapping[int, int]) -> Unavailable:
    places = ", ".join(f"partition {p} at {at[p]} of {end}" for p, end in sorted(left.items()))
    return Unavailable(
        f"topic {topic!r} cannot be read to its end ({places}): Kafka does not answer, or a transaction that is still "
        "open hides what follows it"
    )


def _look(message: Any, scan: Scan, found: set[int]) -> None:
    for name, value in message.headers() or ():
        if name == SESSION_HEADER and value is not None and value[:16] == scan.session:
            id = int.from_bytes(value[16:24], "big")
            if id in scan.ids:
                found.add(id)
