"""Select the messages of a batch: which are sent, which are parked, and with which headers they are sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from tidebook.outbox.fence import Fence
from tidebook.outbox.message import order_key, unpack_headers
from tidebook.outbox.port import (
    ID_HEADER,
    SESSION_HEADER,
    BatchRefused,
    BatchSelection,
    ParkedState,
    ParkingDecision,
    RelayedMessage,
    TargetTopic,
    WaitingMessage,
)
from tidebook.outbox.settings import OutboxSettings

#: Upper bound of the batch header, the record's length fields and the relay's two headers.
OVERHEAD_BYTES = 61 + 40 + len(SESSION_HEADER) + len(ID_HEADER) + 2 * 24
HEADER_OVERHEAD_BYTES = 10
#: A journal's head remembers its last 16 append ids: those that a dead relay sent must still be among them.
APPENDS_PER_JOURNAL_MAX = 8


def size_bytes(row: WaitingMessage) -> int:
    """Return the largest size that a message can have in the log, uncompressed."""
    size = len(row.payload or b"") + len(row.key or b"") + OVERHEAD_BYTES
    if row.headers:
        size += sum(len(n.encode()) + len(v or b"") + HEADER_OVERHEAD_BYTES for n, v in unpack_headers(row.headers))
    return size


def refusal_reason(row: WaitingMessage, topic: TargetTopic) -> str | None:
    """Return why the log would refuse this message, as far as is known before sending; None if it may accept it."""
    try:
        size = size_bytes(row)
    except (msgspec.MsgspecError, UnicodeError):  # the row may have been written by other software than `publish`
        return "its headers are not a MessagePack list of pairs of text and bytes: drop it, or repair the row and retry"
    if size > topic.limit_bytes:
        return (
            f"it takes {size:,} bytes and the topic allows {topic.limit_bytes:,}: raise its max.message.bytes "
            "(and segment.bytes, where that is less) and retry, or drop the message"
        )
    if topic.needs_key and row.key is None:
        return "it has no key and the topic is compacted: Kafka refuses it; drop it, or change the topic and retry"
    return None


def park_or_retry(row: WaitingMessage, reason: str, settings: OutboxSettings) -> ParkingDecision:
    """Return the decision for a refused message: retry it later, or park it after the last attempt."""
    tries = row.tries + 1
    if tries >= settings.park_after_tries:
        return ParkingDecision(row.id, ParkedState.PARKED, order_key(row), tries, reason)
    return ParkingDecision(row.id, ParkedState.RETRYING, order_key(row), tries, reason, round(settings.rest_s * 1000))


def park_refused(row: WaitingMessage, refusal: BatchRefused, settings: OutboxSettings) -> ParkingDecision:
    """Return the decision for a message that the log refused; a doubtful one is never retried automatically."""
    if refusal.doubtful:
        return ParkingDecision(row.id, ParkedState.PARKED, order_key(row), row.tries + 1, refusal.reason)
    return park_or_retry(row, f"it was refused: {refusal.reason}", settings)


def select_batch(
    rows: Sequence[WaitingMessage], held: frozenset[bytes], topic: TargetTopic, settings: OutboxSettings
) -> BatchSelection:
    """Select the messages that can be sent; park the others, keeping the order of each key."""
    send: list[WaitingMessage] = []
    park: list[ParkingDecision] = []
    held_keys = set(held)
    appends: Counter[bytes | None] = Counter()
    for row in rows:
        key = order_key(row)
        if topic.fence is Fence.APPEND_ID:
            appends[key] += 1
            if appends[key] > APPENDS_PER_JOURNAL_MAX:
                continue  # it waits for the next batch
        if key is not None and key in held_keys:
            park.append(ParkingDecision(row.id, ParkedState.HELD, key, row.tries, ""))
            continue
        reason = refusal_reason(row, topic)
        if reason is None:
            send.append(row)
            continue
        decision = park_or_retry(row, reason, settings)
        park.append(decision)
        if key is not None and (decision.state is ParkedState.RETRYING or settings.parked == "hold_key"):
            held_keys.add(key)
    return BatchSelection(tuple(send), tuple(park))


def compacted_away(rows: Sequence[WaitingMessage], found: frozenset[int]) -> frozenset[int]:
    """Return the ids of a session's rows that were sent and then compacted away.

    A session is sent in the order of its ids and without gaps, and messages of one order key share a partition. So a
    row that is missing was sent if a later one of its order key is found.
    """
    found_keys: set[bytes] = set()
    compacted = []
    for row in sorted(rows, key=lambda each: each.id, reverse=True):
        key = order_key(row)
        if key is None:
            continue
        if row.id in found:
            found_keys.add(key)
        elif key in found_keys:
            compacted.append(row.id)
    return frozenset(compacted)


def to_relayed(rows: Sequence[WaitingMessage], *, session: bytes, outbox: bytes) -> list[RelayedMessage]:
    """Return messages with two headers: the session's id for scans, and the outbox's id for consumers."""
    messages = []
    for row in rows:
        id = row.id.to_bytes(8, "big")
        headers: list[tuple[str, str | bytes | None]] = [(SESSION_HEADER, session + id), (ID_HEADER, outbox + id)]
        if row.headers:
            headers += unpack_headers(row.headers)
        messages.append(RelayedMessage(row.id, row.key, row.partition_key, row.payload, headers))
    return messages
