"""Simulated workers of a queue: whatever is late, lost, paused or killed, an entry has one holder and is finished."""

from __future__ import annotations

from typing import Any

import pytest

from tests.simulation.planting import assert_found, plant
from tests.simulation.queue_run import QueueRun
from tests.simulation.virtual_time import run_in_virtual_time
from tidebook.queue.sqlite import claims, expired_leases

SEEDS, LONG_SEEDS = 20, 4_000
SEEDS_MAX = 60


def violations(seed: int) -> list[str]:
    verdicts = run_in_virtual_time(QueueRun(seed).go)
    assert all(verdict.checked for verdict in verdicts)
    return [f"{each.subject}: {each.message}" for verdict in verdicts for each in verdict.violations]


def test_an_entry_has_one_holder_and_is_finished(long_form: bool) -> None:
    for seed in range(LONG_SEEDS if long_form else SEEDS):
        assert violations(seed) == [], f"seed {seed}"


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
