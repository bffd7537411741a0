"""A journal that was damaged on all replicas is repaired from the log, during reads and late replays of old slices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("acsylla")

from tests.simulation.repair import RepairedRun
from tests.simulation.simulation import simulate
from tests.simulation.virtual_time import VirtualTimeLoop
from tidebook.core.position import write_stamp
from tidebook.store.cassandra import repair as repair
from tidebook.store.cassandra import store as stores
from tidebook.store.cassandra.repair import SplitRows

RUNS, RUNS_LONG = 120, 10_000
SEEDS_MAX = 200


@pytest.mark.timeout(3600)
def test_a_repaired_journal_matches_the_log_and_stays_so(loop: VirtualTimeLoop, long_form: bool) -> None:
    for seed in range(RUNS_LONG if long_form else RUNS):
        wrong = simulate(loop, seed, run_type=RepairedRun)
        assert wrong is None, wrong


def leaves_the_rest_of_a_packed_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A repaired event gets its own row, and the packed row stays above it."""

    async def split_nothing(*_: Any) -> SplitRows:
        return SplitRows()

    monkeypatch.setattr(stores, "split_packed_rows", split_nothing)


def repairs_under_the_stamp_of_what_it_repairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its revision a repair does not win over the writes of the pointer's own record."""
    monkeypatch.setattr(repair, "write_stamp", lambda position, rev=0: write_stamp(position))


@pytest.mark.parametrize("plant", [leaves_the_rest_of_a_packed_row, repairs_under_the_stamp_of_what_it_repairs])
def test_a_planted_mutant_of_repairs_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], loop: VirtualTimeLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert any(simulate(loop, seed, run_type=RepairedRun) for seed in range(SEEDS_MAX))
