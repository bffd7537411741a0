"""The short forms of the simulations together run as many seeds as the page about guarantees says."""

from __future__ import annotations

import pytest

pytest.importorskip("acsylla")

from tests.simulation import test_histories, test_queue, test_relay, test_repairs, test_wal

SEEDS_MIN = 20_000


def test_the_short_form_runs_enough_seeds() -> None:
    seeds = test_relay.PARTS * test_relay.SEEDS + test_histories.PARTS * test_histories.RUNS
    seeds += test_repairs.RUNS + test_wal.SEEDS + test_queue.SEEDS
    assert seeds >= SEEDS_MIN
