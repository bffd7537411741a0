"""Journals as the relay's target: an append is relayed again under the same id, and so never counts twice."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from tidebook.core.errors import Conflict, Corrupt, InvalidInput, OutcomeUnknown, TidebookError
from tidebook.core.key import partition_of
from tidebook.log.relay_port import Found, Outcome, Partly, Refused, Relayed, Scan, Sent, TargetTopic, Unsure
from tidebook.outbox.journal_message import PREFIX, JournalAppend, append_id, read_journal_message

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


class JournalTarget:
    """Appends to journals. `run` takes a coroutine to the loop that they live on."""

    def __init__(self, journals: Journals, run: Callable[[Coroutine[Any, Any, Any]], Any], outbox: bytes) -> None:
        self._journals = journals
        self._run = run
        self._outbox = outbox
        self._mine = threading.local()

    def topic(self, topic: str, *, fresh: bool = False) -> TargetTopic:
        """The topic, made where it is missing, as journals do."""
        found: JournalTopic = self._run(self._journals.topic(topic.removeprefix(PREFIX)))
        uuid = f"{found.topic_id}/{found.epoch}"
        return TargetTopic(topic, uuid, found.partitions, LIMIT_BYTES, False, "append_id", 0)

    def ends(self, topic: TargetTopic) -> dict[int, int]:
        """The floors of the next batch's appends; those of an open session's, until it is settled."""
        open_ = self._open(topic.topic)
        if open_ is not None:
            return dict(open_.scan_from)
        ends: dict[int, int] = self._run(self._journals.ends(topic.topic.removeprefix(PREFIX)))
        self._floors()[topic.topic] = ends
        return ends

    def channel(self, topic: TargetTopic, *, fresh: bool, singly: bool = False) -> JournalChannel:
        """A channel to the journals of a topic."""
        return JournalChannel(topic, self, self._floors().get(topic.topic, {}), self._open(topic.topic))

    def release(self, topic: str) -> None:
        """Whoever holds the topic next begins with what the database says."""
        self._floors().pop(topic, None)
        self._sessions().pop(topic, None)

    def scan(self, topic: TargetTopic, scan: Scan, on_step: Callable[[], None]) -> Found:
        """Nothing is looked for: the appends of the session are made again, under their ids and their old floors."""
        self._sessions()[topic.topic] = scan
        return Found(frozenset())

    def close(self) -> None:
        """The book is closed by who opened it."""

    def send(
        self, topic: TargetTopic, messages: Sequence[Relayed], floors: Mapping[int, int], open_: Scan | None
    ) -> Outcome:
        """Append a batch: journals beside one another, the appends of each in order."""
        outcome: Outcome = self._run(self._send(topic, messages, floors, open_))
        self._sessions().pop(topic.topic, None)
        return outcome

    async def _send(
        self, topic: TargetTopic, messages: Sequence[Relayed], floors: Mapping[int, int], open_: Scan | None
    ) -> Outcome:
        chains: dict[bytes | None, list[Relayed]] = {}
        for message in messages:
            chains.setdefault(message.key, []).append(message)
        sending = Sending(self._journals, topic, self._outbox, floors, open_)
        await asyncio.gather(*(sending.chain(chain) for chain in chains.values()))
        return sending.outcome()

    def _floors(self) -> dict[str, dict[int, int]]:
        return self._of_thread("floors")

    def _sessions(self) -> dict[str, Scan]:
        return self._of_thread("sessions")

    def _open(self, topic: str) -> Scan | None:
        return self._sessions().get(topic)

    def _of_thread(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] | None = getattr(self._mine, name, None)
        if found is None:
            found = {}
            setattr(self._mine, name, found)
        return found


class JournalChannel:
    """A batch of appends; its outcome is known when `start` returns."""

    def __init__(
        self, topic: TargetTopic, target: JournalTarget, floors: Mapping[int, int], open_: Scan | None
    ) -> None:
        self._topic = topic
        self._target = target
        self._floors = floors
        self._open = open_
        self._outcome: Outcome | None = None

    def start(self, messages: Sequence[Relayed], *, timestamp_ms: int) -> None:
        """Append them all."""
        self._outcome = self._target.send(self._topic, messages, self._floors, self._open)

    def wait(self, timeout_s: float) -> Outcome | None:
        """The outcome of `start`."""
        return self._outcome

    def drop(self) -> None:
        """Nothing is kept."""


class Sending:
    """One batch on its way to the journals."""

    def __init__(
        self, journals: Journals, topic: TargetTopic, outbox: bytes, floors: Mapping[int, int], open_: Scan | None
    ) -> None:
        self._journals = journals
        self._topic = topic
        self._name = topic.topic.removeprefix(PREFIX)
        self._outbox = outbox
        self._floors = floors
        self._open = open_
        self._sent: list[int] = []
        self._refused: tuple[int, str] | None = None
        self._unsure: str | None = None
        self._void = False

    async def chain(self, messages: Iterable[Relayed]) -> None:
        """The appends of one journal, in order; the first that fails ends it."""
        for message in messages:
            try:
                await self._append(message)
            except (Conflict, InvalidInput, Corrupt) as error:
                self._refused = self._refused or (message.id, str(error))
                return
            except OutcomeUnknown as error:
                if error.offset is None:
                    self._unsure = str(error)
                elif self._again(message):  # the journal has moved on too far to tell: an operator must look
                    self._refused = self._refused or (message.id, str(error))
                else:  # void, because others appended much since its floor was read: it goes with the next batch
                    self._void = True
                return
            except TidebookError as error:
                self._unsure = str(error)
                return
            self._sent.append(message.id)

    async def _append(self, message: Relayed) -> None:
        append = read_journal_message(message.value)
        id = append_id(self._outbox, message.id)
        partition = partition_of(append.id, self._topic.partitions)
        floors, uuid = self._floors, self._topic.uuid
        if self._open is not None and self._again(message):
            floors, uuid = self._open.scan_from, self._open.topic_uuid or ""
        epoch = int(uuid.rpartition("/")[2]) if uuid == self._topic.uuid else None
        floor = floors.get(partition, 0)
        await self._journals.append(self._name, append, append_id=id, floor=floor, epoch=epoch)

    def _again(self, message: Relayed) -> bool:
        """Whether somebody may have sent it before."""
        return self._open is not None and message.id in self._open.ids

    def outcome(self) -> Outcome:
        """What came of it all."""
        if self._unsure is not None:
            return Unsure(self._unsure)
        if self._refused is not None:
            return Refused(*self._refused, tuple(self._sent))
        return Partly(tuple(self._sent)) if self._void else Sent()
