"""Simulated relays of an outbox: a committed message arrives once and in order, despite faults and killed processes.

A failing seed is reduced and printed with its faults; `RelayRun(SEED).go()` repeats exactly that run.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest

from tests.simulation.choices import Choice, Explainable, explain
from tests.simulation.planting import assert_reduced, plant
from tests.simulation.relay_run import RelayRun
from tidebook.outbox import batch_selection
from tidebook.outbox.fence import Fence
from tidebook.outbox.scan_floor import ScanFloor
from tidebook.outbox.store import OutboxStore
from tidebook.outbox.topic_relay import TopicRelay

PARTS, SEEDS, LONG_SEEDS = 8, 2_300, 10_000
SEEDS_MAX = 600


def run(seed: int, replayed: Sequence[Choice] | None = None) -> Explainable:
    made = RelayRun(seed, replayed)
    verdict = made.go()
    found = [f"{each.subject}: {each.message}" for each in verdict.violations]
    return Explainable(made.chance.recorded, made.story, found)


def violations(seed: int) -> Sequence[str]:
    return run(seed).violations


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(PARTS))
def test_a_committed_message_arrives_once_and_in_order(part: int, long_form: bool) -> None:
    for seed in range(part * LONG_SEEDS, part * LONG_SEEDS + (LONG_SEEDS if long_form else SEEDS)):
        if violations(seed):
            raise AssertionError(explain(seed, partial(run, seed)))


def test_a_seed_determines_the_run() -> None:
    def course(seed: int) -> tuple[list[Choice], list[Any]]:
        run = RelayRun(seed)
        run.go()
        return run.chance.recorded, run.story

    assert course(5) == course(5)
    assert course(5) != course(6)


class Planted(NamedTuple):
    """A fault of one function, the fence of the runs that find it, and a seed shortly before the first that does."""

    owner: Any
    name: str
    old: str
    new: str
    fence: Fence | None = None
    first_seed: int = 0


PLANTED = {
    "a relay that lost its lock continues": Planted(
        OutboxStore, "begin", "_held_row(lock, guard)", "guard.rows[0] if guard.rows else (0, 0, 0, 0)", None, 300
    ),
    "a session left open is not resolved": Planted(
        TopicRelay, "relay", "self._resolve_session(topic, open_session)", "True"
    ),
    "a session is resolved while its messages are on their way": Planted(
        TopicRelay, "_resolve_session", "session.age_ms < self._settings.lock_limit_ms", "False", Fence.TIMESTAMP, 360
    ),
    "messages found in the log stay": Planted(
        TopicRelay,
        "_resolve_session",
        "self._store.finish(self._lock, sorted(ids), unlock=False)",
        "self._store.finish(self._lock, [], unlock=False)",
    ),
    "a session is opened without waiting for the disk": Planted(
        OutboxStore, "begin", "self._transaction(durable=True)", "self._transaction(durable=False)"
    ),
    "the order of a parked key is not held": Planted(
        batch_selection, "select_batch", "if key is not None and key in held_keys:", "if False:", None, 140
    ),
    "late commits are skipped": Planted(ScanFloor, "advance", "self._seen[0][1] <= xmin and", "True and"),
    "a batch that was sent in part counts as sent": Planted(
        TopicRelay,
        "_handle_failure",
        "self._store.finish(self._lock, sorted(sent), unlock=False)",
        "self._store.finish(self._lock, [row.id for row in batch.messages], unlock=False)",
        None,
        300,
    ),
}


@pytest.mark.parametrize("planted", PLANTED.values(), ids=PLANTED.keys())
def test_a_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch, planted: Planted) -> None:
    plant(monkeypatch, planted.owner, planted.name, planted.old, planted.new)
    for seed in range(planted.first_seed, planted.first_seed + SEEDS_MAX):
        if RelayRun(seed, fence=planted.fence).go().violations:
            return
    raise AssertionError(f"not found with {SEEDS_MAX} seeds")


def test_a_failing_seed_is_reduced_and_fails_again(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, *PLANTED["a session left open is not resolved"][:4])
    seed = next(seed for seed in range(SEEDS_MAX) if violations(seed))
    assert_reduced(explain(seed, partial(run, seed)))
