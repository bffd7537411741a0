"""The floor, against every interleaving that Hypothesis makes of transactions and selects."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tidebook.sql.postgres.outbox_floor import Floor, Floors

LIMIT = 3


@dataclass
class Table:
    """PostgreSQL in small: transaction numbers before ids, rows that appear at commits, snapshots."""

    next_xid: int = 100
    next_id: int = 1
    running: dict[int, list[int]] = field(default_factory=dict)
    visible: set[int] = field(default_factory=set)

    def xmin(self) -> int:
        return min(self.running, default=self.next_xid)

    def begin(self) -> int:
        xid = self.next_xid
        self.next_xid += 1
        self.running[xid] = []
        return xid

    def insert(self, xid: int) -> None:
        self.running[xid].append(self.next_id)
        self.next_id += 1

    def end(self, xid: int, *, commit: bool) -> None:
        rows = self.running.pop(xid)
        if commit:
            self.visible |= set(rows)


steps = st.lists(
    st.one_of(
        st.just(("begin", 0)),
        st.tuples(st.just("insert"), st.integers(0, 5)),
        st.tuples(st.just("commit"), st.integers(0, 5)),
        st.tuples(st.just("rollback"), st.integers(0, 5)),
        st.tuples(st.just("relay"), st.booleans()),
        st.just(("select", 0)),
    ),
    max_size=60,
)


@settings(max_examples=500)
@given(steps)
def test_no_row_ever_appears_at_or_below_the_floor(given_steps: list[tuple[str, Any]]) -> None:
    table, floor = Table(), Floor(0)
    for step, argument in given_steps:
        xids = sorted(table.running)
        match step:
            case "begin":
                table.begin()
            case "insert" if xids:
                table.insert(xids[argument % len(xids)])
            case "commit" | "rollback" if xids:
                table.end(xids[argument % len(xids)], commit=step == "commit")
            case "select" | "relay":
                xmin = table.xmin()
                rows = sorted(id for id in table.visible if id > floor.at)[:LIMIT]
                # The select misses nothing that is there: this is the whole promise.
                assert rows == sorted(table.visible)[:LIMIT]
                floor.saw(rows, full=len(rows) == LIMIT, xmin=xmin, xmax=table.next_xid)
                if step == "relay" and argument:  # they are sent and deleted; without it, the batch failed
                    table.visible -= set(rows)
            case _:
                pass
        assert all(id > floor.at for id in table.visible)


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
