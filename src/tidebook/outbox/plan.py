"""What the relay decides: which messages of a batch go, which are set aside, and how a message looks in the log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from tidebook.log.relay_port import ID_HEADER, SESSION_HEADER, Refusal, Relayed, TargetTopic
from tidebook.outbox.settings import OutboxSettings
from tidebook.sql.port.outbox import Aside, Chosen, SetAside, Waiting, unpack_headers

#: A batch's header, a record's own lengths, and the relay's two headers, at most.
OVERHEAD_BYTES = 61 + 40 + len(SESSION_HEADER) + len(ID_HEADER) + 2 * 24
HEADER_OVERHEAD_BYTES = 10
#: A journal's head remembers its last 16 append ids: what a dead relay sent must still be among them.
APPENDS_AT_ONCE = 8


def order_key(row: Waiting) -> bytes | None:
    """What order is kept by: messages that share it also share a partition."""
    return row.key if row.partition_key is None else row.partition_key


def size_bytes(row: Waiting) -> int:
    """The most that a message can take in the log, uncompressed."""
    size = len(row.payload or b"") + len(row.key or b"") + OVERHEAD_BYTES
    if row.headers:
        size += sum(len(n.encode()) + len(v or b"") + HEADER_OVERHEAD_BYTES for n, v in unpack_headers(row.headers))
    return size


def _surely_goes(row: Waiting, limit_bytes: int) -> bool:
    """A quick look: packed headers take at most four times their bytes."""
    size = OVERHEAD_BYTES + len(row.payload or b"") + len(row.key or b"")
    if row.headers:
        return size + 4 * len(row.headers) <= limit_bytes and readable(row)
    return size <= limit_bytes


def readable(row: Waiting) -> bool:
    """Whether its headers are what `publish` writes: others may have written the row."""
    try:
        unpack_headers(row.headers)
    except (msgspec.MsgspecError, UnicodeError):
        return False
    return True


def refusal(row: Waiting, topic: TargetTopic) -> str | None:
    """Why the log will never take this message, as far as can be told before it is sent."""
    if not readable(row):
        return "its headers are not a MessagePack list of pairs of text and bytes: drop it, or mend the row and retry"
    size = size_bytes(row)
    if size > topic.limit_bytes:
        return (
            f"it takes {size:,} bytes and the topic takes {topic.limit_bytes:,}: raise its max.message.bytes "
            "(and segment.bytes, where that is less) and retry, or drop the message"
        )
    if topic.needs_key and row.key is None:
        return "it has no key and the topic is compacted: Kafka refuses it; drop it, or change the topic and retry"
    return None


def aside(row: Waiting, reason: str, settings: OutboxSettings) -> SetAside:
    """A refused message: tried again later, or parked once it was tried often enough."""
    tries = row.tries + 1
    if tries >= settings.park_after_tries:
        return SetAside(row.id, Aside.PARKED, order_key(row), tries, reason)
    return SetAside(row.id, Aside.RETRYING, order_key(row), tries, reason, round(settings.rest_s * 1000))


def refused(row: Waiting, refusal: Refusal, settings: OutboxSettings) -> SetAside:
    """A message that the log refused; where it may be there nonetheless, nothing tries it again by itself."""
    if refusal.doubtful:
        return SetAside(row.id, Aside.PARKED, order_key(row), row.tries + 1, refusal.reason)
    return aside(row, f"it was refused: {refusal.reason}", settings)


def choose(rows: Sequence[Waiting], held: frozenset[bytes], topic: TargetTopic, settings: OutboxSettings) -> Chosen:
    """Everything goes but what cannot, and what would pass by an earlier message of its own key."""
    if topic.fence == "append_id":
        rows = _few_of_each(rows)
    if not held and not topic.needs_key and all(_surely_goes(row, topic.limit_bytes) for row in rows):
        return Chosen(tuple(rows))
    send: list[Waiting] = []
    off: list[SetAside] = []
    stopped = set(held)
    for row in rows:
        key = order_key(row)
        if key is not None and key in stopped:
            off.append(SetAside(row.id, Aside.HELD, key, row.tries, ""))
            continue
        reason = refusal(row, topic)
        if reason is None:
            send.append(row)
            continue
        refused = aside(row, reason, settings)
        off.append(refused)
        if key is not None and (refused.state is Aside.RETRYING or settings.parked == "hold_key"):
            stopped.add(key)
    return Chosen(tuple(send), tuple(off))


def proven(rows: Sequence[Waiting], found: frozenset[int]) -> frozenset[int]:
    """Rows of one session that were in the log before one that was found there.

    A session is sent in the order of its ids and without gaps, and what shares an order key shares a partition: so a
    row that is missing before one that is found was there, and was compacted away.
    """
    seen: set[bytes] = set()
    before = []
    for row in sorted(rows, key=lambda each: each.id, reverse=True):
        key = order_key(row)
        if key is None:
            continue
        if row.id in found:
            seen.add(key)
        elif key in seen:
            before.append(row.id)
    return frozenset(before)


def _few_of_each(rows: Sequence[Waiting]) -> list[Waiting]:
    """A journal's head remembers few appends: the others of its key wait for the next batch."""
    counts: Counter[bytes | None] = Counter()
    few = []
    for row in rows:
        counts[row.key] += 1
        if counts[row.key] <= APPENDS_AT_ONCE:
            few.append(row)
    return few


def relayed(rows: Sequence[Waiting], *, session: bytes, outbox: bytes) -> list[Relayed]:
    """Messages with two identities: the session's, by which a scan finds them, and the outbox's, for consumers."""
    made = []
    for row in rows:
        id = row.id.to_bytes(8, "big")
        headers: list[tuple[str, str | bytes | None]] = [(SESSION_HEADER, session + id), (ID_HEADER, outbox + id)]
        if row.headers:
            headers += unpack_headers(row.headers)
        made.append(Relayed(row.id, row.key, row.partition_key, row.payload, headers))
    return made
