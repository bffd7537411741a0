"""Simulated owners of a write-ahead log: acknowledged writes are replayed, despite faults and killed processes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from tests.simulation.choices import Choice, Explainable, explain
from tests.simulation.planting import assert_found, assert_reduced, plant
from tests.simulation.virtual_time import run_in_virtual_time
from tests.simulation.wal_run import WalRun
from tidebook.wal import meta, snapshot
from tidebook.wal.group_commit import GroupCommit

SEEDS, LONG_SEEDS = 20, 4_000
#: The runs in which the test reduces a failing seed.
RUNS_MAX = 20
#: Even the rarest planted fault is found by a seed soon after the first.
FIRST_SEED, SEEDS_MAX = 240, 60


def run(seed: int, replayed: Sequence[Choice] | None = None) -> Explainable:
    made = WalRun(seed, replayed)
    verdict = run_in_virtual_time(made.go)
    assert verdict.checked or replayed
    return Explainable(
        made.chance.recorded,
        made.recorder.history.calls,
        [f"{each.subject}: {each.message}" for each in verdict.violations],
    )


def violations(seed: int) -> Sequence[str]:
    return run(seed).violations


def test_acknowledged_writes_are_replayed(long_form: bool) -> None:
    for seed in range(LONG_SEEDS if long_form else SEEDS):
        if violations(seed):
            raise AssertionError(explain(seed, partial(run, seed)))


def test_a_seed_determines_the_run() -> None:
    def lines(seed: int) -> list[str]:
        run = WalRun(seed)
        run_in_virtual_time(run.go)
        return [f"{call.start_ns} {call.end_ns} {call}" for call in run.recorder.history.calls]

    assert lines(5) == lines(5)
    assert lines(5) != lines(6)


@pytest.mark.parametrize(
    ("owner", "name", "old", "new"),
    [
        (meta, "_fold_write", "if write.term != meta.term or write.writer != meta.writer:", "if False:"),
        (meta, "_fold_write", "if part.first != expected:", "if False:"),
        (meta, "fold", "if record.term <= meta.term:", "if record.term < 0:"),
        (meta, "fold", "table.mapping.remove_below(seq)", "table.mapping.remove_below(seq + 1)"),
        (GroupCommit, "_on_sent", "and outcome.offset == self.meta.next_offset", "and True"),
        (GroupCommit, "_reconcile", "(absent or self._must_claim)", "False"),
        (GroupCommit, "_resolve_in_flight", "if offset is not None:", "if isinstance(outcome, Acknowledged):"),
        (snapshot, "plan_truncation", "min(wanted, kept[0].snapshot.data_offset)", "kept[0].snapshot.data_offset"),
    ],
    ids=[
        "writes of a former owner are valid",
        "writes need not continue the numbers",
        "an old claim wins",
        "a mark covers one entry too many",
        "a gap before an acknowledgement is not read",
        "an unknown write is retried without a new claim",
        "an acknowledgement counts as the outcome",
        "a truncation removes what tables need",
    ],
)
def test_a_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, old: str, new: str) -> None:
    plant(monkeypatch, owner, name, old, new)
    assert_found(violations, range(FIRST_SEED, FIRST_SEED + SEEDS_MAX))


def test_a_failing_seed_is_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, meta, "fold", "table.mapping.remove_below(seq)", "table.mapping.remove_below(seq + 1)")
    seed = next(seed for seed in range(SEEDS_MAX) if violations(seed))
    assert_reduced(explain(seed, partial(run, seed), runs_max=RUNS_MAX))
