"""The state of a run, and functions that the parts of the benchmark share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from bench.queue_sides.side import Side
from bench.timing import timed


class Run(msgspec.Struct):
    """A run of the benchmark: the database, whether it is quick, and the figures so far."""

    url: str
    quick: bool
    figures: dict[str, float]

    def scaled(self, count: int) -> int:
        """Return the count, or a fifth of it in a quick run."""
        return count // 5 if self.quick else count

    def keep_best(self, name: str, rate: float) -> None:
        """Keep the best of several rounds."""
        self.figures[name] = max(rate, self.figures.get(name, 0.0))


async def rate_of(what: str, count: int, work: Callable[[], Awaitable[int]]) -> float:
    """Time work that must finish `count` entries; return its rate per second."""
    with timed(what) as watch:
        done = await work()
    if done != count:
        raise AssertionError(f"{what}: {done:,} of {count:,} were finished")
    return watch.rate(count)


async def fill(side: Side, count: int, *, tasks: int = 4) -> float:
    """Put `count` entries; return the rate per second."""
    with timed(f"{side.name}: put {count:,} in batches of 100, {tasks} tasks") as watch:
        await side.put(count, tasks=tasks)
    return watch.rate(count)
