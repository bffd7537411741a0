"""The random choices of a run are recorded, so that a failing run can be replayed with fewer of them.

A run draws everything from one source: its faults, delays and sizes. A calm choice is the one that causes no fault. A
failing run is reduced by replaying it with more and more calm choices for as long as it still fails.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

#: `random() < probability` is false for the calm choice, and `randrange` and `choice` take the first value.
CALM = 0.999_999
#: Replaces a choice by the calm one.
IS_CALM = None

Choice = float | int | None


class RecordedChoices(random.Random):
    """A source of choices that records them; with `replayed`, it repeats those, and then makes calm ones."""

    def __init__(
        self, seed: float, replayed: Sequence[Choice] | None = None, *, recorded: list[Choice] | None = None
    ) -> None:
        self.recorded: list[Choice] = [] if recorded is None else recorded
        self._replayed = replayed
        super().__init__(seed)

    def random(self) -> float:
        drawn = super().random()
        if self._replayed is not None:
            return float(self._replay(CALM))
        self.recorded.append(drawn)
        return drawn

    def getrandbits(self, k: int) -> int:
        drawn = super().getrandbits(k)
        if self._replayed is not None:
            return int(self._replay(0)) & ((1 << k) - 1)
        self.recorded.append(drawn)
        return drawn

    def randbytes(self, n: int) -> bytes:
        """Return bytes that identify something: they are never replaced, so that they stay unique."""
        return super().getrandbits(n * 8).to_bytes(n, "big")

    def fork(self) -> RecordedChoices:
        """Return this source: a part of the simulation draws from the same choices."""
        return self

    def split(self) -> RecordedChoices:
        """Return a separate source for a part of the simulation; its choices are recorded together with these."""
        return RecordedChoices(self.random(), self._replayed, recorded=self.recorded)

    def _replay(self, calm: float) -> float:
        assert self._replayed is not None
        place = len(self.recorded)
        found = self._replayed[place] if place < len(self._replayed) else IS_CALM
        chosen = calm if found is IS_CALM or (isinstance(calm, int) and not isinstance(found, int)) else found
        self.recorded.append(chosen)
        return chosen


def reduce_choices(
    choices: Sequence[Choice], fails: Callable[[Sequence[Choice]], bool], *, runs_max: int = 400
) -> list[Choice]:
    """Return a shorter, calmer sequence that still fails: first cut the end, then calm blocks of halving sizes."""
    best = list(choices)
    runs = 0

    def is_better(candidate: list[Choice]) -> bool:
        nonlocal runs
        runs += 1
        return runs <= runs_max and fails(candidate)

    low, high = 0, len(best)
    # Search for the shortest prefix that fails. Failures need not be monotonic, so the result is checked again.
    while low < high:
        middle = (low + high) // 2
        if is_better(best[:middle]):
            high = middle
        else:
            low = middle + 1
    if high < len(best) and is_better(best[:high]):
        best = best[:high]
    size = max(1, len(best) // 2)
    while size >= 1:
        for start in range(0, len(best), size):
            block = best[start : start + size]
            if all(each is IS_CALM for each in block):
                continue
            candidate = [*best[:start], *[IS_CALM] * len(block), *best[start + size :]]
            if is_better(candidate):
                best = candidate
        size //= 2
    return best


def count_wild(choices: Sequence[Choice]) -> int:
    """Return how many choices are not calm."""
    return sum(each is not IS_CALM for each in choices)


class Explainable(NamedTuple):
    """The choices, events and violations of a run."""

    recorded: Sequence[Choice]
    story: Sequence[object]
    violations: Sequence[str]


def explain(seed: int, run: Callable[[Sequence[Choice] | None], Explainable], *, runs_max: int = 400) -> str:
    """Reduce a failing seed; return the events and the violations of the smallest run that still fails."""
    recorded = run(None).recorded
    reduced = reduce_choices(recorded, lambda choices: bool(run(choices).violations), runs_max=runs_max)
    smallest = run(reduced)
    kept = f"{count_wild(reduced)} of {len(recorded)} choices"
    return "\n".join([f"seed {seed}, {kept}:", *map(str, smallest.story), *smallest.violations])
