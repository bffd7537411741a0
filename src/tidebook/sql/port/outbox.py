"""What the relay asks of a database. All times are the database's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Literal, Protocol

import msgspec

#: The version of the tables, in `kafka_outbox.version`.
VERSION = 1
#: How many rows of `kafka_order_lock` `ordered=True` spreads its locks over (MySQL).
ORDER_SLOTS = 256

Headers = tuple[tuple[str, bytes | None], ...]

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Headers).decode


def pack_headers(headers: Headers) -> bytes | None:
    """Headers as the column holds them: a MessagePack list of pairs, or NULL where there are none."""
    return _encode(headers) if headers else None


def unpack_headers(packed: bytes | None) -> Headers:
    """Undo `pack_headers`."""
    return _decode(packed) if packed else ()


class Publishable(Protocol):
    """A message to be published, whoever made it."""

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


class Waiting(msgspec.Struct, frozen=True, gc=False):
    """A row of `kafka_messages`."""

    id: int
    key: bytes | None
    partition_key: bytes | None
    payload: bytes | None
    headers: bytes | None
    tries: int = 0


class Aside(IntEnum):
    """Why a message lies in `kafka_parked`."""

    #: An earlier message of its key lies there.
    HELD = 0
    #: It was refused, and is tried again at `retry_at`.
    RETRYING = 1
    #: It was refused for good: an operator decides.
    PARKED = 2


class SetAside(msgspec.Struct, frozen=True, gc=False):
    """A message that is taken out of the way of the others."""

    id: int
    state: Aside
    order_key: bytes | None
    tries: int
    reason: str
    retry_ms: int | None = None


class Chosen(msgspec.Struct, frozen=True):
    """What becomes of the rows of a batch: sent, in order, or set aside. What is in neither waits for the next one."""

    send: tuple[Waiting, ...]
    aside: tuple[SetAside, ...] = ()


#: Decides over rows, given the order keys that are held. Called inside the transaction that opens the session.
Choose = Callable[[Sequence[Waiting], frozenset[bytes]], Chosen]


class Session(msgspec.Struct, frozen=True):
    """A batch that was begun and not finished: some of it may be in the log."""

    uuid: bytes
    ids: tuple[int, ...]
    age_ms: int
    fence: str
    topic_uuid: str | None
    scan_from: dict[int, int]


class Hold(msgspec.Struct, frozen=True):
    """One time of holding a topic's lock. `previous_owner` is who held it before; `notice` is the topic's."""

    topic: str
    uuid: bytes
    owner: str
    previous_owner: str | None
    dirty: Session | None
    notice: str | None = None


class NewSession(msgspec.Struct, frozen=True):
    """What a session is opened with."""

    uuid: bytes
    fence: str
    topic_uuid: str
    #: The ends of the log's partitions, where they were asked for: the session's messages lie at or behind them.
    ends: Mapping[int, int] | None = None


class Finished(msgspec.Struct, frozen=True):
    """Messages that are in the log for certain, by ids that grow."""

    ids: Sequence[int]


class Batch(msgspec.Struct, frozen=True):
    """An open session: its messages, when it was opened, and whether more rows may wait behind it."""

    session: bytes
    messages: tuple[Waiting, ...]
    opened_ms: int
    more: bool
    set_aside: int = 0


class BatchLimit(msgspec.Struct, frozen=True):
    """How much a batch takes: one message at least."""

    rows: int = 1000
    size_bytes: int = 16_000_000


class TopicStatus(msgspec.Struct, frozen=True):
    """A topic as the relays have left it."""

    topic: str
    #: Counted up to a bound: see `waiting_is_bound`.
    waiting: int
    waiting_is_bound: bool
    #: How long the oldest row has waited, those that are held or tried again included; None where none waits.
    oldest_age_ms: int | None
    locked_by: str | None
    locked_age_ms: int | None
    error: bool
    retries: int
    retry_in_ms: int | None
    reason: str | None
    #: Why messages may have been, or may be, sent more than once; None while exactly once holds.
    notice: str | None
    notice_age_ms: int | None
    dirty: bool
    relayed: int
    #: Of those, how many in the last sixty seconds, about.
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
    """One connection, for one thread. Failures are Unavailable, or Fenced where the hold is lost."""

    def identity(self) -> bytes:
        """The 16 bytes that tell this outbox from all others."""
        ...

    def create_tables(self) -> None:
        """Make the tables where they are missing."""
        ...

    def publish(self, messages: Sequence[Publishable], *, ordered: bool) -> None:
        """Publish in a transaction of their own."""
        ...

    def topics_waiting(self) -> list[str]:
        """Topics with work that nobody holds and that do not rest."""
        ...

    def try_lock(self, topic: str, *, hold: bytes, owner: str, again: bytes | None = None) -> Hold | None:
        """Take the topic if nobody holds it (or only `again`, a hold of one's own that was lost sight of)."""
        ...

    def heartbeat(self, hold: Hold) -> None:
        """Keep the lock; Fenced if it is lost."""
        ...

    def begin(
        self, hold: Hold, session: NewSession, choose: Choose, limit: BatchLimit, finished: Finished | None = None
    ) -> Batch:
        """Finish what is finished and open the next session, in one durable transaction; Fenced if the lock is lost.

        With nothing to send the session stays closed and the batch is empty.
        """
        ...

    def finish(self, hold: Hold, finished: Finished, *, unlock: bool) -> None:
        """Delete what is in the log and close the session; Fenced if the lock is lost."""
        ...

    def open_rows(self, hold: Hold, session: Session) -> tuple[Waiting, ...]:
        """The rows of an open session that still wait, by id; Fenced if the lock is lost."""
        ...

    def forget(self, hold: Hold, finished: Finished) -> None:
        """Delete what is in the log, and leave the session open for the rest of it; Fenced if the lock is lost."""
        ...

    def set_aside(self, hold: Hold, aside: Sequence[SetAside]) -> None:
        """Take messages out of the way while nothing of them is in the log; Fenced if the lock is lost."""
        ...

    def unlock(self, hold: Hold) -> None:
        """Let go, with no error; a session that is open stays open. A lost hold is let be."""
        ...

    def rest(self, hold: Hold, *, reason: str, rest_ms: int, failed: bool = True) -> None:
        """Let go, and let nobody take the topic for so long; `failed` counts a retry. A lost hold is let be."""
        ...

    def notice(self, topic: str, text: str | None) -> None:
        """Write down why exactly once does not hold for the topic; None takes it back."""
        ...

    def status(self, *, count_max: int) -> list[TopicStatus]:
        """Every topic that waits or was ever relayed."""
        ...

    def parked(self, topic: str | None, *, limit: int) -> list[ParkedMessage]:
        """What lies aside, by topic and id."""
        ...

    def parked_retry(self, topic: str, id: int | None) -> int:
        """Put parked messages (all of the topic's, or one), and what they hold, back in their place; how many."""
        ...

    def parked_drop(self, topic: str, id: int | None) -> int:
        """Delete parked messages, and put back what they held; how many were deleted."""
        ...

    def close(self) -> None:
        """Let go of the connection."""
        ...


class Listener(Protocol):
    """Wakes a relay when something was committed, where the database can tell."""

    def asleep(self, relay: bytes, seconds: float) -> None:
        """Ask publishers to call, for so long; 0 takes it back."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Wait for a call; False when the time ran out first."""
        ...

    def close(self) -> None:
        """Stop listening."""
        ...


class OutboxDatabase(Protocol):
    """Opens connections: one a thread."""

    def connect(self) -> OutboxStore:
        """A connection for the calling thread."""
        ...

    def listen(self) -> Listener | None:
        """What wakes a relay, or None where only looking helps."""
        ...
