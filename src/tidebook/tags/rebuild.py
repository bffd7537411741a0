"""Rebuild the rows of a tag from the journals: write the missing rows, and remove those without an event."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence

import msgspec

from tidebook.core.errors import Fenced, NotFound
from tidebook.core.event import event_tags
from tidebook.core.head import Head
from tidebook.core.key import Key, partition_of
from tidebook.core.repair import Repair
from tidebook.core.replication_plan import EventRow, Pointer, TagRow, tag_row
from tidebook.core.topic_config import TopicConfig
from tidebook.store.port import StoreWriter, next_repair_revision
from tidebook.tags.validation import check_tag

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
        config = await store.topic_config(topic)
        if config is None:
            raise NotFound(f"topic {topic}: the store has nothing of it")
        work = _Topic(store, tag, topic, config, await next_repair_revision(store, [topic]), clear=clear)
        async for rows in work.write_journals():
            journals, written = journals + 1, written + rows
        removed += await work.remove_stale()
    return Rebuilt(tag, journals, written, removed)


async def remove_stale_rows(store: StoreWriter, tag: str, topic: str, *, rev: int, clear: bool) -> int:
    """Remove the rows of a tag in a topic that have no event; return their number. See `rebuild_tag`."""
    config = await store.topic_config(topic)
    if config is None:
        raise NotFound(f"topic {topic}: the store has nothing of it")
    return await _Topic(store, tag, topic, config, rev, clear=clear).remove_stale()


async def write_journal(store: StoreWriter, key: Key, config: TopicConfig, *, rev: int) -> int:
    """Write the rows of all tags of one journal again, page by page; return their number."""
    return await _Journals(store, None, config, rev).write(key, await store.head(key))


class _Journals:
    """Writes the rows of one tag, or of all tags, from journals of one topic."""

    def __init__(self, store: StoreWriter, tag: str | None, config: TopicConfig, rev: int) -> None:
        self._store = store
        self._only_tag = tag
        self._config = config
        self._rev = rev

    async def write(self, key: Key, head: Head | None) -> int:
        """Write the rows of one journal; return their number."""
        for _ in range(ATTEMPTS_MAX):
            if head is None or not head.live:
                return 0  # purged in the meantime
            written = await self._write_incarnation(key, head)
            if written is not None:
                return written
            head = await self._store.head(key)
        raise self._too_busy(key)

    async def _write_incarnation(self, key: Key, head: Head) -> int | None:
        """Write a journal's rows as of this head; return None if some of its events were deleted meanwhile."""
        # Deletes remove events from the front, so the remaining ones are numbered from the end: count them first.
        numbers = {tag: count + 1 for tag, count in head.tag_counts.items()}
        async for tagged in self._tagged(key, head):
            for _, tag in tagged:
                numbers[tag] -= 1
        written = 0
        partition = partition_of(key.id, self._config.partitions)
        async for tagged in self._tagged(key, head):
            rows = []
            for row, tag in tagged:
                rows.append(tag_row(tag, key, partition, head.incarnation, numbers[tag], row))
                numbers[tag] += 1
            if rows and not await self._repair(key, rows, head):
                return None
            written += len(rows)
        return written

    async def _tagged(self, key: Key, head: Head) -> AsyncIterator[list[tuple[EventRow, str]]]:
        after = head.delete_to
        while page := await self._store.events(key, head, after=after, to=head.seq_nr, limit=PAGE_EVENTS):
            yield [(row, tag) for row in page for tag in event_tags(row.kept) if self._only_tag in (None, tag)]
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
        raise self._too_busy(key)

    async def _read_state(self, key: Key) -> tuple[Pointer | None, Head | None]:
        """Read the pointer, then the head: the head includes everything that the pointer has passed."""
        pointer = await self._store.pointer(key.topic, partition_of(key.id, self._config.partitions))
        return pointer, await self._store.head(key)

    async def _apply(self, key: Key, pointer: Pointer, head: Head, **what: object) -> bool:
        partition = partition_of(key.id, self._config.partitions)
        repair = Repair(key=key, partition=partition, pointer=pointer, rev=self._rev, head=head, **what)  # type: ignore[arg-type]
        try:
            await self._store.repair(repair)
        except Fenced:
            return False  # replication was faster: read again
        return True

    def _too_busy(self, key: Key) -> Fenced:
        return Fenced(
            f"{key}: replication changes it faster than its tag can be rebuilt: stop the replication meanwhile"
        )


class _Topic(_Journals):
    """Writes and removes a tag's rows of one topic."""

    def __init__(self, store: StoreWriter, tag: str, topic: str, config: TopicConfig, rev: int, *, clear: bool) -> None:
        super().__init__(store, tag, config, rev)
        self._tag = tag
        self._topic = topic
        self._clear = clear

    async def write_journals(self) -> AsyncIterator[int]:
        """Write each journal that has the tag, and yield its number of rows."""
        for split in await self._store.splits(self._topic, count=1):
            async for page in self._store.heads_in(self._topic, split):
                for id, head in page:
                    if head.live and head.tag_counts.get(self._tag):
                        yield await self.write(Key(self._topic, id), head)

    async def remove_stale(self) -> int:
        """Remove the rows without an event; return their number."""
        removed = 0
        after = None
        while True:
            pointers = await self._store.pointers(self._topic)
            page = await self._store.tag_rows(self._tag, after=after, from_ms=0, until_ms=END_MS, limit=PAGE_EVENTS)
            if not page:
                return removed
            after = page[-1].place
            by_id: dict[str, list[TagRow]] = {}
            for row in page:
                pointer = pointers.get(row.partition)
                # Rows after the pointer may still be written.
                if row.topic == self._topic and pointer is not None and row.position <= pointer.position:
                    by_id.setdefault(row.id, []).append(row)
            for id, rows in by_id.items():
                removed += await self._remove_from(Key(self._topic, id), rows)

    async def _remove_from(self, key: Key, rows: Sequence[TagRow]) -> int:
        for _ in range(ATTEMPTS_MAX):
            pointer, head = await self._read_state(key)
            extra = tuple(row.place for row in await self._extra(key, head, rows))
            if not extra:
                return 0
            if pointer is None:
                raise NotFound(f"{key}: its partition was never replicated, but has tag rows")
            at = pointer.position
            # The store has no head of this journal: a grave lets the next append start it.
            grave = Head(False, 0, 0, at, at, self._config.segment_size, None, 0, (), None, ())
            if await self._apply(key, pointer, head or grave, extra_tags=extra):
                return len(extra)
        raise self._too_busy(key)

    async def _extra(self, key: Key, head: Head | None, rows: Sequence[TagRow]) -> list[TagRow]:
        if head is None:
            return list(rows)
        current = [row for row in rows if head.live and row.incarnation == head.incarnation]
        deleted = [row for row in rows if row not in current or row.seq_nr <= head.delete_to]
        extra = deleted if self._clear else []
        current = [row for row in current if row.seq_nr > head.delete_to]
        if current:
            events = await self._events(key, head, {row.seq_nr for row in current})
            extra += [row for row in current if not self._matches(row, events.get(row.seq_nr))]
        return extra

    async def _events(self, key: Key, head: Head, numbers: set[int]) -> dict[int, EventRow]:
        found: dict[int, EventRow] = {}
        after, to = min(numbers) - 1, max(numbers)
        while page := await self._store.events(key, head, after=after, to=to, limit=PAGE_EVENTS):
            found.update((row.seq_nr, row) for row in page if row.seq_nr in numbers)
            after = page[-1].seq_nr
        return found

    def _matches(self, row: TagRow, event: EventRow | None) -> bool:
        if event is None or self._tag not in event_tags(event.kept):
            return False
        partition = partition_of(row.id, self._config.partitions)
        position = (event.time_ms, event.position, event.index, partition)
        return position == (row.time_ms, row.position, row.index, row.partition)
