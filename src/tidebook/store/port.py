"""What a store must do. Readers and the writer are separate: an app never writes what the pipeline owns."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Protocol

import msgspec

from tidebook.core.head import Head
from tidebook.core.key import Key
from tidebook.core.mend import Mend
from tidebook.core.position import Position
from tidebook.core.replication import EventRow, Parked, Pointer, SliceWrites, TagPlace, TagRow
from tidebook.core.topic import TopicFacts


class Snapshot(msgspec.Struct, frozen=True, gc=False):
    """A state that an app saved, as of `seq_nr` of one life of its journal."""

    seq_nr: int
    payload_type: int
    payload: bytes
    timestamp_ms: int


class StoreReader(Protocol):
    """What apps read. Every failure is a TidebookError: Unavailable, Corrupt."""

    async def pointer(self, topic: str, partition: int) -> Pointer | None:
        """How far a partition is replicated."""
        ...

    async def head(self, key: Key) -> Head | None:
        """The head, or the grave, of a journal."""
        ...

    async def heads(self, topic: str, ids: Sequence[str]) -> Mapping[str, Head]:
        """Many heads at once; ids without one are absent."""
        ...

    async def events(self, key: Key, head: Head, *, after: int, to: int, limit: int) -> Sequence[EventRow]:
        """The next rows with after < seq_nr ≤ to, in order, at most `limit`; empty only where there are none at all.

        Number gaps, empty segments and jumps are the adapter's business.
        """
        ...

    def ids(self, topic: str) -> AsyncIterator[str]:
        """The ids of a topic's live journals, each once."""
        ...

    async def snapshots(self, key: Key, incarnation: Position) -> Sequence[Snapshot]:
        """The snapshots of one life of a journal, newest (largest seq_nr) first."""
        ...

    async def facts(self, topic: str) -> TopicFacts | None:
        """The facts of a topic."""
        ...

    async def topics(self) -> Sequence[str]:
        """The topics that have facts."""
        ...

    async def wait(self, topic: str, partition: int, *, beyond: Position | None, timeout_s: float) -> bool:
        """Wait until the pointer is beyond this position; False when the time ran out first."""
        ...


class TagReader(Protocol):
    """What queries by tag read."""

    async def tag_rows(
        self, tag: str, *, after: TagPlace | None, from_ms: int, until_ms: int, limit: int
    ) -> Sequence[TagRow]:
        """The next rows of a tag behind `after`, with from_ms ≤ time < until_ms, in order of their place.

        At most `limit`; empty only where there are none at all. Buckets are the adapter's business.
        """
        ...

    def tags(self) -> AsyncIterator[str]:
        """The tags that have rows, each once, in order; a store may also name those that had some."""
        ...

    async def pointers(self, topic: str) -> Mapping[int, Pointer]:
        """How far each partition of a topic is replicated; those that never were are absent."""
        ...

    async def wait_any(self, *, timeout_s: float, since: int = -1) -> int:
        """Wait until some pointer may have moved since then, or the time ran out; returns the next call's `since`."""
        ...


class Split(msgspec.Struct, frozen=True, gc=False):
    """A part of a topic's rows. What its ends mean is the adapter's business."""

    low: str
    high: str


class StoreScanner(Protocol):
    """What jobs read that look at everything, each worker at a part."""

    async def splits(self, topic: str, *, count: int) -> Sequence[Split]:
        """Parts that can be read apart, at most `count`; together they are all of the topic."""
        ...

    def heads_in(self, topic: str, split: Split) -> AsyncIterator[Sequence[tuple[str, Head]]]:
        """Pages of a part's heads, graves included, by id."""
        ...

    def events_in(self, topic: str, split: Split) -> AsyncIterator[Sequence[tuple[str, EventRow]]]:
        """Pages of a part's event rows as they lie there, by id: whether one counts, its head tells.

        The rows of an id may lie in several parts, and its head in yet another.
        """
        ...


class StoreWriter(StoreReader, TagReader, StoreScanner, Protocol):
    """What the pipeline, and the few explicit acts of an app, write."""

    async def apply(self, writes: SliceWrites) -> None:
        """Carry out a slice: per key each write acknowledged before the next, the pointer after all keys.

        Harmless to repeat, and harmless when it comes late.
        """
        ...

    async def mend(self, mend: Mend) -> None:
        """Put right one journal: rows that must not be there go, those that must come, then the head.

        Fenced where the partition's pointer has moved and rows carry no stamps to tell them apart.
        """
        ...

    async def save_snapshot(self, key: Key, incarnation: Position, snapshot: Snapshot, *, slots: int) -> None:
        """Keep a snapshot: the same seq_nr overwrites, then only the `slots` newest stay."""
        ...

    async def delete_snapshots(self, key: Key, incarnation: Position, *, to: int) -> None:
        """Remove the snapshots of this life up to `to`."""
        ...

    async def set_facts(self, topic: str, facts: TopicFacts, *, expected: TopicFacts | None) -> TopicFacts:
        """Compare and set; returns what holds afterwards, which may be another's."""
        ...

    async def setting(self, name: str) -> str | None:
        """A setting by name."""
        ...

    async def set_setting(self, name: str, value: str, *, expected: str | None) -> bool:
        """Compare and set a setting; False where it was not as expected."""
        ...

    def expired(self, topic: str, *, now_ms: int) -> AsyncIterator[tuple[str, Head]]:
        """Live journals whose expiry has passed, with their heads."""
        ...

    def parked(self, topic: str | None = None) -> AsyncIterator[Parked]:
        """Records that were kept aside."""
        ...

    async def unpark(self, parked: Iterable[Parked]) -> None:
        """Forget parked records."""
        ...

    async def close(self) -> None:
        """Let go."""
        ...
