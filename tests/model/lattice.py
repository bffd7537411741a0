"""Every store state that any number of replicators can cause, whichever of them crash, lag or continue late.

Stamps come from positions, so a state is the set of writes that have landed. A replicator decides from the pointer and
then the head as some state has them; each of its single writes may land in that state or any later one, once those of
its earlier stages have landed. One that never lands is a crash, one that lands late is a zombie's, and a slice that
begins below the pointer is a replay.

With `flicker` a write that no quorum has acknowledged yet may be seen by one read and not by the next.
"""

from __future__ import annotations

from tests.model.world import Stages, World

#: Whose records, from which offset to which, and what is written for them, or the number of the head that was read for
#: them where the list of segments is still to be read.
Decided = tuple[int, int, int, Stages | int]


class Lattice:
    """The states of a world, and which leads to which."""

    def __init__(self, world: World, *, pointer_after_all_keys: bool = True, flicker: bool = False) -> None:
        self._world = world
        self.flicker = flicker
        self._pointer_after_all_keys = pointer_after_all_keys
        self._concerned = {
            (first, last): {world.log[o][0] for o in range(first, last + 1)}
            for first in range(world.size)
            for last in range(first, world.size)
        }
        self.edges: dict[int, set[int]] = {}
        self._explore()

    def _explore(self) -> None:
        decided: dict[int, set[Decided]] = {self._world.empty: set()}
        todo, waiting = [self._world.empty], {self._world.empty}
        while todo:
            at = todo.pop()
            waiting.discard(at)
            known = decided[at]
            self._decide(at, at, known)
            self.edges[at] = self._next(at, known)
            while self.flicker:
                before = len(known)
                for seen in self.edges[at]:
                    self._decide(at, seen, known)
                if len(known) == before:
                    break
                self.edges[at] = self._next(at, known)
            for later in self.edges[at]:
                there = decided.get(later)
                if there is None:
                    decided[later] = set(known)
                elif known <= there:
                    continue
                else:
                    there |= known
                if later not in waiting:
                    waiting.add(later)
                    todo.append(later)

    def _decide(self, at: int, seen: int, known: set[Decided]) -> None:
        """A reader now sees the state `at`, or `seen`, where one write in flight is there already."""
        world = self._world
        pointer = max(world.stores[at].pointer, world.stores[seen].pointer)
        for (first, last), keys in self._concerned.items():
            if first <= pointer + 1:
                for key in keys:
                    head = world.head_number(seen, key)
                    if world.reads_the_list(key, head, first, last):
                        known.add((key, first, last, head))
                    else:
                        known.add((key, first, last, world.program(key, head, first, last)))
        # A reader that read the head before, perhaps long ago, may read the list now.
        for key, first, last, stages in list(known):
            if isinstance(stages, int):
                known.add((key, first, last, world.program(key, stages, first, last, world.listed(seen, key))))

    def visible(self, at: int) -> list[int]:
        """Return what a single read may see in this state."""
        return [at, *self.edges[at]] if self.flicker else [at]

    def _next(self, at: int, known: set[Decided]) -> set[int]:
        world = self._world
        found: set[int] = set()
        done: dict[tuple[int, int], set[int]] = {}
        for key, first, last, stages in known:
            if isinstance(stages, int):
                continue
            for stage in stages:
                landed = {world.land(at, key, single) for single in stage} - {at}
                if landed:
                    found |= landed
                    break
            else:
                done.setdefault((first, last), set()).add(key)
        pointer = world.stores[at].pointer
        for (first, last), keys in self._concerned.items():
            finished = done.get((first, last), set())
            enough = keys <= finished if self._pointer_after_all_keys else bool(finished)
            if first <= pointer + 1 and enough:
                found.add(world.land_pointer(at, last))
        found.discard(at)
        return found

    def violation(self) -> str | None:
        """A state whose pointer is at the log's end and which is not the fold, or a pointer that moves back."""
        world = self._world
        for at, later in self.edges.items():
            if world.stores[at].pointer == world.size - 1:
                unlike = world.unlike_the_fold(at)
                if unlike is not None:
                    return f"replicated to the end, and {unlike}"
            if any(world.stores[each].pointer < world.stores[at].pointer for each in later):
                return "the pointer moves back"
        return None
