"""The floor, against every interleaving of a few transactions with a relay's selects; and floors that are wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from tidebook.sql.postgres.outbox_floor import Floor, Floors

LIMIT = 2
TRANSACTIONS = 3
ROWS = 3
SELECTS = 3


class Table(NamedTuple):
    """PostgreSQL in small: a transaction has its number before it draws ids; its rows appear at its commit."""

    next_xid: int = 100
    next_id: int = 1
    running: tuple[tuple[int, tuple[int, ...]], ...] = ()
    visible: frozenset[int] = frozenset()

    def xmin(self) -> int:
        """The lowest transaction that still runs."""
        return min((xid for xid, _ in self.running), default=self.next_xid)

    def begin(self) -> Table:
        return self._replace(next_xid=self.next_xid + 1, running=(*self.running, (self.next_xid, ())))

    def insert(self, which: int) -> Table:
        xid, rows = self.running[which]
        running = (*self.running[:which], (xid, (*rows, self.next_id)), *self.running[which + 1 :])
        return self._replace(next_id=self.next_id + 1, running=running)

    def end(self, which: int, *, commit: bool) -> Table:
        rows = frozenset(self.running[which][1]) if commit else frozenset()
        return self._replace(running=(*self.running[:which], *self.running[which + 1 :]), visible=self.visible | rows)

    def to_come(self) -> set[int]:
        """Rows that are there, or can still appear."""
        return {*self.visible, *(id for _, rows in self.running for id in rows)}


class Looked(NamedTuple):
    """A relay between its statements: each has a snapshot of its own, and others go on in between."""

    xmin: int
    xmax: int
    rows: tuple[int, ...] | None = None


class State(NamedTuple):
    """Everything, with what the floor has come to, so that states can be compared."""

    table: Table
    at: int = 0
    seen: tuple[tuple[int, int], ...] = ()
    selects: int = 0
    looked: Looked | None = None


MakeFloor = Callable[[], Any]


def steps(state: State, make: MakeFloor, *, guard_first: bool) -> Iterator[tuple[str, State]]:
    """Everything that can happen next. `guard_first`: xmin is read before the select and xmax after it, as it is."""
    table, looked = state.table, state.looked
    if table.next_xid < 100 + TRANSACTIONS:
        yield "begin", state._replace(table=table.begin())
    for which in range(len(table.running)):
        if table.next_id <= ROWS:
            yield f"insert {which}", state._replace(table=table.insert(which))
        yield f"commit {which}", state._replace(table=table.end(which, commit=True))
        yield f"roll back {which}", state._replace(table=table.end(which, commit=False))
    if looked is None:
        if state.selects < SELECTS:
            yield "guard", state._replace(looked=Looked(table.xmin(), table.next_xid), selects=state.selects + 1)
    elif looked.rows is None:
        rows = tuple(sorted(id for id in table.visible if id > state.at)[:LIMIT])
        yield "select", state._replace(looked=looked._replace(rows=rows))
    else:
        xmin, xmax = (looked.xmin, table.next_xid) if guard_first else (table.xmin(), looked.xmax)
        saw = _saw(state, make, looked.rows, xmin, xmax)
        yield "open, and fail", saw
        if looked.rows:
            left = table._replace(visible=table.visible - set(looked.rows))
            yield "open, and send", saw._replace(table=left)


def _saw(state: State, make: MakeFloor, rows: tuple[int, ...], xmin: int, xmax: int) -> State:
    floor = make()
    floor.at = state.at
    floor._seen.extend(state.seen)
    floor.saw(rows, full=len(rows) == LIMIT, xmin=xmin, xmax=xmax)
    return state._replace(at=floor.at, seen=tuple(floor._seen), looked=None)


def find_fault(make: MakeFloor, *, guard_first: bool = True) -> list[str] | None:
    """The first history, of all there are, after which a row lies or may appear at or below the floor."""
    start = State(Table())
    known = {start}
    ways: list[tuple[State, tuple[Any, ...]]] = [(start, ())]
    while ways:
        state, way = ways.pop()
        if any(id <= state.at for id in state.table.to_come()):
            return _told(way)
        for name, following in steps(state, make, guard_first=guard_first):
            if following not in known:
                known.add(following)
                ways.append((following, (name, way)))
    return None


def _told(way: tuple[Any, ...]) -> list[str]:
    names = []
    while way:
        name, way = way
        names.append(name)
    return names[::-1]


class WrongFloor:
    """A floor with one mistake."""

    def __init__(self, mistake: str) -> None:
        self.mistake = mistake
        self.at = 0
        self._seen: list[tuple[int, int]] = []

    def saw(self, ids: tuple[int, ...], *, full: bool, xmin: int, xmax: int) -> None:
        if self.mistake == "it follows the last id":
            self.at = max(self.at, *ids, 0)
            return
        covered = None
        while self._seen and self._ended(self._seen[0][1], xmin) and (not full or ids[-1] >= self._seen[0][0]):
            covered = self._seen.pop(0)[0]
        if covered is not None:
            passes = self.mistake == "it passes rows that were seen and not sent"
            self.at = max(self.at, covered if passes or not ids else min(covered, ids[0] - 1))
        if ids:
            self._seen.append((ids[-1] + (self.mistake == "it is one id too high"), xmax))
            if self.mistake == "a select covers itself":
                self.at = max(self.at, ids[0] - 1)

    def _ended(self, xmax: int, xmin: int) -> bool:
        if self.mistake == "it waits for nobody":
            return True
        return xmax <= xmin + (self.mistake == "it does not wait for the youngest")


MISTAKES = [
    "it follows the last id",
    "it waits for nobody",
    "it does not wait for the youngest",
    "it passes rows that were seen and not sent",
    "it is one id too high",
    "a select covers itself",
]


def test_no_row_lies_or_can_appear_at_or_below_the_floor_in_any_small_history() -> None:
    assert find_fault(lambda: Floor(0)) is None


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_floor_is_found_out(mistake: str) -> None:
    assert find_fault(lambda: WrongFloor(mistake)) is not None


def test_a_floor_that_is_told_the_transactions_in_the_wrong_order_is_found_out() -> None:
    """xmin from after the select, xmax from before it: rows that committed in between would be passed over."""
    assert find_fault(lambda: Floor(0), guard_first=False) is not None


def test_the_floor_follows_when_no_transaction_is_left() -> None:
    floor = Floor(0)
    for start in range(1, 100, 10):
        floor.saw(list(range(start, start + 10)), full=True, xmin=start, xmax=start)
    assert floor.at == 90


def test_rows_that_come_back_reset_it() -> None:
    floors = Floors()
    floors.of("orders", 0).at = 90
    assert floors.of("orders").at == 90
    assert floors.known() == (["orders"], [90], [0])
    assert floors.of("orders", 1).at == 0
    floors.forget()
    assert floors.known() == ([], [], [])
