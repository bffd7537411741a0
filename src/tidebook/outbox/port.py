"""The port between the relay and the outbox's database. All times are by the database's clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum, StrEnum
from typing import Literal, Protocol

import msgspec

#: The version of the tables, in `kafka_outbox.version`.
VERSION = 1
#: MySQL: the number of rows of `kafka_order_lock`, over which `ordered=True` spreads its locks.
ORDER_SLOTS = 256

Headers = tuple[tuple[str, bytes | None], ...]

_encode_headers = msgspec.msgpack.Encoder().encode
_decode_headers = msgspec.msgpack.Decoder(Headers).decode


def pack_headers(headers: Headers) -> bytes | None:
    """Return headers as the column stores them: a MessagePack list of pairs, or NULL for none."""
    return _encode_headers(headers) if headers else None


def unpack_headers(packed: bytes | None) -> Headers:
    """Return the headers of a stored column; the inverse of `pack_headers`."""
    return _decode_headers(packed) if packed else ()


class Publishable(Protocol):
    """A message to be published."""

    @property
    def topic(self) -> str: ...
    @property
    def key(self) -> bytes | None: ...
    @property
    def partition_key(self) -> bytes | None: ...
    @property
    def payload(self) -> bytes | None: ...
    @property
    def headers(self) -> Headers: ...


class WaitingMessage(msgspec.Struct, frozen=True, gc=False):
    """A row of `kafka_messages`."""

    id: int
    key: bytes | None
    partition_key: bytes | None
    payload: bytes | None
    headers: bytes | None
    tries: int = 0


class ParkedState(IntEnum):
    """Why a message is in `kafka_parked`."""

    #: An earlier message of its key is parked or retrying.
    HELD = 0
    #: It was refused and is retried at `retry_at`.
    RETRYING = 1
    #: It was refused for good: an operator has to retry or drop it.
    PARKED = 2


class ParkingDecision(msgspec.Struct, frozen=True, gc=False):
    """The decision to move one message to `kafka_parked`."""

    id: int
    state: ParkedState
    order_key: bytes | None
    tries: int
    reason: str
    retry_ms: int | None = None


class BatchSelection(msgspec.Struct, frozen=True):
    """The rows of a batch to send, in order, and those to park. Rows in neither wait for the next batch."""

    send: tuple[WaitingMessage, ...]
    park: tuple[ParkingDecision, ...] = ()


#: Selects from rows, given the order keys that are held; called inside the transaction that opens the session.
SelectBatch = Callable[[Sequence[WaitingMessage], frozenset[bytes]], BatchSelection]


class RelaySession(msgspec.Struct, frozen=True):
    """A session that was opened and not closed: some of its messages may be in the log."""

    uuid: bytes
    ids: tuple[int, ...]
    age_ms: int
    fence: str
    topic_uuid: str | None
    scan_from: dict[int, int]


class NoticeCause(StrEnum):
    """Why messages of a topic may be sent more than once."""

    #: No fence is in force. The notice is cleared once one is.
    WEAK = "weak"
    #: Which messages an open session sent can no longer be determined. The notice stays.
    LOST = "lost"


class Notice(msgspec.Struct, frozen=True):
    """A topic's notice that exactly once does not hold, as `kafka_topic_info` stores it."""

    cause: NoticeCause
    text: str


class TopicLock(msgspec.Struct, frozen=True):
    """A topic's lock, as one relay thread holds it, with the topic's state when the lock was taken."""

    topic: str
    uuid: bytes
    owner: str
    previous_owner: str | None
    open_session: RelaySession | None
    notice: Notice | None = None


class NewSession(msgspec.Struct, frozen=True):
    """The identity and fence of a session that is about to be opened."""

    uuid: bytes
    fence: str
    topic_uuid: str
    #: The end offset of each partition, if they were fetched: the session's messages are at or after them.
    ends: Mapping[int, int] | None = None


class SentIds(msgspec.Struct, frozen=True):
    """The ids, in increasing order, of messages that are in the log for certain."""

    ids: Sequence[int]


class MessageBatch(msgspec.Struct, frozen=True):
    """An open session: its messages, when it was opened, and whether more rows may be waiting."""

    session: bytes
    messages: tuple[WaitingMessage, ...]
    opened_ms: int
    more: bool
    parked_count: int = 0


class BatchLimit(msgspec.Struct, frozen=True):
    """The most that one batch takes; it takes at least one message."""

    rows: int = 1000
    size_bytes: int = 16_000_000


class OutboxTopicStatus(msgspec.Struct, frozen=True):
    """The state of one topic: waiting messages, the relay that holds its lock, and errors."""

    topic: str
    #: Counted up to a limit; `waiting_is_bound` says whether the limit was reached.
    waiting: int
    waiting_is_bound: bool
    #: The age of the oldest message, including held and retrying ones; None if there is none.
    oldest_age_ms: int | None
    locked_by: str | None
    locked_age_ms: int | None
    error: bool
    retries: int
    retry_in_ms: int | None
    reason: str | None
    #: Why messages may be, or may have been, sent more than once; None while delivery is exactly once.
    notice: str | None
    notice_cause: NoticeCause | None
    notice_age_ms: int | None
    dirty: bool
    relayed: int
    #: Approximately how many of them in the last 60 seconds.
    per_minute: int
    parked: int
    held: int


class ParkedMessage(msgspec.Struct, frozen=True):
    """A message in `kafka_parked`, without its payload."""

    topic: str
    id: int
    state: Literal["parked", "retrying", "held"]
    key: bytes | None
    size_bytes: int
    tries: int
    age_ms: int
    parked_age_ms: int
    reason: str


class OutboxStore(Protocol):
    """One connection, used by one thread. Raises Unavailable on failure, and Fenced if the topic's lock is lost."""

    def identity(self) -> bytes:
        """Return the outbox's uuid, 16 bytes."""
        ...

    def create_tables(self) -> None:
        """Create the missing tables."""
        ...

    def publish(self, messages: Sequence[Publishable], *, ordered: bool) -> None:
        """Publish the messages in a separate transaction."""
        ...

    def topics_waiting(self) -> list[str]:
        """Return the topics with messages to relay that are neither locked nor resting."""
        ...

    def try_lock(self, topic: str, *, lock_id: bytes, owner: str, retake: bytes | None = None) -> TopicLock | None:
        """Lock the topic and return the lock; None if another relay holds it.

        `retake` is the id of an earlier lock of this relay whose outcome is unknown: it is taken over.
        """
        ...

    def heartbeat(self, lock: TopicLock) -> None:
        """Renew the lock; raise Fenced if it is lost."""
        ...

    def begin(
        self, lock: TopicLock, session: NewSession, select: SelectBatch, limit: BatchLimit, sent: SentIds | None = None
    ) -> MessageBatch:
        """Delete the sent messages and open the next session, in one durable transaction.

        If there is nothing to send, the session is not opened and the batch is empty. Raise Fenced if the lock is lost.
        """
        ...

    def finish(self, lock: TopicLock, sent: SentIds, *, unlock: bool) -> None:
        """Delete the sent messages and close the session; raise Fenced if the lock is lost."""
        ...

    def open_rows(self, lock: TopicLock, session: RelaySession) -> tuple[WaitingMessage, ...]:
        """Return the rows of an open session that still wait, by id; raise Fenced if the lock is lost."""
        ...

    def delete_sent(self, lock: TopicLock, sent: SentIds) -> None:
        """Delete the sent messages and leave the session open for the others; raise Fenced if the lock is lost."""
        ...

    def park(self, lock: TopicLock, decisions: Sequence[ParkingDecision]) -> None:
        """Park messages of which nothing is in the log; raise Fenced if the lock is lost."""
        ...

    def unlock(self, lock: TopicLock) -> None:
        """Release the lock without an error; an open session stays open. Do nothing if the lock is lost."""
        ...

    def rest(self, lock: TopicLock, *, reason: str, rest_ms: int, failed: bool = True) -> None:
        """Release the lock and let no relay take the topic for `rest_ms`; `failed` counts a retry.

        Do nothing if the lock is lost.
        """
        ...

    def notice(self, topic: str, notice: Notice | None) -> None:
        """Store why exactly once does not hold for the topic; None clears it."""
        ...

    def status(self, *, count_max: int) -> list[OutboxTopicStatus]:
        """Return the status of every topic that has waiting messages or was ever relayed."""
        ...

    def parked(self, topic: str | None, *, limit: int) -> list[ParkedMessage]:
        """Return the messages in `kafka_parked`, by topic and id."""
        ...

    def parked_retry(self, topic: str, id: int | None) -> int:
        """Move parked messages (all of the topic, or one) and those held by them back to `kafka_messages`.

        Return how many parked ones were moved.
        """
        ...

    def parked_drop(self, topic: str, id: int | None) -> int:
        """Delete parked messages and move those held by them back; return how many were deleted."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


class OutboxListener(Protocol):
    """Wakes a relay after a commit, on databases that can notify."""

    def asleep(self, relay: bytes, seconds: float) -> None:
        """Ask publishers to notify this relay for so many seconds; 0 withdraws the request."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Wait for a notification; return False on timeout."""
        ...

    def close(self) -> None:
        """Stop listening."""
        ...


class OutboxDatabase(Protocol):
    """Opens connections, one per thread."""

    def connect(self) -> OutboxStore:
        """Open a connection for the calling thread."""
        ...

    def listen(self) -> OutboxListener | None:
        """Open a listener; None if the database cannot notify and the relay has to poll."""
        ...
