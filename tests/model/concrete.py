"""Two replicators, step by step, breadth first: a shortest trace for rules that the lattice cannot break.

One that is never scheduled again has crashed; one that is scheduled late is a zombie.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from tests.model.lww import HeadCell, ListTombstone, RowCell, SegmentCell, Single, Tombstone
from tests.model.world import KEYS, World

#: A single write of a key, or the pointer.
Move = tuple[int, Single] | int


class Process(NamedTuple):
    """A replicator: how many slices it still takes, the slice in hand, the head it has read, what it still writes."""

    left: int
    slice_: tuple[int, int] | None = None
    writes: tuple[Move, ...] | None = None
    #: Heads that were read before the pointer, by a rule that is broken.
    early: tuple[int, ...] | None = None


class State(NamedTuple):
    store: int
    first: Process
    second: Process


class Concrete:
    """The search of one world."""

    def __init__(self, world: World, *, heads_first: bool = False, pointer_early: bool = False) -> None:
        self._world = world
        self._heads_first = heads_first
        self._pointer_early = pointer_early

    def trace(self) -> list[str] | None:
        """Return a shortest path to a fully replicated store that is not the fold, or whose pointer moves back."""
        begin = State(self._world.empty, Process(1), Process(2))
        came: dict[State, tuple[State, str] | None] = {begin: None}
        queue = deque([begin])
        while queue:
            state = queue.popleft()
            for label, after in self._steps(state):
                if after in came:
                    continue
                came[after] = (state, label)
                bad = self._bad(state, after)
                if bad is not None:
                    return [*self._way(came, after), bad]
                queue.append(after)
        return None

    def _bad(self, before: State, after: State) -> str | None:
        stores = self._world.stores
        if stores[after.store].pointer < stores[before.store].pointer:
            return "the pointer moved back"
        if stores[after.store].pointer == self._world.size - 1 and after.second.slice_ is None:
            return self._world.unlike_the_fold(after.store)
        return None

    def _way(self, came: dict[State, tuple[State, str] | None], state: State) -> list[str]:
        way = []
        while (step := came[state]) is not None:
            state = step[0]
            way.append(step[1])
        return way[::-1]

    def _steps(self, state: State) -> list[tuple[str, State]]:
        found = [
            (f"P1 {label}", State(store, process, state.second))
            for label, store, process in self._process_steps(state.store, state.first)
        ]
        found += [
            (f"P2 {label}", State(store, state.first, process))
            for label, store, process in self._process_steps(state.store, state.second)
        ]
        return found

    def _process_steps(self, at: int, process: Process) -> list[tuple[str, int, Process]]:
        world = self._world
        if process.slice_ is None:
            if process.left == 0:
                return []
            if self._heads_first and process.early is None:
                return [("reads the heads", at, process._replace(early=self._heads(at)))]
            pointer = world.stores[at].pointer
            return [
                (f"takes {pointer + 1} to {last}", at, process._replace(slice_=(pointer + 1, last)))
                for last in range(pointer + 1, world.size)
            ]
        if process.writes is None:
            heads = process.early or self._heads(at)
            return [("reads the heads, decides", at, process._replace(writes=self._decide(at, heads, *process.slice_)))]
        move, *rest = process.writes
        after = process._replace(writes=tuple(rest)) if rest else Process(process.left - 1)
        if isinstance(move, int):
            return [(f"writes the pointer {move}", world.land_pointer(at, move), after)]
        key, single = move
        return [(f"writes {self._name(key, single)}", world.land(at, key, single), after)]

    def _heads(self, at: int) -> tuple[int, ...]:
        return tuple(self._world.head_number(at, key) for key in (0, 1))

    def _decide(self, at: int, heads: tuple[int, ...], first: int, last: int) -> tuple[Move, ...]:
        world = self._world
        moves: list[Move] = []
        for i, key in enumerate(world.keys):
            stages = world.program(key, heads[key], first, last, world.listed(at, key))
            moves += [(key, single) for stage in stages for single in stage]
            if self._pointer_early and i == 0:
                moves.append(last)
        return tuple(moves if self._pointer_early else [*moves, last])

    def _name(self, key: int, single: Single) -> str:
        id = KEYS[key].id
        match single:
            case RowCell():
                return f"event {single.seq_nr} of {id}"
            case HeadCell():
                head = self._world.interned.heads[single.head]
                return f"head of {id}: {'' if head.live else 'purged, '}{head.seq_nr} at {head.position.offset}"
            case Tombstone():
                return f"tombstone of {id}: {single.first} to {single.last}"
            case SegmentCell():
                return f"segment {single.segment} of {id} into the list of {single.incarnation.offset}"
            case ListTombstone():
                return f"tombstone of the list of {id}, {single.incarnation.offset}: below {single.below}"
            case _:
                return f"tombstone of the head of {id}"
