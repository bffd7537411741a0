"""What the parts of the run have in common."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from bench.queue_sides.side import Side
from bench.timing import timed


class Run(msgspec.Struct):
    """The database, how much is to be done, and what was found."""

    url: str
    quick: bool
    figures: dict[str, float]

    def few(self, count: int) -> int:
        """So many, or a fifth in a quick run."""
        return count // 5 if self.quick else count

    def keep_best(self, name: str, rate: float) -> None:
        """Keep the best of several rounds."""
        self.figures[name] = max(rate, self.figures.get(name, 0.0))


async def rate_of(what: str, count: int, work: Callable[[], Awaitable[int]]) -> float:
    """How many a second, all of them."""
    with timed(what) as watch:
        done = await work()
    if done != count:
        raise AssertionError(f"{what}: {done:,} of {count:,} were worked off")
    return watch.rate(count)


async def fill(side: Side, count: int, *, tasks: int = 4) -> float:
    """Put this many; how many a second."""
    with timed(f"{side.name}: put {count:,} in hundreds, {tasks} at one time") as watch:
        await side.put(count, tasks=tasks)
    return watch.rate(count)
