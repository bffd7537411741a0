"""The port of the store: the replicated state of the journals, for applications, tag queries, jobs and repair.

`tidebook.store.cassandra` and `tidebook.store.sqlite` implement it; `tidebook.testing.conformance.store` tests its
contract. The roles are separate protocols, so that an application's read path cannot write what replication owns.

Terms: a *head* is the summary row of a journal. A *grave* is the head of a purged journal, kept so that a late or
repeated slice cannot bring its events back. An *incarnation* is a journal from its creation to its purge, identified by
the position of the record that created it. A *pointer* is how far a partition of the log has been replicated.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Protocol

import msgspec

from tidebook.core.head import Head
from tidebook.core.key import Key
from tidebook.core.position import Position
from tidebook.core.repair import REV_MAX, Damage, Repair
from tidebook.core.replication_plan import (
    EventRow,
    Parked,
    Pointer,
    SliceWrites,
    TagPosition,
    TagRow,
    TopicPosition,
    TopicRow,
)
from tidebook.core.topic_config import TopicConfig


class StoredSnapshot(msgspec.Struct, frozen=True, gc=False):
    """A state that an application saved, as of `seq_nr` in one incarnation of its journal."""

    seq_nr: int
    payload_type: int
    payload: bytes
    timestamp_ms: int


class StoreReader(Protocol):
    """The reads of applications.

    Every failure is a TidebookError: `Unavailable` (the call can be retried), `Corrupt` (a row cannot be decoded) or
    `InvalidInput` (an argument is wrong, or the store was opened before this process forked).
    """

    async def pointer(self, topic: str, partition: int) -> Pointer | None:
        """Return how far a partition is replicated, or None if it never was.

        Every write of the slices up to the pointer is visible to a read that starts after this one.
        """
        ...

    async def head(self, key: Key) -> Head | None:
        """Return the head or the grave of a journal, or None if it has neither."""
        ...

    async def heads(self, topic: str, ids: Sequence[str]) -> Mapping[str, Head]:
        """Return the heads and graves of many journals of a topic by id; ids that have neither are absent."""
        ...

    async def events(self, key: Key, head: Head, *, after: int, to: int, limit: int) -> Sequence[EventRow]:
        """Return the first rows with `after` < seq_nr ≤ `to`, in ascending order, at most `limit` of them.

        The result may be shorter than `limit`, but is empty only if there is no such row: to read on, call again with
        the last seq_nr as `after`. Gaps in the numbers and empty segments are skipped here. `head` is the journal's
        head as the caller has read it.
        """
        ...

    def ids(self, topic: str) -> AsyncIterator[str]:
        """Yield the ids of a topic's live journals, each once, in no particular order."""
        ...

    async def snapshots(self, key: Key, incarnation: Position) -> Sequence[StoredSnapshot]:
        """Return the snapshots of one incarnation of a journal, in descending order of seq_nr."""
        ...

    async def topic_config(self, topic: str) -> TopicConfig | None:
        """Return the configuration of a topic, or None if it was never set."""
        ...

    async def topics(self) -> Sequence[str]:
        """Return the names of the topics that have a configuration."""
        ...

    async def wait(self, topic: str, partition: int, *, beyond: Position | None, timeout_s: float) -> bool:
        """Return True as soon as the partition's pointer is after `beyond`, or False after `timeout_s`.

        If `beyond` is None, wait for the partition's first pointer.
        """
        ...


class TagReader(Protocol):
    """The reads of queries by tag, and of streams of whole topics."""

    #: Whether `topic_rows` is supported; otherwise a topic is read from the log.
    orders_topics: bool

    async def tag_rows(
        self, tag: str, *, after: TagPosition | None, from_ms: int, until_ms: int, limit: int
    ) -> Sequence[TagRow]:
        """Return the first rows of a tag after `after`, with `from_ms` ≤ time_ms < `until_ms`, in order of TagPosition.

        There are at most `limit` of them. The result may be shorter, but is empty only if there is no such row: to
        read on, call again with the last row's place as `after`.
        """
        ...

    async def topic_rows(
        self, topic: str, *, after: TopicPosition | None, until_ms: int, limit: int
    ) -> Sequence[TopicRow]:
        """Return the first events of a topic after `after`, with time_ms < `until_ms`, in order of TopicPosition.

        The result may be shorter than `limit`, but is empty only if there is no such row. Raise InvalidInput if
        `orders_topics` is False.
        """
        ...

    def tags(self) -> AsyncIterator[str]:
        """Yield the tags that have rows, each once, in ascending order; tags that used to have rows may be included."""
        ...

    async def pointers(self, topic: str) -> Mapping[int, Pointer]:
        """Return the pointer of each partition of a topic; partitions that were never replicated are absent."""
        ...

    async def replicated_ms(self) -> int:
        """Return the greatest log time of all pointers, or 0 if there are none."""
        ...

    async def wait_any(self, *, timeout_s: float, since: int = -1) -> int:
        """Return once any pointer may have moved after the call that returned `since`, or after `timeout_s`.

        Read the pointers after each call, because it may return although none has moved: an adapter without wake-ups
        returns after a polling interval, which grows with `since`. Pass the result as the next `since`, so that no
        move between two calls is missed, or -1 to start with the shortest wait.
        """
        ...


class ScanSplit(msgspec.Struct, frozen=True, gc=False):
    """A part of a topic's rows that a worker scans. Only the adapter that created it interprets `low` and `high`."""

    low: str
    high: str


class StoreScanner(Protocol):
    """Full scans of a topic, split among the workers of a job."""

    async def splits(self, topic: str, *, count: int) -> Sequence[ScanSplit]:
        """Return at most `count` disjoint splits that together cover all rows of the topic."""
        ...

    def heads_in(self, topic: str, split: ScanSplit) -> AsyncIterator[Sequence[tuple[str, Head]]]:
        """Yield pages of the split's heads and graves, each with the id of its journal."""
        ...

    def events_in(self, topic: str, split: ScanSplit) -> AsyncIterator[Sequence[tuple[str, EventRow]]]:
        """Yield pages of the split's event rows as they are stored, each with the id of its journal.

        Rows that the journal's head has deleted, or that belong to an earlier incarnation, are included: the caller
        filters them by the head. The rows of one journal may be in several splits, and its head in another one.
        """
        ...


class StoreInspector(Protocol):
    """The scans of a repair, which return a row that cannot be decoded as `Damage` instead of raising Corrupt."""

    def inspect(self, topic: str, split: ScanSplit) -> AsyncIterator[Sequence[tuple[str, Head | EventRow | Damage]]]:
        """Yield the pages of `heads_in`, then those of `events_in`."""
        ...

    async def inspect_tag(
        self, tag: str, *, after: TagPosition | None, from_ms: int, until_ms: int, limit: int
    ) -> Sequence[TagRow | Damage]:
        """Return the same rows as `tag_rows`; a `Damage` has its row's place, for the next call's `after`."""
        ...


class StoreWriter(StoreReader, TagReader, StoreScanner, StoreInspector, Protocol):
    """The writes of the pipeline, and the few explicit ones of an application: snapshots, configuration, settings.

    A write may also raise `OutcomeUnknown`: it may or may not have taken effect. Repeating a write is safe; after an
    unknown outcome of `set_setting`, read the setting first, since the repeated call may find its own value.
    """

    #: Whether `delete_topic` is supported.
    deletes_topics: bool

    async def apply(self, writes: SliceWrites) -> None:
        """Apply the writes of a slice: those of each key in order, one durable before the next, and the pointer last.

        Idempotent. A slice that is late (the pointer has moved since the slice was planned) changes nothing that is
        newer: the adapter either drops its outdated writes or raises Fenced without applying any. The pointer never
        moves back. Raise NotFound if the adapter needs the topic's configuration and there is none, and Fenced if
        the adapter deletes topics and this one was deleted or created again since (`writes.topic_id`).
        """
        ...

    async def repair(self, repair: Repair) -> None:
        """Repair one journal: write its missing and damaged rows, delete the extra ones, and write the head last.

        Nothing that was replicated after `repair.pointer` is overwritten: a store without timestamps per row raises
        Fenced if the partition's pointer is not `repair.pointer`. Raise NotFound as `apply` does.
        """
        ...

    async def save_snapshot(self, key: Key, incarnation: Position, snapshot: StoredSnapshot, *, slots: int) -> None:
        """Save a snapshot, replacing one of the same seq_nr; then keep the `slots` with the greatest seq_nr.

        The others of this incarnation are deleted. If only that fails, this raises nothing, and the next save deletes
        them. An adapter may raise TooLarge for a payload over its limit.
        """
        ...

    async def delete_snapshots(self, key: Key, incarnation: Position, *, to: int) -> None:
        """Delete the snapshots of this incarnation with seq_nr ≤ `to`."""
        ...

    async def set_topic_config(self, topic: str, config: TopicConfig, *, expected: TopicConfig | None) -> TopicConfig:
        """Set a topic's configuration if it equals `expected` (None: it has none); return the one in force afterwards.

        If another process was faster, the result is its configuration: compare it with `config`. Raise
        NotFound if `expected` is not None and there is no configuration, and InvalidInput or TooLarge if the adapter
        cannot support `config`.
        """
        ...

    async def delete_topic(self, topic: str) -> None:
        """Delete all rows of a topic; raise InvalidInput if `deletes_topics` is False."""
        ...

    async def setting(self, name: str) -> str | None:
        """Return the value of a setting, or None if it is not set."""
        ...

    async def setting_names(self, prefix: str) -> Sequence[str]:
        """Return the names of the settings that begin with a prefix, sorted."""
        ...

    async def set_setting(self, name: str, value: str, *, expected: str | None) -> bool:
        """Set a setting if its value is `expected` (None: it has none); return True if it was set."""
        ...

    def expired(self, topic: str, *, now_ms: int) -> AsyncIterator[tuple[str, Head]]:
        """Yield the ids and heads of the live journals with expires_at_ms ≤ `now_ms`."""
        ...

    def graves(self, topic: str) -> AsyncIterator[tuple[str, Head]]:
        """Yield the ids and graves of a topic's purged journals."""
        ...

    async def remove_graves(self, topic: str, graves: Sequence[tuple[str, Head]]) -> None:
        """Delete graves, each only if it is still the journal's head: a new incarnation is not affected.

        The caller has checked each with `may_remove_grave`: without its grave, a late slice could restore the journal.
        """
        ...

    def parked(self, topic: str | None = None) -> AsyncIterator[Parked]:
        """Yield the parked records of one topic or of all."""
        ...

    async def unpark(self, parked: Iterable[Parked]) -> None:
        """Delete parked records."""
        ...

    async def close(self) -> None:
        """Release all resources. A second call does nothing."""
        ...


async def next_repair_revision(store: StoreWriter, topics: Iterable[str]) -> int:
    """Reserve and return a revision above those of all earlier repairs of these topics.

    After REV_MAX repairs of a topic every further one gets REV_MAX, and overrides an earlier one only at a later
    position of the log.
    """
    revs = [1]
    for topic in topics:
        name = f"rev/{topic}"
        while True:
            current = await store.setting(name)
            rev = min(int(current or 0) + 1, REV_MAX)
            if await store.set_setting(name, str(rev), expected=current):
                break
        revs.append(rev)
    return max(revs)
