"""The sizing model agrees with the measurements and its page, and grows with the load."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from bench.scale import MEASURED, Machine, catch_up_per_s, main, simulate_tail, size_for

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "explanation" / "scale.md").read_text()
UNITS = {"µs": 1e-6, "ms": 1e-3}


def figures(row: str) -> list[float]:
    """Return the figures of the table row that begins with a text, converted to seconds if they have a unit."""
    (cells,) = re.findall(rf"^\| {re.escape(row)} \|(.*)\|$", PAGE, re.MULTILINE)
    found = re.findall(r"([\d.,]*\d) ?(µs|ms|)", cells)
    return [float(number.replace(",", "")) * UNITS.get(unit, 1.0) for number, unit in found]


def test_the_figures_of_this_machine_are_within_thirty_percent_and_equal_those_of_the_page() -> None:
    tail = simulate_tail(MEASURED, Machine())
    for row, simulated, digits in (
        ("catch-up of single-event appends", catch_up_per_s(MEASURED, Machine()), -2),
        ("1,000 appends per second: append to store, p50", tail.p50_s, 3),
        ("the same, p99", tail.p99_s, 3),
        ("the same, cores used by all processes", tail.cores, 2),
    ):
        measured, on_page = figures(row)
        assert simulated == pytest.approx(measured, rel=0.3), row
        assert round(simulated, digits) == pytest.approx(on_page), row


@pytest.mark.parametrize("seed", [2, 3])
def test_the_figures_do_not_depend_on_the_seed(seed: int) -> None:
    """An overloaded second now and then decides the p99 of a short simulation."""
    tail, other = simulate_tail(MEASURED, Machine()), simulate_tail(MEASURED, Machine(), seed=seed)
    assert other.p50_s == pytest.approx(tail.p50_s, rel=0.05)
    assert other.p99_s == pytest.approx(tail.p99_s, rel=0.1)
    assert other.cores == pytest.approx(tail.cores, rel=0.05)


def test_the_same_costs_give_the_figures_of_the_page_for_slices_50_ms_apart() -> None:
    tail = simulate_tail(MEASURED, Machine(slice_every_s=0.05))
    text = f"the same costs give {tail.p50_s * 1e3:.0f} ms, {tail.p99_s * 1e3:.0f} ms and {tail.cores:.2f} cores"
    assert text in " ".join(PAGE.split())


def test_the_costs_and_the_sizes_of_the_page_are_those_of_the_model() -> None:
    for name, cost_s in asdict(MEASURED).items():
        if name != "appender_event_s":  # a cost of the measurement, not of the pipeline
            assert figures(f"`{name}`")[-1] == pytest.approx(cost_s), name
    size = size_for(MEASURED, 1e6)
    text = (
        f"{size.log_partitions} log partitions, {size.brokers} brokers, {size.store_nodes} store nodes and "
        f"{size.executor_cores} executor cores"
    )
    assert text in " ".join(PAGE.split())


def test_more_load_than_the_cores_can_handle_is_late_and_more_cores_help() -> None:
    overloaded = Machine(cores=1, appends_per_s=6000)
    assert simulate_tail(MEASURED, overloaded, seconds=5).p50_s > 0.5
    assert simulate_tail(MEASURED, replace(overloaded, cores=8), seconds=5).p50_s < 0.2


def test_a_larger_load_needs_more_of_everything() -> None:
    small, large = size_for(MEASURED, 1e5), size_for(MEASURED, 1e6)
    assert small.log_partitions < large.log_partitions
    assert small.executor_cores < large.executor_cores
    assert (small.brokers, small.store_nodes) == (3, 3)


def test_the_command_prints_the_sizes_for_the_given_load(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--events-per-s", "50000", "--replicas", "2", "--cores", "8"])
    expected = size_for(MEASURED, 50_000, replicas=2, node_cores=8, broker_cores=8)
    assert json.loads(capsys.readouterr().out) == asdict(expected)
