"""The sizing model says of the measured machine what was measured on it, and grows with the load."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.scale import MEASURED, Machine, catch_up_per_s, simulate_tail, size_for

#: From docs/benchmarks/pipeline.md, alone on the machine.
CATCH_UP_PER_S = 41_500
STEADY_P50_S, STEADY_P99_S, STEADY_CORES = 0.080, 0.271, 1.56


def test_the_catch_up_of_this_machine_is_within_thirty_percent() -> None:
    assert catch_up_per_s(MEASURED, Machine()) == pytest.approx(CATCH_UP_PER_S, rel=0.3)


def test_the_steady_load_of_this_machine_is_within_thirty_percent() -> None:
    tail = simulate_tail(MEASURED, Machine())
    assert tail.p50_s == pytest.approx(STEADY_P50_S, rel=0.3)
    assert tail.p99_s == pytest.approx(STEADY_P99_S, rel=0.3)
    assert tail.cores == pytest.approx(STEADY_CORES, rel=0.3)


def test_more_load_than_cores_is_late_and_more_cores_help() -> None:
    overloaded = Machine(cores=1, appends_per_s=6000)
    assert simulate_tail(MEASURED, overloaded, seconds=5).p50_s > 0.5
    assert simulate_tail(MEASURED, replace(overloaded, cores=8), seconds=5).p50_s < 0.2


def test_a_larger_load_needs_more_of_everything() -> None:
    small, large = size_for(MEASURED, 1e5), size_for(MEASURED, 1e6)
    assert small.log_partitions < large.log_partitions
    assert small.executor_cores < large.executor_cores
    assert (small.brokers, small.store_nodes) == (3, 3)
