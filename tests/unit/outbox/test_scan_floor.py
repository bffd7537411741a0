"""The scan floor under every interleaving of a few transactions with a relay's selects; planted mistakes are found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, get_args

import pytest

from tidebook.outbox.scan_floor import ScanFloor, ScanFloors

LIMIT = 2
ROWS = 3
SELECTS = 3


class Table(NamedTuple):
    """A model of PostgreSQL: a transaction has its number before it draws ids, and its rows appear at its commit."""

    next_xid: int = 100
    #: The highest transaction that has ended: snapshots know of none above it, though some may be running.
    ended: int = 99
    next_id: int = 1
    running: tuple[tuple[int, tuple[int, ...]], ...] = ()
    visible: frozenset[int] = frozenset()

    def xmax(self) -> int:
        """Return one above the last transaction that has ended."""
        return self.ended + 1

    def xmin(self) -> int:
        """Return the lowest transaction that still runs, as a snapshot sees it."""
        return min((xid for xid, _ in self.running if xid <= self.ended), default=self.xmax())

    def begin(self) -> Table:
        return self._replace(next_xid=self.next_xid + 1, running=(*self.running, (self.next_xid, ())))

    def insert(self, which: int) -> Table:
        xid, rows = self.running[which]
        running = (*self.running[:which], (xid, (*rows, self.next_id)), *self.running[which + 1 :])
        return self._replace(next_id=self.next_id + 1, running=running)

    def end(self, which: int, *, commit: bool) -> Table:
        xid, inserted = self.running[which]
        return self._replace(
            ended=max(self.ended, xid),
            running=(*self.running[:which], *self.running[which + 1 :]),
            visible=self.visible | (frozenset(inserted) if commit else frozenset()),
        )

    def end_xid(self, xid: int) -> Table:
        return self.end([each for each, _ in self.running].index(xid), commit=True)

    def to_come(self) -> set[int]:
        """Return the rows that exist or can still appear."""
        return {*self.visible, *(id for _, rows in self.running for id in rows)}


class Looked(NamedTuple):
    """A relay between two statements: each has its own snapshot, and other transactions run in between."""

    xmin: int
    xid: int | None = None
    rows: tuple[int, ...] | None = None


class State(NamedTuple):
    """The whole state, including the floor's, so that states can be compared."""

    table: Table
    writers: int = 0
    floor: tuple[Any, ...] = (0, (), None, 0)
    selects: int = 0
    looked: Looked | None = None


MakeFloor = Callable[[], Any]
#: How a relay may tell a floor of transactions: as it does, and in ways that are wrong.
Reported = Literal[
    "as it is", "xmin from after the select", "the xid of the select itself", "the xmax after the select"
]


def steps(state: State, make: MakeFloor, reported: Reported, writers: int) -> Iterator[tuple[str, State]]:
    """Yield every possible next step."""
    table, looked = state.table, state.looked
    relay = looked.xid if looked is not None else None
    if state.writers < writers:
        yield "begin", state._replace(table=table.begin(), writers=state.writers + 1)
    for which, (xid, _) in enumerate(table.running):
        if xid == relay:
            continue
        if table.next_id <= ROWS:
            yield f"insert {xid}", state._replace(table=table.insert(which))
        yield f"commit {xid}", state._replace(table=table.end(which, commit=True))
        yield f"roll back {xid}", state._replace(table=table.end(which, commit=False))
    if looked is None:
        if state.selects < SELECTS:
            yield "guard", state._replace(looked=Looked(table.xmin()), selects=state.selects + 1)
    elif looked.xid is None:
        yield f"xid {table.next_xid}", state._replace(table=table.begin(), looked=looked._replace(xid=table.next_xid))
    elif looked.rows is None:
        rows = tuple(sorted(id for id in table.visible if id > state.floor[0])[:LIMIT])
        yield "select", state._replace(looked=looked._replace(rows=rows))
    else:
        saw = _saw(state, make, looked.rows, reported)
        yield "open, and fail", saw
        if looked.rows:
            yield "open, and send", saw._replace(table=saw.table._replace(visible=table.visible - set(looked.rows)))


def _saw(state: State, make: MakeFloor, rows: tuple[int, ...], reported: Reported) -> State:
    looked, table = state.looked, state.table
    assert looked is not None
    assert looked.xid is not None
    floor = make()
    floor.at, seen, floor._newest, floor._xid = state.floor
    floor._seen.extend(seen)
    xmin, full = looked.xmin, len(rows) == LIMIT
    if reported == "xmin from after the select":
        xmin = table.end_xid(looked.xid).xmin()
    floor.advance(rows, full=full, xmin=xmin, xid=looked.xid)
    if floor._newest is not None and reported in _BOUND_AT_ONCE:
        floor._seen.append((floor._newest, looked.xid if reported == "the xid of the select itself" else table.xmax()))
        floor._newest = None
    after = (floor.at, tuple(floor._seen), floor._newest, floor._xid)
    return state._replace(floor=after, looked=None, table=table.end_xid(looked.xid))


_BOUND_AT_ONCE = {"the xid of the select itself", "the xmax after the select"}


def find_fault(make: MakeFloor, reported: Reported = "as it is", *, writers: int = 2) -> list[str] | None:
    """Return the first history after which a row exists or may appear at or below the floor; None if there is none."""
    start = State(Table())
    known = {start}
    ways: list[tuple[State, tuple[Any, ...]]] = [(start, ())]
    while ways:
        state, way = ways.pop()
        if any(id <= state.floor[0] for id in state.table.to_come()):
            return _message_of(way)
        for name, following in steps(state, make, reported, writers):
            if following not in known:
                known.add(following)
                ways.append((following, (name, way)))
    return None


def _message_of(way: tuple[Any, ...]) -> list[str]:
    names = []
    while way:
        name, way = way
        names.append(name)
    return names[::-1]


class WrongFloor:
    """A scan floor with one planted mistake."""

    def __init__(self, mistake: str) -> None:
        self.mistake = mistake
        self.at = 0
        self._seen: list[tuple[int, int]] = []
        self._newest: int | None = None
        self._xid = 0

    def advance(self, ids: tuple[int, ...], *, full: bool, xmin: int, xid: int) -> None:
        if self.mistake == "it follows the last id":
            self.at = max(self.at, *ids, 0)
            return
        if self._newest is not None:
            self._seen.append((self._newest, xid))
            self._newest = None
        covered = None
        while self._seen and self._ended(self._seen[0][1], xmin) and (not full or ids[-1] >= self._seen[0][0]):
            covered = self._seen.pop(0)[0]
        if covered is not None:
            passes = self.mistake == "it passes rows that were seen and not sent"
            self.at = max(self.at, covered if passes or not ids else min(covered, ids[0] - 1))
        if ids:
            self._newest = ids[-1] + (self.mistake == "it is one id too high")
            if self.mistake == "a select covers itself":
                self.at = max(self.at, ids[0] - 1)

    def _ended(self, bound: int, xmin: int) -> bool:
        if self.mistake == "it waits for nobody":
            return True
        return bound <= xmin + (self.mistake == "it does not wait for the youngest")


MISTAKES = [
    "it follows the last id",
    "it waits for nobody",
    "it does not wait for the youngest",
    "it passes rows that were seen and not sent",
    "it is one id too high",
    "a select covers itself",
]


def test_no_row_exists_or_can_appear_at_or_below_the_floor_in_any_small_history(long_form: bool) -> None:
    """Two writers are enough to find every planted mistake; the long form has three."""
    assert find_fault(lambda: ScanFloor(0), writers=3 if long_form else 2) is None


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_floor_with_a_planted_mistake_is_found(mistake: str) -> None:
    assert find_fault(lambda: WrongFloor(mistake)) is not None


@pytest.mark.parametrize("reported", [each for each in get_args(Reported) if each != "as it is"])
def test_a_floor_that_gets_the_wrong_transaction_numbers_is_found(reported: Reported) -> None:
    """Above all a snapshot's xmax: transactions above it may be running and have drawn ids."""
    assert find_fault(lambda: ScanFloor(0), reported) is not None


def test_the_floor_follows_when_no_transaction_is_left() -> None:
    floor = ScanFloor(0)
    for start in range(1, 100, 10):
        floor.advance(list(range(start, start + 10)), full=True, xmin=start, xid=start)
    assert floor.at == 90


def test_a_select_that_is_reported_late_is_ignored() -> None:
    """A thread that lost its lock reports its select after the thread that took over has."""
    floor = ScanFloor(0)
    floor.advance([5], full=False, xmin=10, xid=10)
    floor.advance([1, 2, 3], full=False, xmin=9, xid=9)
    floor.advance([], full=False, xmin=11, xid=11)
    assert floor.at == 5


def test_rows_that_are_moved_back_reset_the_floor() -> None:
    floors = ScanFloors()
    floors.of("orders", 0).at = 90
    assert floors.of("orders").at == 90
    assert floors.known() == (["orders"], [90], [0])
    assert floors.of("orders", 1).at == 0


def test_another_incarnation_of_the_table_resets_all_floors() -> None:
    floors = ScanFloors()
    for incarnation, left in (("first", 0), ("first", 1), ("restored", 0)):
        floors.reset_unless(incarnation)
        assert floors.known() == (["orders"] * left, [90] * left, [0] * left)
        floors.of("orders", 0).at = 90
