"""Replicate thousands of random histories on a simulated cluster: the store always becomes the fold of the log.

A failing seed is printed with its log; `simulate(VirtualTimeLoop(), SEED)` repeats exactly that run.
"""

from __future__ import annotations

import pytest

pytest.importorskip("acsylla")

from tests.simulation.simulation import simulate
from tests.simulation.virtual_time import VirtualTimeLoop

RUNS = 200
PARTS = 8
RUNS_LONG = 5_000


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(PARTS))
def test_the_store_becomes_the_fold_of_the_log(loop: VirtualTimeLoop, part: int, long_form: bool) -> None:
    runs = RUNS_LONG if long_form else RUNS
    for seed in range(part * RUNS_LONG, part * RUNS_LONG + runs):
        wrong = simulate(loop, seed)
        assert wrong is None, wrong


def test_a_seed_gives_the_same_run_every_time(loop: VirtualTimeLoop) -> None:
    """A failing seed can only be repeated if its run is deterministic."""
    first: list[float] = []
    second: list[float] = []
    for seed in range(5):
        for times in (first, second):
            began_s = loop.time()
            assert simulate(loop, seed) is None
            times.append(round(loop.time() - began_s, 6))
    assert first == second
