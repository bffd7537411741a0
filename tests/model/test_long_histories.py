"""After long random histories in random batches, with replays and a zombie, the store is the fold of the log."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.model.lww import EMPTY, Interned, KeyCells, Single, is_found, land, singles_of
from tests.model.world import CONFIG, KEYS, World, own_segments
from tidebook.core.action import Action
from tidebook.core.head import Head
from tidebook.core.replication_plan import plan_key
from tidebook.testing.action_histories import random_histories

#: It takes about a minute, more on a busy machine, and much more with --long.
pytestmark = pytest.mark.timeout(3600)

KEY = KEYS[0]
cuts = st.lists(st.integers(0, 40), max_size=8)


def batches_of(size: int, cuts: Sequence[int]) -> list[tuple[int, int]]:
    borders = sorted({0, size, *(cut for cut in cuts if cut < size)})
    return list(pairwise(borders))


class Replicator:
    """Replicates a history into one store, batch by batch."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._interned = Interned()
        self.cells: KeyCells = EMPTY

    @property
    def head(self) -> Head | None:
        return None if self.cells.head is None else self._interned.heads[self.cells.head.head]

    def writes(self, first: int, stop: int) -> list[Single]:
        planned = plan_key(KEY, self.head, self._world.placed[first:stop], CONFIG)
        listed = self.cells.listed | own_segments(planned)
        return [single for write in planned for single in singles_of(write, self._interned, listed)]

    def land(self, singles: Sequence[Single]) -> None:
        for single in singles:
            self.cells = land(self.cells, single)

    def shown(self) -> tuple[Head | None, list[object]]:
        """Return the head, and the rows that a store finds with it and the list of segments."""
        head, listed = self.head, self.cells.listed
        found = [cell for cell in self.cells.rows if head is None or is_found(head, cell.seq_nr, listed)]
        assert len(found) == len(self.cells.rows)
        return head, [self._interned.rows[cell.row] for cell in found]


def truth(world: World) -> tuple[Head | None, list[object]]:
    last = world.truth[0][-1]
    return last.head, [world.interned.rows[row] for _, row in last.seen]


@given(random_histories(CONFIG), cuts)
@settings(max_examples=200, deadline=None)
def test_any_batching_gives_the_fold(history: list[Action], cuts: list[int]) -> None:
    world = World([(0, action) for action in history])
    replicator = Replicator(world)
    for first, stop in batches_of(len(history), cuts):
        replicator.land(replicator.writes(first, stop))
    assert replicator.shown() == truth(world)


@given(random_histories(CONFIG, most=15), cuts, st.data())
@settings(max_examples=200, deadline=None)
def test_crashes_replays_and_late_writes_change_nothing(
    history: list[Action], cuts: list[int], data: st.DataObject
) -> None:
    world = World([(0, action) for action in history])
    replicator = Replicator(world)
    late: list[Single] = []
    for first, stop in batches_of(len(history), cuts):
        # One replicator decides, applies some of its writes, and stops; its other writes land at the very end.
        doomed = replicator.writes(data.draw(st.integers(0, first), label="from"), stop)
        crash = data.draw(st.integers(0, len(doomed)), label="crashed after")
        replicator.land(doomed[:crash])
        late += doomed[crash:]
        # Another replicates the same slice, from anywhere at or below the pointer.
        replicator.land(replicator.writes(data.draw(st.integers(0, first), label="again from"), stop))
    replicator.land(replicator.writes(0, len(history)))
    replicator.land(data.draw(st.permutations(late), label="late"))
    assert replicator.shown() == truth(world)
