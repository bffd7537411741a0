"""One tag's stream made anew from the journals: what is missing comes, what does not belong there goes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence

import msgspec

from tidebook.core.errors import Fenced, NotFound
from tidebook.core.event import event_tags
from tidebook.core.head import Head
from tidebook.core.key import Key, partition_of
from tidebook.core.mend import Mend
from tidebook.core.replication import EventRow, Pointer, TagRow, tag_row
from tidebook.core.topic import TopicFacts
from tidebook.store.port import StoreWriter
from tidebook.store.revision import next_rev
from tidebook.tags.asked import check_tag

PAGE_EVENTS = 1000
#: How often one page is tried while the replication moves the pointer under it.
TRIES_MAX = 100
END_MS = 2**62


class Rebuilt(msgspec.Struct, frozen=True):
    """How much a rebuild did."""

    tag: str
    journals: int = 0
    written: int = 0
    removed: int = 0


async def rebuild_tag(store: StoreWriter, tag: str, topics: Iterable[str] | None = None, *, clear: bool) -> Rebuilt:
    """Write the rows of a tag again from the journals in the store, and remove those that no journal speaks of.

    Replication may go on meanwhile. Without `clear`, rows of deleted and purged events are left where they are.
    """
    check_tag(tag)
    journals = written = removed = 0
    for topic in sorted(topics) if topics is not None else await store.topics():
        facts = await store.facts(topic)
        if facts is None:
            raise NotFound(f"topic {topic}: the store has nothing of it")
        work = _Topic(store, tag, topic, facts, await next_rev(store, [topic]), clear=clear)
        async for rows in work.write_journals():
            journals, written = journals + 1, written + rows
        removed += await work.remove_others()
    return Rebuilt(tag, journals, written, removed)


async def remove_stale(store: StoreWriter, tag: str, topic: str, *, rev: int, clear: bool) -> int:
    """Remove the rows of a tag in a topic that no journal speaks of; how many. See `rebuild_tag`."""
    facts = await store.facts(topic)
    if facts is None:
        raise NotFound(f"topic {topic}: the store has nothing of it")
    return await _Topic(store, tag, topic, facts, rev, clear=clear).remove_others()


async def write_journal(store: StoreWriter, key: Key, facts: TopicFacts, *, rev: int) -> int:
    """Write the rows of all tags of one journal again, page by page; how many."""
    return await _Journals(store, None, facts, rev).write(key, await store.head(key))


class _Journals:
    """Writes the rows of one tag, or of all, from journals of one topic."""

    def __init__(self, store: StoreWriter, tag: str | None, facts: TopicFacts, rev: int) -> None:
        self._store = store
        self._of = tag
        self._facts = facts
        self._rev = rev

    async def write(self, key: Key, head: Head | None) -> int:
        """Write the rows of one journal; how many."""
        for _ in range(TRIES_MAX):
            if head is None or not head.live:
                return 0  # purged meanwhile
            written = await self._write_life(key, head)
            if written is not None:
                return written
            head = await self._store.head(key)
        raise self._moving(key)

    async def _write_life(self, key: Key, head: Head) -> int | None:
        """Write a journal's rows as of this head; None where some of its events were deleted meanwhile."""
        # Deletes take events from the front, so those that remain are numbered from the end: counted first.
        numbers = {tag: count + 1 for tag, count in head.tag_counts.items()}
        async for tagged in self._tagged(key, head):
            for _, tag in tagged:
                numbers[tag] -= 1
        written = 0
        partition = partition_of(key.id, self._facts.partitions)
        async for tagged in self._tagged(key, head):
            rows = []
            for row, tag in tagged:
                rows.append(tag_row(tag, key, partition, head.incarnation, numbers[tag], row))
                numbers[tag] += 1
            if rows and not await self._mend(key, rows, head):
                return None
            written += len(rows)
        return written

    async def _tagged(self, key: Key, head: Head) -> AsyncIterator[list[tuple[EventRow, str]]]:
        after = head.delete_to
        while page := await self._store.events(key, head, after=after, to=head.seq_nr, limit=PAGE_EVENTS):
            yield [(row, tag) for row in page for tag in event_tags(row.kept) if self._of in (None, tag)]
            after = page[-1].seq_nr

    async def _mend(self, key: Key, rows: Sequence[TagRow], of: Head) -> bool:
        """Write rows, if the head still shows that no event was deleted: a head tells it before events go."""
        for _ in range(TRIES_MAX):
            pointer, head = await self._look(key)
            if head is None or not head.live or pointer is None:
                return False
            if (head.incarnation, head.delete_to) != (of.incarnation, of.delete_to):
                return False
            if await self._carry_out(key, pointer, head, tags=tuple(rows)):
                return True
        raise self._moving(key)

    async def _look(self, key: Key) -> tuple[Pointer | None, Head | None]:
        """The pointer, then the head: what the pointer has passed is in the head."""
        pointer = await self._store.pointer(key.topic, partition_of(key.id, self._facts.partitions))
        return pointer, await self._store.head(key)

    async def _carry_out(self, key: Key, pointer: Pointer, head: Head, **what: object) -> bool:
        partition = partition_of(key.id, self._facts.partitions)
        mend = Mend(key=key, partition=partition, pointer=pointer, rev=self._rev, head=head, **what)  # type: ignore[arg-type]
        try:
            await self._store.mend(mend)
        except Fenced:
            return False  # the replication was quicker: look again
        return True

    def _moving(self, key: Key) -> Fenced:
        return Fenced(f"{key}: it moves faster than its tag can be written: stop the replication meanwhile")


class _Topic(_Journals):
    """A tag's rows of one topic."""

    def __init__(self, store: StoreWriter, tag: str, topic: str, facts: TopicFacts, rev: int, *, clear: bool) -> None:
        super().__init__(store, tag, facts, rev)
        self._tag = tag
        self._topic = topic
        self._clear = clear

    async def write_journals(self) -> AsyncIterator[int]:
        """Each journal that has the tag, by how many rows it has."""
        for split in await self._store.splits(self._topic, count=1):
            async for page in self._store.heads_in(self._topic, split):
                for id, head in page:
                    if head.live and head.tag_counts.get(self._tag):
                        yield await self.write(Key(self._topic, id), head)

    async def remove_others(self) -> int:
        """Remove the rows that no journal speaks of; returns how many."""
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
                # What the pointer has not passed may still be on its way.
                if row.topic == self._topic and pointer is not None and row.position <= pointer.position:
                    by_id.setdefault(row.id, []).append(row)
            for id, rows in by_id.items():
                removed += await self._remove_from(Key(self._topic, id), rows)

    async def _remove_from(self, key: Key, rows: Sequence[TagRow]) -> int:
        for _ in range(TRIES_MAX):
            pointer, head = await self._look(key)
            extra = tuple(row.place for row in await self._extra(key, head, rows))
            if not extra:
                return 0
            if pointer is None:
                raise NotFound(f"{key}: its partition was never replicated, and its tag rows are there")
            at = pointer.position
            # A journal that the store knows nothing of: a grave lets the next append begin it.
            grave = Head(False, 0, 0, at, at, self._facts.segment_size, None, 0, (), None, ())
            if await self._carry_out(key, pointer, head or grave, extra_tags=extra):
                return len(extra)
        raise self._moving(key)

    async def _extra(self, key: Key, head: Head | None, rows: Sequence[TagRow]) -> list[TagRow]:
        if head is None:
            return list(rows)
        alive = [row for row in rows if head.live and row.incarnation == head.incarnation]
        gone = [row for row in rows if row not in alive or row.seq_nr <= head.delete_to]
        extra = gone if self._clear else []
        alive = [row for row in alive if row.seq_nr > head.delete_to]
        if alive:
            events = await self._events(key, head, {row.seq_nr for row in alive})
            extra += [row for row in alive if not self._is_of(row, events.get(row.seq_nr))]
        return extra

    async def _events(self, key: Key, head: Head, numbers: set[int]) -> dict[int, EventRow]:
        found: dict[int, EventRow] = {}
        after, to = min(numbers) - 1, max(numbers)
        while page := await self._store.events(key, head, after=after, to=to, limit=PAGE_EVENTS):
            found.update((row.seq_nr, row) for row in page if row.seq_nr in numbers)
            after = page[-1].seq_nr
        return found

    def _is_of(self, row: TagRow, event: EventRow | None) -> bool:
        if event is None or self._tag not in event_tags(event.kept):
            return False
        partition = partition_of(row.id, self._facts.partitions)
        place = (event.time_ms, event.position, event.index, partition)
        return place == (row.time_ms, row.position, row.index, row.partition)
