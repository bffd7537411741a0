"""The values that the relay, the outbox's database and the relay's targets exchange, and the port of a target.

The database's side of the relay is `OutboxStore` in `store.py`. All times are by the database's clock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum, StrEnum
from typing import Any, Literal, Protocol

import msgspec

from tidebook.core.errors import InvalidInput
from tidebook.outbox.fence import Fence

# ---- the database's side


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
    #: It was refused permanently: an operator has to retry or drop it.
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
    ids: frozenset[int]
    age_ms: int
    fence: Fence
    topic_uuid: str | None
    #: The end offset of each partition before the session was opened: a scan starts there.
    scan_from: Mapping[int, int]

    def id_in(self, headers: Iterable[tuple[str, Any]] | None) -> int | None:
        """Return the row id of a record with these headers, if it is one of the session's messages."""
        for name, value in headers or ():
            if name == SESSION_HEADER and value is not None and value[:16] == self.uuid:
                id = int.from_bytes(value[16:24], "big")
                return id if id in self.ids else None
        return None


class NoticeCause(StrEnum):
    """Why messages of a topic may be sent more than once."""

    #: No fence is in force. The notice is cleared once one is.
    WEAK = "weak"
    #: It can no longer be determined which messages an open session sent. The notice remains.
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
    fence: Fence
    topic_uuid: str
    #: The end offset of each partition, if they were fetched: the session's messages are at or after them.
    ends: Mapping[int, int] | None = None


class MessageBatch(msgspec.Struct, frozen=True):
    """The messages of a session that was just opened, the time of its opening, and whether more rows may be waiting."""

    session: bytes
    messages: tuple[WaitingMessage, ...]
    opened_ms: int
    more: bool
    parked_count: int = 0


class BatchLimit(msgspec.Struct, frozen=True):
    """The limits of one batch; it always takes at least one message."""

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
    #: Whether a session is open.
    dirty: bool
    relayed: int
    #: Approximately how many messages were relayed in the last 60 seconds.
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


# ---- the target

#: 16 bytes of session uuid and 8 bytes of row id: a scan recognizes the session's messages by it.
SESSION_HEADER = "tidebook-session"
#: 16 bytes of outbox uuid and 8 bytes of row id: consumers recognize duplicates by it.
ID_HEADER = "tidebook-id"


def refuse_journals(topic: str) -> InvalidInput:
    """Return the error for publishing to a topic that holds journals: messages would damage them."""
    return InvalidInput(
        f"topic {topic!r} holds journals, and an outbox's messages would damage them: publish to another topic, or "
        "append to its journals with book.outbox.append"
    )


class RelayedMessage(msgspec.Struct, frozen=True, gc=False):
    """A message as it is sent to the log, with the relay's headers."""

    id: int
    key: bytes | None
    partition_key: bytes | None
    value: bytes | None
    headers: list[tuple[str, str | bytes | None]]


class TargetTopic(msgspec.Struct, frozen=True):
    """A topic's identity, limits and fence, as the log reports them now."""

    topic: str
    #: Identifies this incarnation of the topic.
    uuid: str
    partitions: int
    #: The maximum size of one message, including its key, headers and overhead.
    limit_bytes: int
    #: Whether a message without a key is refused, because the topic is compacted.
    needs_key: bool
    #: The fence in force.
    fence: Fence
    #: `Fence.TIMESTAMP`: for how long after a session was opened the log accepts its messages.
    fence_ms: int
    #: Why a relay that was paused may send a message twice; None if it cannot.
    weak: str | None = None


class BatchSent(msgspec.Struct, frozen=True):
    """The whole batch is in the log."""


class BatchRefused(msgspec.Struct, frozen=True):
    """A message that the log will never accept. `doubtful`: it may be there already; an operator has to check."""

    id: int
    reason: str
    doubtful: bool = False


class BatchPartlySent(msgspec.Struct, frozen=True):
    """Only the messages `sent` are in the log. The others, unless refused, can be sent again immediately."""

    sent: tuple[int, ...]
    refused: tuple[BatchRefused, ...] = ()


class BatchOutcomeUnknown(msgspec.Struct, frozen=True):
    """The messages `sent` are in the log; only a scan can determine whether the others are."""

    reason: str
    #: The log refused the batch as too old.
    late: bool = False
    #: One message was refused and it is not known which: send them one by one the next time.
    suspect: bool = False
    sent: tuple[int, ...] = ()


Outcome = BatchSent | BatchPartlySent | BatchOutcomeUnknown


class Channel(Protocol):
    """Sends one batch at a time. After any outcome except `BatchSent` it is dropped and another one is opened."""

    def start(self, messages: Sequence[RelayedMessage], *, timestamp_ms: int) -> None:
        """Start sending a batch, in order."""

    def wait(self, timeout_s: float) -> Outcome | None:
        """Wait for the outcome; return None on timeout."""

    def drop(self) -> None:
        """Discard the messages that are not acknowledged, and close."""


class FoundMessages(msgspec.Struct, frozen=True):
    """Which messages of a session are in the log; `lost` says why others may have been deleted from it."""

    ids: frozenset[int]
    lost: str | None = None
    #: Some offsets have no record: messages may have been compacted away, or they are transaction markers.
    gaps: bool = False


class RelayTarget(ABC):
    """A log, shared by all threads of a relay. Raises Unavailable on failure and NotFound for a missing topic."""

    @abstractmethod
    def topic(self, topic: str, *, fresh: bool = False) -> TargetTopic:
        """Return the topic, configured for the fence; cached for a while unless `fresh`."""

    @abstractmethod
    def ends(self, topic: TargetTopic, *, fresh: bool = False) -> dict[int, int]:
        """Return offsets at or before those that the next messages get; cached for a moment unless `fresh`."""

    @abstractmethod
    def channel(self, topic: TargetTopic, *, fresh: bool, singly: bool = False) -> Channel:
        """Return this thread's channel to the topic. A `fresh` transactional one has fenced every older one."""

    @abstractmethod
    def scan(self, topic: TargetTopic, session: RelaySession, on_step: Callable[[], None]) -> FoundMessages:
        """Read the log up to its current end and return the session's messages; `on_step` may raise to stop it.

        With `Fence.APPEND_ID` nothing is read: the caller sends the same session again instead.
        """

    def of(self, topic: str) -> RelayTarget:
        """Return this target: it is the only one of its relay."""
        return self

    def release(self, topic: str) -> None:  # noqa: B027 - most targets hold nothing for a topic
        """Release the resources that the calling thread holds for the topic."""

    def maintain(self) -> None:  # noqa: B027 - most targets keep no connection open
        """Serve the connections that the calling thread keeps open; called about once a second, between topics."""

    def close(self) -> None:  # noqa: B027 - most targets belong to the caller
        """Close the target."""


class RelayTargets(Protocol):
    """The targets of a relay's topics: `of` returns the target of one topic; the other methods apply to all."""

    def of(self, topic: str) -> RelayTarget: ...
    def maintain(self) -> None: ...
    def close(self) -> None: ...
