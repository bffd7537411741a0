"""For every small history, batching and lag of replication, the store is the same, and readers see the fold.

The histories form a tree, so the results of a common prefix are computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest

from tests.model.lww import EMPTY, Interned, KeyCells, is_found, land, singles_of
from tests.model.world import CONFIG, KEYS, Planner, Seen
from tidebook.core.action import Append
from tidebook.core.event import unpack_events
from tidebook.core.fold import AppendApplied, PurgeApplied
from tidebook.core.head import Head
from tidebook.core.key import Key
from tidebook.core.position import Position
from tidebook.core.record import encode_record
from tidebook.core.replication_plan import (
    ClearEvents,
    ClearJournal,
    EventRow,
    PositionedAction,
    PutEvents,
    PutHead,
    Write,
    plan_key,
)
from tidebook.core.seq_nr import LAST
from tidebook.core.topic_config import TopicConfig
from tidebook.journal.view import ReadView, ViewBase
from tidebook.log.port import Record
from tidebook.testing.action_histories import ACTION_TEMPLATES, FIRST_MS, ActionTemplate, Extension, extensions

#: It takes about a minute, more on a busy machine, and much more with --long.
pytestmark = pytest.mark.timeout(3600)

KEY = KEYS[0]
#: The ranges of a read: it returns the events after the first number, up to the second.
RANGES = [(0, LAST), (1, LAST), (3, LAST), (0, 2), (2, 4)]
SHORT = ["next x2", "expected 0", "at 3", "jump", "delete 1", "delete 5", "purge", "purge if here"]


class Point(NamedTuple):
    """A prefix of a history: the fold's head and events, and the store's cells after any batching that ends here."""

    head: Head | None
    seen: Seen
    cells: frozenset[KeyCells]


class Explorer:
    """Walks the tree of histories, depth first."""

    def __init__(self, letters: list[ActionTemplate], length: int, planner: Planner = plan_key) -> None:
        self._planner = planner
        self._letters = letters
        self._length = length
        self._interned = Interned()
        self._placed: list[PositionedAction] = []
        self._records: list[Record] = []
        self._names: list[str] = []
        self._points = [Point(None, (), frozenset([EMPTY]))]
        self.histories = 0

    def run(self) -> None:
        if len(self._placed) == self._length:
            return
        for grown in extensions(self._points[-1].head, len(self._placed), self._letters, CONFIG):
            self._push(grown)
            self.histories += 1
            self._check_store()
            self._check_readers()
            self.run()
            self._pop()

    def _push(self, grown: Extension) -> None:
        offset = len(self._placed)
        self._placed.append(PositionedAction(Position(CONFIG.epoch, offset), FIRST_MS + 1000 * offset, grown.action))
        value = encode_record(grown.action, limit_bytes=CONFIG.limit_bytes)
        self._records.append(Record(offset, FIRST_MS + 1000 * offset, KEY.id.encode(), value))
        self._names.append(grown.name)
        self._points.append(Point(grown.head, self._seen(grown), self._replicated()))

    def _pop(self) -> None:
        self._points.pop()
        self._names.pop()
        self._records.pop()
        self._placed.pop()

    def _seen(self, grown: Extension) -> Seen:
        """Apply the last action to the events before it, in the simplest way."""
        placed, seen = self._placed[-1], dict(self._points[-1].seen)
        match grown.change:
            case PurgeApplied():
                return ()
            case AppendApplied(first=first):
                assert isinstance(placed.action, Append)
                for i, kept in enumerate(unpack_events(placed.action.body)):
                    row = EventRow(first + i, kept, placed.timestamp_ms, placed.position, i)
                    seen[first + i] = self._interned.row(row)
            case _:
                pass
        deleted_to = grown.head.delete_to if grown.head is not None else 0
        return tuple(sorted((number, row) for number, row in seen.items() if number > deleted_to))

    def _replicated(self) -> frozenset[KeyCells]:
        """Return the cells after every batching; the last batch may begin after any earlier action."""
        found = set()
        for start, point in enumerate(self._points):
            writes = self._planner(KEY, point.head, self._placed[start:], CONFIG)
            for cells in point.cells:
                for write in writes:
                    for single in list(singles_of(write, self._interned, cells.listed)):
                        cells = land(cells, single)
                found.add(cells)
        return frozenset(found)

    def _check_store(self) -> None:
        point = self._points[-1]
        for cells in point.cells:
            head = None if cells.head is None else self._interned.heads[cells.head.head]
            assert head == point.head, self._names
            assert tuple((cell.seq_nr, cell.row) for cell in cells.rows) == point.seen, self._names
            assert head is None or all(is_found(head, cell.seq_nr, cells.listed) for cell in cells.rows), self._names

    def _check_readers(self) -> None:
        """Check that readers see the fold, wherever replication is, and whether or not the pointer has moved."""
        for lag, point in enumerate(self._points):
            position = point.head.position.offset if point.head is not None else -1
            for as_of in {lag - 1, position}:
                view = ReadView(ViewBase(point.head, as_of), CONFIG, bytes_max=1_000_000)
                for record in self._records[as_of + 1 :]:
                    view.take(record)
                assert view.head == self._points[-1].head, self._names
                for after, to in RANGES:
                    expected = tuple(each for each in self._points[-1].seen if after < each[0] <= to)
                    assert self._read(point, view, after, to) == expected, (self._names, lag, as_of, after, to)

    def _read(self, point: Point, view: ReadView, after: int, to: int) -> Seen:
        plan = view.plan(after, to)
        if plan is None:
            return ()
        return self._rows(point, plan.after, plan.rows_to) + self._tail(view, plan.rows_to, plan.to)

    def _rows(self, point: Point, after: int, to: int) -> Seen:
        return tuple(each for each in point.seen if after < each[0] <= to)

    def _tail(self, view: ReadView, after: int, to: int) -> Seen:
        found = []
        for append in view.appends or ():
            for i, kept in enumerate(unpack_events(append.body)):
                position = Position(CONFIG.epoch, append.offset)
                row = EventRow(append.first + i, kept, append.timestamp_ms, position, i)
                if after < row.seq_nr <= to:
                    found.append((row.seq_nr, self._interned.row(row)))
        return tuple(found)


def test_every_history_of_up_to_5_actions_is_the_same_for_every_batching_and_lag(long_form: bool) -> None:
    letters = list(ACTION_TEMPLATES.values()) if long_form else [ACTION_TEMPLATES[name] for name in SHORT]
    explorer = Explorer(letters, length=5)
    explorer.run()
    assert explorer.histories > 10_000


def test_every_history_of_up_to_3_actions_of_all_kinds_is_the_same_for_every_batching_and_lag() -> None:
    explorer = Explorer(list(ACTION_TEMPLATES.values()), length=3)
    explorer.run()
    assert explorer.histories > 1_000


@pytest.mark.parametrize("left_out", [PutEvents, PutHead, ClearEvents, ClearJournal])
def test_a_replicator_that_omits_a_write_is_found(left_out: type[Write]) -> None:
    def forgetful(
        key: Key, head: Head | None, records: Sequence[PositionedAction], config: TopicConfig
    ) -> Sequence[Write]:
        return [write for write in plan_key(key, head, records, config) if not isinstance(write, left_out)]

    explorer = Explorer(list(ACTION_TEMPLATES.values()), length=3, planner=forgetful)
    with pytest.raises(AssertionError):
        explorer.run()
