"""What the outbox's relay asks of a log: sending in order, fencing a late sender, and looking for what was sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

import msgspec

#: 16 bytes of session and 8 bytes of id: by it a scan knows what is in the log.
SESSION_HEADER = "tidebook-session"
#: 16 bytes of outbox and 8 bytes of id: by it a consumer knows a message that it has seen.
ID_HEADER = "tidebook-id"

#: How a late sender is kept out. `lock`: an embedded log's file lock, which a stopped process keeps. `append_id`: it
#: may send, and a journal takes nothing twice.
Fence = Literal["timestamp", "transaction", "none", "lock", "append_id"]


class Relayed(msgspec.Struct, frozen=True, gc=False):
    """A message on its way."""

    id: int
    key: bytes | None
    partition_key: bytes | None
    value: bytes | None
    headers: list[tuple[str, str | bytes | None]]


class TargetTopic(msgspec.Struct, frozen=True):
    """A topic as the log has it now."""

    topic: str
    #: Tells the lives of a topic apart.
    uuid: str
    partitions: int
    #: What one message may take, with its key, headers and overhead.
    limit_bytes: int
    #: Compacted: a message without a key is refused.
    needs_key: bool
    #: The fence in force.
    fence: Fence
    #: How long after a session was opened its messages are still taken (`timestamp`).
    fence_ms: int
    #: Why a message may be sent twice after a pause; None where that cannot be.
    weak: str | None = None


class Sent(msgspec.Struct, frozen=True):
    """All of a batch is in the log."""


class Refusal(msgspec.Struct, frozen=True):
    """A message that the log will never take. `doubtful`: it may be there nonetheless, and a person must look."""

    id: int
    reason: str
    doubtful: bool = False


class Partly(msgspec.Struct, frozen=True):
    """Only `sent` of the batch is in the log, for certain. What is not refused can be sent again at once."""

    sent: tuple[int, ...]
    refused: tuple[Refusal, ...] = ()


class Unsure(msgspec.Struct, frozen=True):
    """`sent` is in the log, for certain; more of the batch may be: only a look at the log tells."""

    reason: str
    #: The log refused it as too old.
    late: bool = False
    #: One message of the batch was refused, but which of them cannot be told: send singly the next time.
    suspect: bool = False
    sent: tuple[int, ...] = ()


Outcome = Sent | Partly | Unsure


class Channel(Protocol):
    """Sends one batch at a time. After anything but `Sent` it is dropped, and another one opened."""

    def start(self, messages: Sequence[Relayed], *, timestamp_ms: int) -> None:
        """Begin to send a batch, in order."""
        ...

    def wait(self, timeout_s: float) -> Outcome | None:
        """Wait for the outcome; None while it is open."""
        ...

    def drop(self) -> None:
        """Forget what is not acknowledged, and close."""
        ...


class Scan(msgspec.Struct, frozen=True):
    """What to look for: messages of one session, from these offsets on."""

    session: bytes
    ids: frozenset[int]
    scan_from: Mapping[int, int]
    topic_uuid: str | None
    #: They were sent in a transaction: only what was committed counts, and others' open transactions are waited for.
    committed: bool = True


class Found(msgspec.Struct, frozen=True):
    """Which of them are in the log; `lost` says why some may have been there and be gone."""

    ids: frozenset[int]
    lost: str | None = None
    #: Some offsets hold nothing: messages may have been compacted away, or there are marks of transactions.
    holes: bool = False


class RelayTarget(Protocol):
    """A log, for all threads of a relay. Failures are Unavailable; a missing topic is NotFound."""

    def topic(self, topic: str, *, fresh: bool = False) -> TargetTopic:
        """The topic, prepared for the fence; remembered for a while unless `fresh`."""
        ...

    def ends(self, topic: TargetTopic, *, fresh: bool = False) -> dict[int, int]:
        """The offsets that the next messages get, or earlier ones; remembered for a moment unless `fresh`."""
        ...

    def channel(self, topic: TargetTopic, *, fresh: bool, singly: bool = False) -> Channel:
        """This thread's channel to the topic. With `transaction`, a `fresh` one has fenced every older one."""
        ...

    def release(self, topic: str) -> None:
        """The calling thread is done with the topic for now."""
        ...

    def tend(self) -> None:
        """Look after what the calling thread keeps open; called about once a second, between topics."""
        ...

    def scan(self, topic: TargetTopic, scan: Scan, on_step: Callable[[], None]) -> Found:
        """Read the log up to its present end. `on_step` is called now and then, and may raise to stop it.

        With `append_id` nothing is looked for: what this thread sends next is the same session once more.
        """
        ...

    def close(self) -> None:
        """Let go."""
        ...
