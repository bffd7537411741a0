"""Rebuild the rows of a tag from the journals: write the missing rows, and remove those without an event."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

import msgspec

from tidebook.core.errors import Fenced, NotFound
from tidebook.core.event import event_tags
from tidebook.core.head import Head
from tidebook.core.key import Key, partition_of
from tidebook.core.repair import Repair
from tidebook.core.replication_plan import EventRow, Pointer, TagRow, tag_row
from tidebook.core.topic_config import TopicConfig
from tidebook.store.port import StoreWriter, next_repair_revision
from tidebook.tags.event import check_tag

PAGE_EVENTS = 1000
#: Attempts per page while replication moves the pointer.
ATTEMPTS_MAX = 100
END_MS = 2**62


class Rebuilt(msgspec.Struct, frozen=True):
    """The counts of a rebuild."""

    tag: str
    journals: int = 0
    written: int = 0
    removed: int = 0


async def rebuild_tag(store: StoreWriter, tag: str, topics: Iterable[str] | None = None, *, clear: bool) -> Rebuilt:
    """Write the rows of a tag again from the journals in the store, and remove rows without an event.

    Replication may continue meanwhile. Without `clear`, rows of deleted and purged events are kept.
    """
    check_tag(tag)
    journals = written = removed = 0
    for topic in sorted(topics) if topics is not None else await store.topics():
        config = await _topic_config(store, topic)
        rebuild = _Rebuild(store, topic, tag, config, await next_repair_revision(store, [topic]))
        for split in await store.splits(topic, count=1):
            async for page in store.heads_in(topic, split):
                for id, head in page:
                    if head.live and head.tag_counts.get(tag):
                        journals += 1
                        written += await rebuild.write(Key(topic, id), head)
        removed += await rebuild.remove_stale(tag, clear=clear)
    return Rebuilt(tag, journals, written, removed)


async def remove_stale_rows(store: StoreWriter, tag: str, topic: str, *, rev: int, clear: bool) -> int:
    """Remove the rows of a tag in a topic that have no event; return their number. See `rebuild_tag`."""
    config = await _topic_config(store, topic)
    return await _Rebuild(store, topic, tag, config, rev).remove_stale(tag, clear=clear)


async def write_journal(store: StoreWriter, key: Key, config: TopicConfig, *, rev: int) -> int:
    """Write the rows of all tags of one journal again, page by page; return their number."""
    return await _Rebuild(store, key.topic, None, config, rev).write(key, await store.head(key))


async def _topic_config(store: StoreWriter, topic: str) -> TopicConfig:
    config = await store.topic_config(topic)
    if config is None:
        raise NotFound(f"topic {topic} is not in the store")
    return config


class _Rebuild(msgspec.Struct, frozen=True):
    """Writes and removes the rows of one tag, or of all tags, of one topic."""

    store: StoreWriter
    topic: str
    tag: str | None
    config: TopicConfig
    rev: int

    async def write(self, key: Key, head: Head | None) -> int:
        """Write the rows of one journal; return their number."""
        for _ in range(ATTEMPTS_MAX):
            if head is None or not head.live:
                return 0  # purged in the meantime
            written = await self._write_incarnation(key, head)
            if written is not None:
                return written
            head = await self.store.head(key)
        raise _too_busy(key)

    async def _write_incarnation(self, key: Key, head: Head) -> int | None:
        """Write a journal's rows as of this head; return None if some of its events were deleted meanwhile."""
        # Deletes remove events from the front, so the remaining ones are numbered from the end: count them first.
        numbers = {tag: count + 1 for tag, count in head.tag_counts.items()}
        async for tagged in self._tagged(key, head):
            for _, tag in tagged:
                numbers[tag] -= 1
        written = 0
        async for tagged in self._tagged(key, head):
            rows = []
            for row, tag in tagged:
                rows.append(tag_row(tag, key, self._partition(key), head.incarnation, numbers[tag], row))
                numbers[tag] += 1
            if rows and not await self._repair(key, rows, head):
                return None
            written += len(rows)
        return written

    async def _tagged(self, key: Key, head: Head) -> AsyncIterator[list[tuple[EventRow, str]]]:
        async for page in self._events(key, head, after=head.delete_to, to=head.seq_nr):
            yield [(row, tag) for row in page for tag in event_tags(row.encoded) if self.tag in (None, tag)]

    async def _events(self, key: Key, head: Head, *, after: int, to: int) -> AsyncIterator[Sequence[EventRow]]:
        while page := await self.store.events(key, head, after=after, to=to, limit=PAGE_EVENTS):
            yield page
            after = page[-1].seq_nr

    async def _repair(self, key: Key, rows: Sequence[TagRow], as_of: Head) -> bool:
        """Write rows, if the head still shows that no event was deleted: a delete changes it before the events."""
        for _ in range(ATTEMPTS_MAX):
            pointer, head = await self._read_state(key)
            if head is None or not head.live or pointer is None:
                return False
            if (head.incarnation, head.delete_to) != (as_of.incarnation, as_of.delete_to):
                return False
            if await self._apply(key, pointer, head, tags=tuple(rows)):
                return True
        raise _too_busy(key)

    def _partition(self, key: Key) -> int:
        return partition_of(key.id, self.config.partitions)

    async def _read_state(self, key: Key) -> tuple[Pointer | None, Head | None]:
        """Read the pointer, then the head: the head includes everything that the pointer has passed."""
        pointer = await self.store.pointer(key.topic, self._partition(key))
        return pointer, await self.store.head(key)

    async def _apply(self, key: Key, pointer: Pointer, head: Head, **changes: Any) -> bool:
        repair = Repair(key=key, partition=self._partition(key), pointer=pointer, rev=self.rev, head=head, **changes)
        try:
            await self.store.repair(repair)
        except Fenced:
            return False  # replication was faster: read again
        return True

    async def remove_stale(self, tag: str, *, clear: bool) -> int:
        """Remove the rows of the tag without an event; return their number."""
        removed = 0
        after = None
        while True:
            pointers = await self.store.pointers(self.topic)
            page = await self.store.tag_rows(tag, after=after, from_ms=0, until_ms=END_MS, limit=PAGE_EVENTS)
            if not page:
                return removed
            after = page[-1].place
            by_id: dict[str, list[TagRow]] = {}
            for row in page:
                pointer = pointers.get(row.partition)
                # Rows after the pointer may still be written.
                if row.topic == self.topic and pointer is not None and row.position <= pointer.position:
                    by_id.setdefault(row.id, []).append(row)
            for id, rows in by_id.items():
                removed += await self._remove_from(Key(self.topic, id), rows, clear=clear)

    async def _remove_from(self, key: Key, rows: Sequence[TagRow], *, clear: bool) -> int:
        for _ in range(ATTEMPTS_MAX):
            pointer, head = await self._read_state(key)
            extra = tuple([row.place for row in await self._stale(key, head, rows, clear=clear)])
            if not extra:
                return 0
            if pointer is None:
                raise NotFound(f"{key}: its partition was never replicated, but has tag rows")
            at = pointer.position
            # The store has no head of this journal: a grave lets the next append start it.
            grave = Head(False, 0, 0, at, at, self.config.segment_size, None, 0, (), None, ())
            if await self._apply(key, pointer, head or grave, extra_tags=extra):
                return len(extra)
        raise _too_busy(key)

    async def _stale(self, key: Key, head: Head | None, rows: Sequence[TagRow], *, clear: bool) -> Sequence[TagRow]:
        """Return the rows without an event; rows of deleted and purged events are only included with `clear`."""
        if head is None:
            return rows
        current = [
            row for row in rows if head.live and row.incarnation == head.incarnation and row.seq_nr > head.delete_to
        ]
        stale = [row for row in rows if clear and row not in current]
        if current:
            numbers = {row.seq_nr for row in current}
            found: dict[int, EventRow] = {}
            async for page in self._events(key, head, after=min(numbers) - 1, to=max(numbers)):
                found.update((event.seq_nr, event) for event in page if event.seq_nr in numbers)
            stale += [row for row in current if not self._matches(row, found.get(row.seq_nr))]
        return stale

    def _matches(self, row: TagRow, event: EventRow | None) -> bool:
        if event is None or row.tag not in event_tags(event.encoded):
            return False
        position = (event.time_ms, event.position, event.index, partition_of(row.id, self.config.partitions))
        return position == (row.time_ms, row.position, row.index, row.partition)


def _too_busy(key: Key) -> Fenced:
    return Fenced(
        f"{key}: replication changes it faster than its tag can be rebuilt: stop replication during the rebuild"
    )
