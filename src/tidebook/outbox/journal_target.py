"""Journals as the relay's target: an append is relayed again under the same id, and so never counts twice."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

import msgspec

from tidebook.core.errors import Conflict, Corrupt, InvalidInput, OutcomeUnknown, TidebookError
from tidebook.core.key import partition_of
from tidebook.log.relay_port import Found, Outcome, Partly, Refusal, Relayed, Scan, Sent, TargetTopic, Unsure
from tidebook.outbox.journal_message import PREFIX, JournalAppend, append_id, read_journal_message

T = TypeVar("T")

#: The journal checks sizes itself, against its topic's own limit.
LIMIT_BYTES = 2**31


class JournalTopic(msgspec.Struct, frozen=True):
    """A journal's topic as it is now."""

    topic_id: str
    epoch: int
    partitions: int


class Journals(Protocol):
    """The book's journals, as far as a relay needs them."""

    async def topic(self, topic: str) -> JournalTopic: ...
    async def ends(self, topic: str) -> dict[int, int]: ...
    async def append(
        self, topic: str, append: JournalAppend, *, append_id: bytes, floor: int, epoch: int | None
    ) -> None:
        """Append once; OutcomeUnknown with an offset says that the head no longer remembers so far back."""
        ...


class Loop(Protocol):
    """Where the journals live."""

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T: ...
    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]: ...


class Attempt(msgspec.Struct, frozen=True):
    """What a batch's appends carry: where the log ended before the first try of any of them, and in which life."""

    floors: Mapping[int, int]
    topic_uuid: str
    #: Somebody may have made these appends before.
    again: bool = False


class JournalTarget:
    """Appends to journals."""

    def __init__(self, journals: Journals, loop: Loop, outbox: bytes) -> None:
        self._journals = journals
        self._loop = loop
        self._outbox = outbox
        self._mine = threading.local()

    def topic(self, topic: str, *, fresh: bool = False) -> TargetTopic:
        """The topic, made where it is missing, as journals do."""
        found = self._loop.run(self._journals.topic(topic.removeprefix(PREFIX)))
        uuid = f"{found.topic_id}/{found.epoch}"
        return TargetTopic(topic, uuid, found.partitions, LIMIT_BYTES, False, "append_id", 0)

    def ends(self, topic: TargetTopic, *, fresh: bool = False) -> dict[int, int]:
        """The floors of the next batch's appends."""
        ends = self._loop.run(self._journals.ends(topic.topic.removeprefix(PREFIX)))
        self._attempts()[topic.topic] = Attempt(ends, topic.uuid)
        return ends

    def channel(self, topic: TargetTopic, *, fresh: bool, singly: bool = False) -> JournalChannel:
        """A channel to the journals of a topic."""
        attempt = self._attempts().get(topic.topic, Attempt({}, topic.uuid))
        return JournalChannel(Sending(self._journals, topic, self._outbox, attempt), self._loop)

    def release(self, topic: str) -> None:
        """Whoever holds the topic next begins with what the database says."""
        self._attempts().pop(topic, None)

    def tend(self) -> None:
        """Nothing is kept open."""

    def scan(self, topic: TargetTopic, scan: Scan, on_step: Callable[[], None]) -> Found:
        """Nothing is looked for: the appends of the session are made again, under their ids and their old floors."""
        self._attempts()[topic.topic] = Attempt(scan.scan_from, scan.topic_uuid or "", again=True)
        return Found(frozenset())

    def close(self) -> None:
        """The book is closed by who opened it."""

    def _attempts(self) -> dict[str, Attempt]:
        found: dict[str, Attempt] | None = getattr(self._mine, "attempts", None)
        if found is None:
            found = self._mine.attempts = {}
        return found


class JournalChannel:
    """A batch of appends, on its way in the journals' own loop."""

    def __init__(self, sending: Sending, loop: Loop) -> None:
        self._sending = sending
        self._loop = loop
        self._future: Future[Outcome] | None = None

    def start(self, messages: Sequence[Relayed], *, timestamp_ms: int) -> None:
        """Begin to append them all."""
        self._future = self._loop.submit(self._sending.send(messages))

    def wait(self, timeout_s: float) -> Outcome | None:
        """The outcome, once every append has one."""
        assert self._future is not None
        try:
            return self._future.result(timeout_s)
        except TimeoutError:
            return None

    def drop(self) -> None:
        """Begin no more appends; those on their way may still be made, and count once."""
        if self._future is not None:
            self._future.cancel()


class Sending:
    """One batch on its way to the journals."""

    def __init__(self, journals: Journals, topic: TargetTopic, outbox: bytes, attempt: Attempt) -> None:
        self._journals = journals
        self._topic = topic
        self._name = topic.topic.removeprefix(PREFIX)
        self._outbox = outbox
        self._attempt = attempt
        self._sent: list[int] = []
        self._refused: list[Refusal] = []
        self._unsure: str | None = None
        self._void = False

    async def send(self, messages: Sequence[Relayed]) -> Outcome:
        """Append a batch: journals beside one another, the appends of each in order."""
        chains: dict[bytes | None, list[Relayed]] = {}
        for message in messages:
            chains.setdefault(message.key, []).append(message)
        await asyncio.gather(*(self._chain(chain) for chain in chains.values()))
        return self._outcome()

    async def _chain(self, messages: Iterable[Relayed]) -> None:
        """The appends of one journal, in order; what follows one that failed waits."""
        for message in messages:
            try:
                await self._append(message)
            except (Conflict, InvalidInput, Corrupt) as error:
                self._refused.append(Refusal(message.id, str(error)))
                return
            except OutcomeUnknown as error:
                if error.offset is None:
                    self._unsure = str(error)
                    return
                if not self._attempt.again:
                    # Void, because others appended much since its floor was read: it goes with the next batch.
                    self._void = True
                    return
                # The journal has moved on too far to tell, and so it has for all that follow: each of them is known
                # to be there, or is as doubtful as this one. None of them is made now.
                self._refused.append(Refusal(message.id, _doubtful(error), doubtful=True))
                continue
            except TidebookError as error:
                self._unsure = str(error)
                return
            self._sent.append(message.id)

    async def _append(self, message: Relayed) -> None:
        append = read_journal_message(message.value)
        attempt = self._attempt
        partition = partition_of(append.id, self._topic.partitions)
        epoch = int(attempt.topic_uuid.rpartition("/")[2]) if attempt.topic_uuid == self._topic.uuid else None
        await self._journals.append(
            self._name,
            append,
            append_id=append_id(self._outbox, message.id),
            floor=attempt.floors.get(partition, 0),
            epoch=epoch,
        )

    def _outcome(self) -> Outcome:
        sent = tuple(self._sent)
        if self._unsure is not None:
            return Unsure(self._unsure, sent=sent)
        if self._refused or self._void:
            return Partly(sent, tuple(self._refused))
        return Sent()


def _doubtful(error: OutcomeUnknown) -> str:
    return (
        f"a relay that died may have made it, and the journal no longer tells ({error}): "
        "drop it where the journal has it, else retry"
    )
