"""The port between the relay and a log: send in order, fence a late sender, and find what was sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

import msgspec

from tidebook.core.errors import InvalidInput

#: 16 bytes of session uuid and 8 bytes of row id: a scan recognises the session's messages by it.
SESSION_HEADER = "tidebook-session"
#: 16 bytes of outbox uuid and 8 bytes of row id: consumers recognise duplicates by it.
ID_HEADER = "tidebook-id"

#: How a late sender is fenced. `lock`: by the embedded log's file lock, which a stopped process keeps. `append_id`:
#: it is not, but a journal applies each append id once.
Fence = Literal["timestamp", "transaction", "none", "lock", "append_id"]


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
    #: The most that one message may take, with its key, headers and overhead.
    limit_bytes: int
    #: The topic is compacted, so a message without a key is refused.
    needs_key: bool
    #: The fence in force.
    fence: Fence
    #: `timestamp`: for how long after a session was opened the log accepts its messages.
    fence_ms: int
    #: Why a message may be sent twice after a pause; None if it cannot.
    weak: str | None = None


class BatchSent(msgspec.Struct, frozen=True):
    """The whole batch is in the log."""


class BatchRefused(msgspec.Struct, frozen=True):
    """A message that the log will never accept. `doubtful`: it may be there already; an operator has to check."""

    id: int
    reason: str
    doubtful: bool = False


class BatchPartlySent(msgspec.Struct, frozen=True):
    """Exactly `sent` of the batch is in the log. The others, unless refused, can be sent again immediately."""

    sent: tuple[int, ...]
    refused: tuple[BatchRefused, ...] = ()


class BatchOutcomeUnknown(msgspec.Struct, frozen=True):
    """`sent` is in the log; whether the other messages are can only be determined by a scan."""

    reason: str
    #: The log refused the batch as too old.
    late: bool = False
    #: One message was refused and it is not known which: send them one by one the next time.
    suspect: bool = False
    sent: tuple[int, ...] = ()


Outcome = BatchSent | BatchPartlySent | BatchOutcomeUnknown


class Channel(Protocol):
    """Sends one batch at a time. After any outcome but `BatchSent` it is dropped and another one is opened."""

    def start(self, messages: Sequence[RelayedMessage], *, timestamp_ms: int) -> None:
        """Start sending a batch, in order."""
        ...

    def wait(self, timeout_s: float) -> Outcome | None:
        """Wait for the outcome; return None on timeout."""
        ...

    def drop(self) -> None:
        """Discard what is not acknowledged, and close."""
        ...


class Scan(msgspec.Struct, frozen=True):
    """What to search the log for: the messages of one session, starting at these offsets."""

    session: bytes
    ids: frozenset[int]
    scan_from: Mapping[int, int]
    topic_uuid: str | None
    #: The session was a transaction: read only committed messages, which waits for other open transactions.
    committed: bool = True


class FoundMessages(msgspec.Struct, frozen=True):
    """Which messages of a scan are in the log; `lost` says why others may have been there and been deleted."""

    ids: frozenset[int]
    lost: str | None = None
    #: Some offsets have no record: messages may have been compacted away, or they are transaction markers.
    gaps: bool = False


class RelayTarget(Protocol):
    """A log, shared by all threads of a relay. Raises Unavailable on failure and NotFound for a missing topic."""

    def topic(self, topic: str, *, fresh: bool = False) -> TargetTopic:
        """Return the topic, configured for the fence; cached for a while unless `fresh`."""
        ...

    def ends(self, topic: TargetTopic, *, fresh: bool = False) -> dict[int, int]:
        """Return offsets at or before those that the next messages get; cached for a moment unless `fresh`."""
        ...

    def channel(self, topic: TargetTopic, *, fresh: bool, singly: bool = False) -> Channel:
        """Return this thread's channel to the topic. A `fresh` transactional one has fenced every older one."""
        ...

    def release(self, topic: str) -> None:
        """Release what the calling thread holds for the topic."""
        ...

    def maintain(self) -> None:
        """Serve the connections that the calling thread keeps open; called about once a second, between topics."""
        ...

    def scan(self, topic: TargetTopic, scan: Scan, on_step: Callable[[], None]) -> FoundMessages:
        """Read the log up to its current end and return the session's messages; `on_step` may raise to stop it.

        With the fence `append_id` nothing is read: this thread then sends the same session again.
        """
        ...

    def close(self) -> None:
        """Close the target."""
        ...
