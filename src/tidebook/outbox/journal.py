"""Journals as the relay's target: an append that is relayed again has the same append id, so it is applied once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from hashlib import blake2b
from typing import Any, Protocol, TypeVar

import msgspec

from tidebook.core.errors import Conflict, Corrupt, InvalidInput, OutcomeUnknown, TidebookError
from tidebook.core.key import partition_of
from tidebook.outbox import port
from tidebook.outbox.fence import Fence
from tidebook.outbox.message import PREFIX, JournalAppend, read_journal_message

T = TypeVar("T")

#: The journal checks sizes itself, against its topic's limit.
LIMIT_BYTES = 2**31


class JournalTopic(msgspec.Struct, frozen=True):
    """The identity and size of a journal's topic."""

    topic_id: str
    epoch: int
    partitions: int


class Journals(Protocol):
    """The part of a book's journals that a relay needs."""

    async def topic(self, topic: str) -> JournalTopic: ...
    async def ends(self, topic: str) -> dict[int, int]: ...
    async def append(
        self, topic: str, append: JournalAppend, *, append_id: bytes, floor: int, epoch: int | None
    ) -> None:
        """Append once; raise OutcomeUnknown with an offset if the head no longer has append ids that old."""
        ...


class Loop(Protocol):
    """The event loop on which the journals run."""

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T: ...
    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]: ...


class Attempt(msgspec.Struct, frozen=True):
    """The context of a batch's appends: the end offsets before their first attempt, and the topic's incarnation."""

    floors: Mapping[int, int]
    topic_uuid: str
    #: Whether an earlier relay may have made these appends.
    is_retry: bool = False


class _Attempts(threading.local):
    def __init__(self) -> None:
        self.by_topic: dict[str, Attempt] = {}


class JournalTarget(port.RelayTarget):
    """Appends messages to journals."""

    def __init__(self, journals: Journals, loop: Loop, outbox: bytes) -> None:
        self._journals = journals
        self._loop = loop
        self._outbox = outbox
        self._of_thread = _Attempts()

    def topic(self, topic: str, *, fresh: bool = False) -> port.TargetTopic:
        """Return the topic, created if it is missing."""
        found = self._loop.run(self._journals.topic(topic.removeprefix(PREFIX)))
        uuid = f"{found.topic_id}/{found.epoch}"
        return port.TargetTopic(topic, uuid, found.partitions, LIMIT_BYTES, False, Fence.APPEND_ID, 0)

    def ends(self, topic: port.TargetTopic, *, fresh: bool = False) -> dict[int, int]:
        ends = self._loop.run(self._journals.ends(topic.topic.removeprefix(PREFIX)))
        self._of_thread.by_topic[topic.topic] = Attempt(ends, topic.uuid)
        return ends

    def channel(self, topic: port.TargetTopic, *, fresh: bool, singly: bool = False) -> JournalChannel:
        """Return a channel to the journals of a topic."""
        attempt = self._of_thread.by_topic.get(topic.topic, Attempt({}, topic.uuid))
        return JournalChannel(self._journals, self._loop, topic, self._outbox, attempt)

    def release(self, topic: str) -> None:
        """Forget the attempt: the next lock starts with the one that the database stores."""
        self._of_thread.by_topic.pop(topic, None)

    def scan(
        self, topic: port.TargetTopic, session: port.RelaySession, on_step: Callable[[], None]
    ) -> port.FoundMessages:
        """Report no message as found: the session's appends are repeated with their append ids and their old floors."""
        attempt = Attempt(session.scan_from, session.topic_uuid or "", is_retry=True)
        self._of_thread.by_topic[topic.topic] = attempt
        return port.FoundMessages(frozenset())


class JournalChannel:
    """Runs a batch of appends on the journals' event loop."""

    def __init__(
        self, journals: Journals, loop: Loop, topic: port.TargetTopic, outbox: bytes, attempt: Attempt
    ) -> None:
        self._journals = journals
        self._loop = loop
        self._topic = topic
        self._outbox = outbox
        self._attempt = attempt
        self._future: Future[port.Outcome] | None = None
        self._sent: list[int] = []
        self._refused: list[port.BatchRefused] = []
        self._unknown: str | None = None
        self._not_made = False

    def start(self, messages: Sequence[port.RelayedMessage], *, timestamp_ms: int) -> None:
        self._future = self._loop.submit(self._append_all(messages))

    def wait(self, timeout_s: float) -> port.Outcome | None:
        assert self._future is not None
        try:
            return self._future.result(timeout_s)
        except TimeoutError:
            return None

    def drop(self) -> None:
        """Start no more appends; those in flight may still take effect, and are applied once."""
        if self._future is not None:
            self._future.cancel()

    async def _append_all(self, messages: Sequence[port.RelayedMessage]) -> port.Outcome:
        """Append the batch: journals concurrently, the appends of each journal in order."""
        chains: dict[bytes | None, list[port.RelayedMessage]] = {}
        for message in messages:
            chains.setdefault(message.key, []).append(message)
        await asyncio.gather(*(self._append_chain(chain) for chain in chains.values()))
        sent = tuple(self._sent)
        if self._unknown is not None:
            return port.BatchOutcomeUnknown(self._unknown, sent=sent)
        if self._refused or self._not_made:
            return port.BatchPartlySent(sent, tuple(self._refused))
        return port.BatchSent()

    async def _append_chain(self, messages: Iterable[port.RelayedMessage]) -> None:
        """Append to one journal, in order; after a failure the following appends wait for a later batch."""
        for message in messages:
            try:
                await self._append(message)
            except (Conflict, InvalidInput, Corrupt) as error:
                self._refused.append(port.BatchRefused(message.id, str(error)))
                return
            except OutcomeUnknown as error:
                if error.offset is None:
                    self._unknown = str(error)
                    return
                if not self._attempt.is_retry:
                    # It had no effect, because too many other appends came after its floor: the next batch retries it.
                    self._not_made = True
                    return
                # The head no longer shows whether this append was applied. Each later one is either known to be
                # applied, or its outcome is equally unknown; none of them is applied now.
                reason = (
                    f"a relay that died may have made this append, and the journal no longer remembers ({error}): "
                    "drop it if the journal has it, else retry"
                )
                self._refused.append(port.BatchRefused(message.id, reason, doubtful=True))
                continue
            except TidebookError as error:
                self._unknown = str(error)
                return
            self._sent.append(message.id)

    async def _append(self, message: port.RelayedMessage) -> None:
        append = read_journal_message(message.value)
        attempt = self._attempt
        partition = partition_of(append.id, self._topic.partitions)
        epoch = int(attempt.topic_uuid.rpartition("/")[2]) if attempt.topic_uuid == self._topic.uuid else None
        await self._journals.append(
            self._topic.topic.removeprefix(PREFIX),
            append,
            append_id=append_id(self._outbox, message.id, message.value or b""),
            floor=attempt.floors.get(partition, 0),
            epoch=epoch,
        )


def append_id(outbox: bytes, id: int, value: bytes) -> bytes:
    """Return the append id of a row: the same 16 bytes each time the row is relayed.

    It depends on the row's value too: a database that was restored to an earlier time gives its ids to other rows.
    """
    return blake2b(outbox + id.to_bytes(8, "big") + value, digest_size=16, person=b"tidebook-outbox").digest()
