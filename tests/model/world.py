"""A small log, with its fold after every offset, the writes of its replicators, and the states of the store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tests.model.lww import (
    EMPTY,
    HeadCell,
    Interned,
    KeyCells,
    Listed,
    ListTombstone,
    RowCell,
    SegmentCell,
    Single,
    Tombstone,
    is_found,
    land,
    singles_of,
)
from tidebook.core.action import Action, Append
from tidebook.core.event import unpack_events
from tidebook.core.fold import AppendApplied, PurgeApplied, fold
from tidebook.core.head import Head
from tidebook.core.key import Key
from tidebook.core.position import Position
from tidebook.core.record import encode_record
from tidebook.core.replication_plan import (
    ClearEvents,
    ClearJournal,
    EventRow,
    PositionedAction,
    PutSegments,
    Write,
    plan_key,
)
from tidebook.core.topic_config import TopicConfig
from tidebook.log.port import Record
from tidebook.testing.action_histories import FIRST_MS, placed_at

#: Segments of two numbers, so that even the smallest history crosses a border.
CONFIG = TopicConfig(topic_id="t", partitions=1, segment_size=2, segments=2)
KEYS = (Key("orders", "a"), Key("orders", "b"))

#: The index of a journal, and an action on it.
Step = tuple[int, Action]
#: Returns a replicator's writes for one key, from the head that it read and the records; each write is acknowledged
#: before the next.
Planner = Callable[[Key, Head | None, Sequence[PositionedAction], TopicConfig], Sequence[Write]]
#: The stages of single writes of a key. All writes of a stage are acknowledged before the next stage begins.
Stages = tuple[tuple[Single, ...], ...]
#: Turns writes into stages. The rows that a clear removes depend on the list of segments, read after the head.
Expander = Callable[[Sequence[Write], Interned, Sequence[PositionedAction], Listed], Stages]
#: Events as a reader sees them: number and row.
Seen = tuple[tuple[int, int], ...]


def in_stages(writes: Sequence[Write], interned: Interned, _: Sequence[PositionedAction], listed: Listed) -> Stages:
    """The correct rule: each write is a separate stage, and the list is read after the slice's additions to it."""
    listed = listed | own_segments(writes)
    stages = (tuple(dict.fromkeys(singles_of(write, interned, listed))) for write in writes)
    return tuple(stage for stage in stages if stage)


def own_segments(writes: Sequence[Write]) -> Listed:
    """Return the segments that these writes add to the list."""
    return frozenset(
        (write.head.incarnation, segment)
        for write in writes
        if isinstance(write, PutSegments)
        for each in write.segments
        for segment in each
    )


def reads_the_list(writes: Sequence[Write]) -> bool:
    """Return whether the rows that these writes clear depend on the list of segments."""
    return any(isinstance(write, ClearEvents | ClearJournal) and write.head.run_start for write in writes)


class Store(NamedTuple):
    """Both journals' cells, the pointer, and the largest offset that any of them refers to."""

    keys: tuple[KeyCells, KeyCells] = (EMPTY, EMPTY)
    pointer: int = -1
    top: int = -1


class ExpectedJournal(NamedTuple):
    """A journal as the fold has it: its head, if any, and its events."""

    head: Head | None
    seen: Seen


class World:
    """A log and one way of replicating it. Store states are identified by numbers."""

    def __init__(
        self,
        log: Sequence[Step],
        *,
        planner: Planner = plan_key,
        expander: Expander = in_stages,
        landing: Callable[[KeyCells, Single], KeyCells] = land,
        pointer_goes_back: bool = False,
    ) -> None:
        self.log = tuple(log)
        self.size = len(log)
        self.interned = Interned()
        self.placed = [_place(offset, action) for offset, (_, action) in enumerate(log)]
        self.records = [_record(each, KEYS[key]) for each, (key, _) in zip(self.placed, log, strict=True)]
        self.keys = sorted({key for key, _ in log})
        self.truth = [self._truths(key) for key in (0, 1)]
        self._planner, self._expander, self._landing = planner, expander, landing
        self._pointer_goes_back = pointer_goes_back
        self.stores: list[Store] = []
        self._numbers: dict[Store, int] = {}
        self._landed: dict[tuple[int, int, Single], int] = {}
        self._writes: dict[tuple[int, int, int, int], tuple[Sequence[Write], Sequence[PositionedAction]]] = {}
        self._programs: dict[tuple[int, int, int, int, Listed], Stages] = {}
        self.empty = self.number(Store())

    def _truths(self, key: int) -> list[ExpectedJournal]:
        """Return the truth before the first record, and after each one."""
        head: Head | None = None
        rows: dict[int, int] = {}
        truths = [ExpectedJournal(None, ())]
        for placed, (journal, _) in zip(self.placed, self.log, strict=True):
            if journal == key:
                head, change = fold(head, placed.action, placed.position, placed.timestamp_ms, CONFIG)
                if isinstance(change, PurgeApplied):
                    rows = {}
                elif isinstance(change, AppendApplied):
                    assert isinstance(placed.action, Append)
                    for i, kept in enumerate(unpack_events(placed.action.body)):
                        number = change.first + i
                        row = EventRow(number, kept, placed.timestamp_ms, placed.position, i)
                        rows[number] = self.interned.row(row)
            live = head is not None and head.live
            seen = sorted((n, row) for n, row in rows.items() if head is not None and n > head.delete_to)
            truths.append(ExpectedJournal(head, tuple(seen) if live else ()))
        return truths

    # ---- store states

    def number(self, store: Store) -> int:
        found = self._numbers.get(store)
        if found is None:
            found = self._numbers[store] = len(self.stores)
            self.stores.append(store)
        return found

    def land(self, at: int, key: int, single: Single) -> int:
        """Return the state after a single write has landed."""
        found = self._landed.get((at, key, single))
        if found is None:
            store = self.stores[at]
            cells = self._landing(store.keys[key], single)
            if cells is store.keys[key] and self._landing is land:
                found = at
            else:
                keys = (cells, store.keys[1]) if key == 0 else (store.keys[0], cells)
                found = self.number(Store(keys, store.pointer, max(store.top, self._offset_of(single))))
            self._landed[at, key, single] = found
        return found

    def land_pointer(self, at: int, offset: int) -> int:
        store = self.stores[at]
        if offset <= store.pointer and not self._pointer_goes_back:
            return at
        return self.number(Store(store.keys, offset, max(store.top, offset)))

    def _offset_of(self, single: Single) -> int:
        match single:
            case RowCell():
                return self.interned.rows[single.row].position.offset
            case HeadCell():
                return self.interned.heads[single.head].position.offset
            case SegmentCell():
                return single.incarnation.offset
            case Tombstone() | ListTombstone():
                return (single.stamp >> 4) & ((1 << 47) - 1)
            case _:
                return (single.stamp >> 4) & ((1 << 47) - 1)

    def head(self, at: int, key: int) -> Head | None:
        cell = self.stores[at].keys[key].head
        return None if cell is None else self.interned.heads[cell.head]

    # ---- the steps of replicators

    def listed(self, at: int, key: int) -> Listed:
        """Return the list of segments in this state."""
        return self.stores[at].keys[key].listed

    def head_number(self, at: int, key: int) -> int:
        """Return the number of the head in this state; -1 if there is none."""
        cell = self.stores[at].keys[key].head
        return -1 if cell is None else cell.head

    def reads_the_list(self, key: int, name: int, first: int, last: int) -> bool:
        """Return whether a replicator that has read this head has to read the list of segments."""
        return reads_the_list(self._plan(key, name, first, last)[0])

    def _plan(self, key: int, name: int, first: int, last: int) -> tuple[Sequence[Write], Sequence[PositionedAction]]:
        found = self._writes.get((key, name, first, last))
        if found is None:
            head = None if name < 0 else self.interned.heads[name]
            records = [self.placed[o] for o in range(first, last + 1) if self.log[o][0] == key]
            found = (self._planner(KEYS[key], head, records, CONFIG) if records else ()), records
            self._writes[key, name, first, last] = found
        return found

    def program(self, key: int, name: int, first: int, last: int, listed: Listed = frozenset()) -> Stages:
        """Return the writes for the records `first` to `last` by a replicator that has read this head and list."""
        found = self._programs.get((key, name, first, last, listed))
        if found is None:
            writes, records = self._plan(key, name, first, last)
            found = self._expander(writes, self.interned, records, listed)
            self._programs[key, name, first, last, listed] = found
        return found

    # ---- invariants

    def unlike_the_fold(self, at: int, offset: int | None = None) -> str | None:
        """Return how the store differs from the fold of the log through `offset`, or None."""
        through = self.size - 1 if offset is None else offset
        for key in self.keys:
            truth = self.truth[key][through + 1]
            rows = tuple((cell.seq_nr, cell.row) for cell in self.stores[at].keys[key].rows)
            if rows != truth.seen:
                return f"rows of {KEYS[key].id}: the store has {rows}, the fold says {truth.seen}"
            head = self.head(at, key)
            if head != truth.head:
                return f"head of {KEYS[key].id}: the store has {head}, the fold says {truth.head}"
            listed = self.listed(at, key)
            if head is not None and not all(is_found(head, seq_nr, listed) for seq_nr, _ in rows):
                return f"rows of {KEYS[key].id}: {rows} are there, and the list has only {sorted(listed)}"
            if left := [
                incarnation
                for incarnation, _ in listed
                if head is None or not head.live or incarnation != head.incarnation
            ]:
                return f"segments of {KEYS[key].id}: incarnations {left} are over and still listed"
        return None

    def shown(self) -> str:
        """Return the log as text, for the message of a failing test."""
        return "\n".join(
            f"  {offset}: {KEYS[key].id} {_brief(action)}" for offset, (key, action) in enumerate(self.log)
        )


def _place(offset: int, action: Action) -> PositionedAction:
    if isinstance(action, Append):
        action = placed_at(action, offset)
    return PositionedAction(Position(CONFIG.epoch, offset), FIRST_MS + 1000 * offset, action)


def _record(placed: PositionedAction, key: Key) -> Record:
    assert not isinstance(placed.action, str)
    value = encode_record(placed.action, limit_bytes=CONFIG.limit_bytes)  # type: ignore[arg-type]
    return Record(placed.position.offset, placed.timestamp_ms, key.id.encode(), value)


def _brief(action: Action) -> str:
    if not isinstance(action, Append):
        return repr(action)
    if action.expected is not None:
        return f"append expected={action.expected} x{action.count}"
    return f"append {'next' if action.at is None else f'at={action.at}'} x{action.count}"
