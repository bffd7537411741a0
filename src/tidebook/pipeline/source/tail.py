"""The tail of a topic as Spark reads it: the records of the log that the store lacked when a query was planned.

Its events are numbered by the fold, like those of every other reader. Records of the tail may be replicated while the
query runs. A stored head then includes the records up to its position, and only later ones are folded onto it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from zlib import crc32

import msgspec

from tidebook.core.action import Append, Damaged, Delete, Mark, Purge
from tidebook.core.errors import Fenced, LogLost
from tidebook.core.event import unpack_events
from tidebook.core.fold import AppendApplied, fold
from tidebook.core.head import Head
from tidebook.core.key import Key
from tidebook.core.position import Position
from tidebook.core.replication_plan import EventRow, PositionedAction, advance_time
from tidebook.core.topic_config import TopicConfig
from tidebook.journal.view import read_action
from tidebook.log.port import Log, read_page
from tidebook.replication.event_numbers import first_seq_nrs
from tidebook.replication.slice import RecordOwners
from tidebook.store.port import StoreReader

#: The maximum number of heads that one call of the store reads.
HEADS_MAX = 5_000
PAGE_RECORDS = 5_000
#: The maximum number of records whose journals one task folds; their heads are in its memory.
RECORDS_PER_SHARE = 100_000
#: Ranges share a task up to this many records, because fewer are not worth a separate task.
RECORDS_PER_TASK = 20_000
#: How many bytes of values a task keeps in memory between its two passes over the tail; the rest is read twice.
KEPT_BYTES_MAX = 32 * 1024 * 1024

#: Actions of journals in log order, each with the id of its journal.
Actions = Sequence[tuple[str, PositionedAction]]


class TailRange(msgspec.Struct, frozen=True):
    """The records of one partition, start ≤ offset < stop, and the log time before them."""

    partition: int
    start: int
    stop: int
    time_ms: int


class TailShare(msgspec.Struct, frozen=True):
    """One of the `count` parts of a range's journals, by the upper bits of the hash of their ids.

    The hash modulo the number of partitions is the same for all journals of a partition, and so are its lower bits.
    """

    range: TailRange
    number: int = 0
    count: int = 1

    def takes(self, id: str) -> bool:
        """Return whether a journal belongs to this share."""
        return self.count == 1 or (crc32(id.encode()) >> 16) % self.count == self.number


def assign_shares(ranges: Sequence[TailRange]) -> list[list[TailShare]]:
    """Divide ranges among tasks: small ones share a task, and the journals of a large one are shared by several."""
    tasks: list[list[TailShare]] = []
    room = 0
    for each in ranges:
        records = each.stop - each.start
        count = -(-records // RECORDS_PER_SHARE)
        for number in range(count):
            if count > 1 or records > room:
                tasks.append([])
                room = RECORDS_PER_TASK
            tasks[-1].append(TailShare(each, number, count))
            room -= records
    return tasks


class Tail:
    """One range of the log, read in passes; the first pages are kept for the passes after the first."""

    def __init__(self, log: Log, topic: str, config: TopicConfig, range: TailRange) -> None:
        self.topic = topic
        self.config = config
        self.range = range
        self._log = log
        self._kept: list[Actions] = []
        self._kept_bytes = 0
        #: Where the pages that are not kept begin, and the log time there.
        self._next = (range.start, range.time_ms)

    async def pages(self) -> AsyncIterator[Actions]:
        """Yield the actions on journals, in log order; records that belong to no journal are left out.

        Raise `LogLost` if the log no longer has a record, and `Fenced` if it was replaced after the planning.
        """
        for kept in self._kept:
            yield kept
        offset, time_ms = self._next
        while offset < self.range.stop:
            keeps = offset == self._next[0] and self._kept_bytes < KEPT_BYTES_MAX
            actions, size_bytes, offset, time_ms = await self._read(offset, time_ms)
            if keeps:
                self._kept.append(actions)
                self._kept_bytes += size_bytes
                self._next = (offset, time_ms)
            yield actions

    async def _read(self, offset: int, time_ms: int) -> tuple[Actions, int, int, int]:
        topic, partition, config = self.topic, self.range.partition, self.config
        with _lost_during_the_read():
            page = await read_page(self._log, topic, partition, start=offset, stop=self.range.stop, limit=PAGE_RECORDS)
        owners = RecordOwners(partition, config)
        actions: list[tuple[str, PositionedAction]] = []
        size_bytes = 0
        for record in page.records:
            action = read_action(record, config)
            id, void = (None, None) if isinstance(action, Mark) else owners[record.key]
            time_ms = advance_time(time_ms, record.timestamp_ms, action)
            if id is None or void is not None or isinstance(action, Damaged):
                continue
            size_bytes += len(record.value or b"")
            at_position = Position(config.epoch, record.offset)
            actions.append((id, PositionedAction(at_position, record.timestamp_ms, action, time_ms)))
        return actions, size_bytes, page.next_offset, time_ms


@contextmanager
def _lost_during_the_read() -> Iterator[None]:
    try:
        yield
    except LogLost as error:
        raise LogLost(
            topic=error.topic,
            partition=error.partition,
            first=error.first,
            last=error.last,
            when="after this read was planned",
            remedy="load the table again",
        ) from error


async def check_log(log: Log, topic: str, config: TopicConfig) -> None:
    """Raise `Fenced` if the log is not the one for which a read was planned, so offsets may mean other records."""
    state = await log.topic(topic)
    if state is None or state.topic_id != config.topic_id:
        raise Fenced(f"topic {topic}: its log was replaced after this read was planned: load the table again")


def fold_onto(head: Head | None, actions: Sequence[PositionedAction], config: TopicConfig) -> Head | None:
    """Fold the actions that a stored head does not include yet onto it, and return the new head."""
    stored = head
    for each in actions:
        if stored is None or each.position > stored.position:
            head, _ = fold(head, each.action, each.position, each.timestamp_ms, config)
    return head


async def find_deletes(tail: Tail) -> dict[str, list[PositionedAction]]:
    """Return all actions of the journals that the tail deletes from or purges, without the bodies of appends."""
    changed: set[str] = set()
    async for page in tail.pages():
        changed.update(id for id, each in page if isinstance(each.action, Delete | Purge))
    found: dict[str, list[PositionedAction]] = {}
    if not changed:
        return found
    async for page in tail.pages():
        for id, each in page:
            if id in changed:
                found.setdefault(id, []).append(_without_body(each))
    return found


def _without_body(each: PositionedAction) -> PositionedAction:
    if not isinstance(each.action, Append):
        return each
    return msgspec.structs.replace(each, action=msgspec.structs.replace(each.action, body=b""))


async def tail_events(
    store: StoreReader, tail: Tail, takes: Callable[[str], bool]
) -> AsyncIterator[list[tuple[str, EventRow]]]:
    """Yield pages of the tail's events that are neither deleted nor purged by its end.

    The first pass numbers the appends and finds how each journal ends, the second one yields the events.
    """
    numbers = _TailNumbers(tail.config)
    async for page in tail.pages():
        selected = [(id, each) for id, each in page if takes(id)]
        unknown = list(dict.fromkeys(id for id, _ in selected if id not in numbers.stored))
        for i in range(0, len(unknown), HEADS_MAX):
            chunk = unknown[i : i + HEADS_MAX]
            heads = await store.heads(tail.topic, chunk)
            numbers.begin({id: heads.get(id) for id in chunk})
        for id, each in selected:
            numbers.take(id, each)
    async for page in tail.pages():
        selected = [(id, each) for id, each in page if id in numbers.stored]
        replicated = await _replicated_since(store, tail, numbers.stored, selected)
        yield [row for id, each in selected for row in numbers.rows(id, each, replicated.get(id, {}))]


class _TailNumbers:
    """Folds the journals of a tail onto their stored heads, and remembers the first number of each append."""

    def __init__(self, config: TopicConfig) -> None:
        self._config = config
        #: The store's head of each journal when its first record was read, and that head with the tail folded onto it.
        self.stored: dict[str, Head | None] = {}
        self._folded: dict[str, Head | None] = {}
        self._firsts: dict[int, int] = {}

    def begin(self, heads: Mapping[str, Head | None]) -> None:
        self.stored.update(heads)
        self._folded.update(heads)

    def take(self, id: str, each: PositionedAction) -> None:
        stored = self.stored[id]
        if stored is not None and each.position <= stored.position:
            return
        head = self._folded[id]
        self._folded[id], change = fold(head, each.action, each.position, each.timestamp_ms, self._config)
        if isinstance(change, AppendApplied):
            self._firsts[each.position.offset] = change.first

    def rows(
        self, id: str, each: PositionedAction, replicated: Mapping[Position, int]
    ) -> Iterator[tuple[str, EventRow]]:
        """Yield the events of an append, unless it is void or its events were deleted."""
        head, action = self._folded[id], each.action
        if not isinstance(action, Append) or head is None or not head.live or each.position < head.incarnation:
            return
        first = self._firsts.get(each.position.offset, replicated.get(each.position))
        if first is None:
            return
        for index, encoded in enumerate(unpack_events(action.body)):
            if first + index > head.delete_to:
                yield (id, EventRow(first + index, encoded, each.timestamp_ms, each.position, index, each.time_ms))


async def _replicated_since(
    store: StoreReader, tail: Tail, stored: Mapping[str, Head | None], page: Actions
) -> dict[str, Mapping[Position, int]]:
    """Return the first numbers of the appends that were replicated after the planning, before their head was read."""
    positions: dict[str, list[Position]] = {}
    for id, each in page:
        head = stored[id]
        if head is not None and head.live and isinstance(each.action, Append) and each.position <= head.position:
            positions.setdefault(id, []).append(each.position)
    found: dict[str, Mapping[Position, int]] = {}
    for id, of_id in positions.items():
        head = stored[id]
        assert head is not None
        found[id] = await first_seq_nrs(store, Key(tail.topic, id), head, of_id)
    return found
