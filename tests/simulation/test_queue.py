"""Simulated workers of a queue: an entry has one holder and is finished, even if calls are late or processes die."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from tests.simulation.choices import Choice, Explainable, explain
from tests.simulation.planting import assert_found, assert_reduced, plant
from tests.simulation.queue_run import QueueRun
from tests.simulation.virtual_time import run_in_virtual_time
from tidebook.queue.sqlite import claims, expired_leases

SEEDS, LONG_SEEDS = 20, 4_000
#: The runs in which the test reduces a failing seed.
RUNS_MAX = 20
SEEDS_MAX = 60


def run(seed: int, replayed: Sequence[Choice] | None = None) -> Explainable:
    made = QueueRun(seed, replayed)
    verdicts = run_in_virtual_time(made.go)
    assert replayed or all(verdict.checked for verdict in verdicts)
    return Explainable(
        made.chance.recorded,
        made.recorder.history.calls,
        [f"{each.subject}: {each.message}" for verdict in verdicts for each in verdict.violations],
    )


def violations(seed: int) -> Sequence[str]:
    return run(seed).violations


def test_an_entry_has_one_holder_and_is_finished(long_form: bool) -> None:
    for seed in range(LONG_SEEDS if long_form else SEEDS):
        if violations(seed):
            raise AssertionError(explain(seed, partial(run, seed)))


@pytest.mark.parametrize(
    ("owner", "name", "old", "new"),
    [
        (claims, "_lease", "(token, now_ms, until, serial,", "(token, now_ms, until - lease_ms * 3 // 4, serial,"),
        (claims, "finish", "session.connection.execute(_DELETE, (ids,))", "pass"),
        (claims, "heartbeat", "session.connection.execute(_EXTEND, (now_ms + lease_ms, ids))", "pass"),
        (claims, "_claim", "if any_expired:", "if any_expired and False:"),
        (expired_leases, "_fail", "connection.execute(_WAIT, (total_timeouts, at_ms, id))", "_delete(connection, id)"),
        (expired_leases, "_merge_into_sibling", "    _delete(connection, id)\n", "    _delete(connection, sibling)\n"),
        (expired_leases, "expire_leases", "execute(_COUNT_TIMEOUT, (id,))", "_delete(connection, id)"),
    ],
    ids=[
        "leases end early",
        "finished entries stay",
        "heartbeats do not extend the lease",
        "expired leases are not noticed",
        "given back entries are lost",
        "the newer entry is lost in a merge",
        "an entry is lost with its lease",
    ],
)
def test_a_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, old: str, new: str) -> None:
    plant(monkeypatch, owner, name, old, new)
    assert_found(violations, range(SEEDS_MAX))


def test_a_failing_seed_is_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, claims, "heartbeat", "session.connection.execute(_EXTEND, (now_ms + lease_ms, ids))", "pass")
    seed = next(seed for seed in range(SEEDS_MAX) if violations(seed))
    assert_reduced(explain(seed, partial(run, seed), runs_max=RUNS_MAX))
