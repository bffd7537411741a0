"""Journals for threads without a loop: the same names, without await, over the one async body."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta

from tidebook.core.errors import OutcomeUnknown, TidebookError
from tidebook.core.event import Event, ReadEvent
from tidebook.core.seq_nr import FIRST, LAST
from tidebook.core.topic_config import TopicConfig
from tidebook.journal.journal import Journal
from tidebook.journal.outcome import Appended
from tidebook.journal.settings import BarrierKind
from tidebook.journal.snapshots import Snapshot
from tidebook.runtime.blocking_portal import BlockingPortal


class SyncJournal:
    """All journals of a topic; see `Journal` for what each name does."""

    def __init__(self, portal: BlockingPortal, journal: Journal) -> None:
        self._portal = portal
        self._journal = journal
        self.topic = journal.topic

    def topic_config(self) -> TopicConfig:
        return self._portal.run(self._journal.topic_config())

    def exists(self) -> bool:
        return self._portal.run(self._journal.exists())

    def create(self) -> TopicConfig:
        return self._portal.run(self._journal.create())

    def append(
        self,
        id: str,
        events: Sequence[Event],
        *,
        expected: int | None = None,
        at: int | None = None,
        expire_after: timedelta | int | None = None,
        confirm: bool = True,
        append_id: bytes | None = None,
        retry: OutcomeUnknown | None = None,
    ) -> Appended:
        return self._portal.run(
            self._journal.append(
                id,
                events,
                expected=expected,
                at=at,
                expire_after=expire_after,
                confirm=confirm,
                append_id=append_id,
                retry=retry,
            )
        )

    def append_many(
        self, items: Iterable[tuple[str, Sequence[Event]]], *, confirm: bool = True
    ) -> list[Appended | TidebookError]:
        return self._portal.run(self._journal.append_many(items, confirm=confirm))

    def delete(self, id: str, *, to: int) -> None:
        self._portal.run(self._journal.delete(id, to=to))

    def purge(self, id: str) -> None:
        self._portal.run(self._journal.purge(id))

    def read(
        self, id: str, *, start: int = FIRST, end: int = LAST, barrier: BarrierKind | None = None
    ) -> Iterator[ReadEvent]:
        return self._portal.iterate(self._journal.read(id, start=start, end=end, barrier=barrier))

    def tail(self, id: str, *, start: int = FIRST) -> Iterator[ReadEvent]:
        return self._portal.iterate(self._journal.tail(id, start=start))

    def pointer(self, id: str, *, barrier: BarrierKind | None = None) -> int | None:
        return self._portal.run(self._journal.pointer(id, barrier=barrier))

    def ids(self) -> Iterator[str]:
        return self._portal.iterate(self._journal.ids())

    def save_snapshot(self, id: str, *, seq_nr: int, payload: object) -> None:
        self._portal.run(self._journal.save_snapshot(id, seq_nr=seq_nr, payload=payload))

    def load_snapshot(self, id: str, *, to: int = LAST) -> Snapshot | None:
        return self._portal.run(self._journal.load_snapshot(id, to=to))

    def delete_snapshots(self, id: str, *, to: int = LAST) -> None:
        self._portal.run(self._journal.delete_snapshots(id, to=to))

    def adopt(self) -> TopicConfig:
        return self._portal.run(self._journal.adopt())
