"""Compare journals in the store with the log, and repair them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import msgspec

from tidebook.core.errors import Corrupt, Fenced
from tidebook.core.event import event_tags
from tidebook.core.head import Head
from tidebook.core.key import Key
from tidebook.core.position import Position
from tidebook.core.record import read_record
from tidebook.core.repair import Damage
from tidebook.core.replication_plan import EventRow, Pointer, PositionedAction, TagPosition, TagRow, advance_time
from tidebook.core.topic_config import TopicConfig
from tidebook.log.port import Record, read_page
from tidebook.replication.journal_state import (
    Difference,
    FoldedJournal,
    JournalState,
    differences,
    fold_journal,
    is_certain,
    is_repairable,
    plan_repair,
)
from tidebook.replication.partition import LogAndStore
from tidebook.store.port import StoreWriter

PAGE = 5_000
#: The most reads of a journal that changes while it is compared.
ATTEMPTS_MAX = 10

#: A record and the log time at its offset.
TimedRecord = tuple[Record, int]


class CompareBounds(msgspec.Struct, frozen=True):
    """The records of one partition that are compared: start ≤ offset ≤ pointer."""

    start: int
    pointer: Pointer


class JournalComparer:
    """Compares journals one by one; also repairs them if `rev`, the repair revision, is not 0."""

    def __init__(
        self,
        parts: LogAndStore,
        configs: Mapping[str, TopicConfig],
        bounds: Mapping[str, Mapping[int, CompareBounds]],
        *,
        rev: int = 0,
        clear_tags: bool = True,
    ) -> None:
        self._parts = parts
        self._configs = configs
        self._bounds = bounds
        self._rev = rev
        self._clear_tags = clear_tags
        self._later: dict[tuple[str, int], LaterRecords] = {}

    def is_equal(self, key: Key, partition: int, found: JournalState, records: Sequence[TimedRecord]) -> bool:
        """Return whether a journal's stored state equals the fold of its records within the bounds."""
        through = self._bounds[key.topic][partition].pointer.position
        if found.head is not None and found.head.position > through:
            return False
        return not differences(self._fold(key, partition, found, records, through.offset), found.up_to(through))

    async def compare(
        self, key: Key, partition: int, first: JournalState, records: Sequence[TimedRecord]
    ) -> list[Difference]:
        """Return a journal's differences, after repairing them if there is a repair revision.

        The journal is read again until it does not change during a comparison; `first` is its state at the first read.
        """
        store = await self._parts.store()
        at = (key.topic, partition)
        later = self._later.setdefault(at, LaterRecords(*at, self._bounds[key.topic][partition].pointer))
        for _ in range(ATTEMPTS_MAX):
            pointer = await store.pointer(*at)
            assert pointer is not None
            found = await _read_journal_state(store, key, first)
            through = pointer.position if found.head is None else max(pointer.position, found.head.position)
            found = found.up_to(through)
            await later.read_to(self._parts, through.offset)
            records_now = [*records, *later.by_key.get(key.id.encode(), ())]
            folded = self._fold(key, partition, found, records_now, through.offset)
            if await _read_head(store, key) != found.head:
                continue
            differing = differences(folded, found)
            if not differing or not self._rev or not is_certain(folded, found):
                return differing
            try:
                await store.repair(plan_repair(folded, found, pointer, self._configs[key.topic], self._rev))
            except Fenced:
                continue
            return [msgspec.structs.replace(each, repaired=is_repairable(each, folded, found)) for each in differing]
        return [Difference("moving", *key, partition)]

    def _fold(
        self, key: Key, partition: int, found: JournalState, records: Sequence[TimedRecord], through: int
    ) -> FoldedJournal:
        """Fold the journal's records up to and including an offset."""
        config, start = self._configs[key.topic], self._bounds[key.topic][partition].start
        actions = [
            PositionedAction(
                Position(config.epoch, record.offset),
                record.timestamp_ms,
                read_record(record.value, limit_bytes=config.limit_bytes),
                time_ms,
            )
            for record, time_ms in records
            if record.offset <= through
        ]
        since = Position(config.epoch, start)
        folded = fold_journal(key, partition, found, actions, config, since, clear_tags=self._clear_tags)
        if start > 0:
            _adopt_stored_times(folded.state, found)
        return folded


class LaterRecords:
    """A partition's records after the bounds, read once."""

    def __init__(self, topic: str, partition: int, pointer: Pointer) -> None:
        self._at = (topic, partition)
        self._next = pointer.position.offset + 1
        self._time_ms = pointer.time_ms
        self.by_key: dict[bytes, list[TimedRecord]] = {}

    async def read_to(self, parts: LogAndStore, through: int) -> None:
        """Read the records up to and including an offset that the store has reached."""
        log = await parts.log()
        while self._next <= through:
            page = await read_page(log, *self._at, start=self._next, stop=through + 1, limit=PAGE)
            for record in page.records:
                action = read_record(record.value, limit_bytes=2**31)
                self._time_ms = advance_time(self._time_ms, record.timestamp_ms, action)
                if record.key is not None:
                    self.by_key.setdefault(record.key, []).append((record, self._time_ms))
            self._next = page.next_offset


def _adopt_stored_times(wanted: JournalState, found: JournalState) -> None:
    """Copy the rows' log times from the store: they depend on earlier records, which the log no longer has."""
    for seq_nr, row in wanted.rows.items():
        other = found.rows.get(seq_nr)
        if other is not None and other.position == row.position:
            wanted.rows[seq_nr] = msgspec.structs.replace(row, time_ms=other.time_ms)
    tags = wanted.tags.values()
    wanted.tags = {}
    for tag_row in tags:
        event = wanted.rows.get(tag_row.seq_nr)
        if event is not None:
            tag_row = msgspec.structs.replace(tag_row, time_ms=event.time_ms)
        wanted.tags[tag_row.place] = tag_row


async def _read_journal_state(store: StoreWriter, key: Key, first: JournalState) -> JournalState:
    """Read a journal from the store again, including rows beyond its head that the first read found."""
    head, damaged = None, []
    try:
        head = await store.head(key)
    except Corrupt as error:
        damaged.append(Damage("head", *key, str(error)))
    found = JournalState(head)
    any_head = head or first.head
    if any_head is None or first.damaged_rows:
        # Without a head the segments are not known, and a page with a damaged row cannot be read.
        found.rows = dict(first.rows)
        damaged += (each for each in first.damaged if each.what == "event")
    else:
        found.rows = await _read_rows(store, key, any_head, first)
    damaged += await _read_tags(store, key, first, found)
    found.damaged = tuple(damaged)
    return found


async def _read_rows(store: StoreWriter, key: Key, any_head: Head, first: JournalState) -> dict[int, EventRow]:
    found: dict[int, EventRow] = {}
    after = 0
    while page := await store.events(key, any_head, after=after, to=any_head.seq_nr, limit=PAGE):
        found.update((row.seq_nr, row) for row in page)
        after = page[-1].seq_nr
    # Rows after the head's last number, or in segments that the head does not list, are read one by one.
    all_segments = msgspec.structs.replace(any_head, run_start=0, jumps=())
    for number in sorted(first.rows.keys() - found.keys()):
        page = await store.events(key, all_segments, after=number - 1, to=number, limit=1)
        found.update((row.seq_nr, row) for row in page)
    return found


async def _read_head(store: StoreWriter, key: Key) -> Head | None:
    try:
        return await store.head(key)
    except Corrupt:
        return None


async def _read_tags(store: StoreWriter, key: Key, first: JournalState, found: JournalState) -> list[Damage]:
    """Add the tag rows that the first read found or that the events' tags imply; return the damaged ones."""
    moments = {(place.tag, place.time_ms) for place in (*first.tags, *first.damaged_tags)}
    for row in [*first.rows.values(), *found.rows.values()]:
        try:
            moments |= {(tag, row.time_ms) for tag in event_tags(row.encoded)}
        except Corrupt:
            continue  # the first read has found the tag rows of a damaged event
    rows = [row for of_tag in await asyncio.gather(*(_tag_rows(store, *each) for each in moments)) for row in of_tag]
    found.tags = {row.place: row for row in rows if isinstance(row, TagRow) and (row.topic, row.id) == key}
    return [row for row in rows if isinstance(row, Damage) and row.place in first.damaged_tags]


async def _tag_rows(store: StoreWriter, tag: str, ms: int) -> list[TagRow | Damage]:
    """Return the rows of a tag at one time; a single append may have more of them than a page."""
    rows: list[TagRow | Damage] = []
    after: TagPosition | None = None
    while page := await store.inspect_tag(tag, after=after, from_ms=ms, until_ms=ms + 1, limit=PAGE):
        rows += page
        after = page[-1].place
        if len(page) < PAGE:
            break
    return rows
