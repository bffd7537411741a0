"""The check of histories finds every kind of violation; otherwise its success would prove nothing."""

from __future__ import annotations

from typing import Any

from tests.faults.queue.history import faults_in, of


def putting(
    serial: int, at: int, key: str | None = "k", priority: int = 100, reported: bool = True
) -> list[dict[str, Any]]:
    config = {"member": "p", "serial": serial, "key": key, "priority": priority, "process_at": None, "expires_at": None}
    put = [{"at": at, "what": "putting", "inserted_at": serial, **config}]
    return [*put, {"at": at + 1, "what": "put", **config}] if reported else put


def claimed(hold: str, at: int, serial: int = 1, **config: Any) -> dict[str, Any]:
    claim = {"at": at, "member": "w", "what": "claimed", "hold": hold, "asked": at - 1, "id": 1, "key": "k"}
    entry = {"data": {"member": "p", "serial": serial}, "priority": 100, "timeouts": 0, "inserted_at": 1}
    dates = {"process_at": 0, "expires_at": None, "started_at": at, "lease_until": at + 100}
    return {**claim, **entry, **dates, **config}


def step(hold: str, at: int, what: str, **config: Any) -> dict[str, Any]:
    return {"at": at, "member": "w", "what": what, "hold": hold, **config}


def finished(hold: str, at: int) -> list[dict[str, Any]]:
    return [step(hold, at, "finishing"), step(hold, at + 1, "finished")]


def faults(*events: dict[str, Any]) -> list[str]:
    return faults_in(of(sorted(events, key=lambda event: event["at"])))


def test_a_correct_history_has_no_violations() -> None:
    assert faults(*putting(1, 0), claimed("a", 10), *finished("a", 20)) == []


def test_an_expired_lease_may_be_taken_over() -> None:
    taken = [claimed("a", 10), claimed("b", 110), step("a", 115, "finishing"), step("a", 116, "lost")]
    assert faults(*putting(1, 0), *taken, *finished("b", 120)) == []


def test_two_holders_of_a_valid_lease_are_found() -> None:
    (fault,) = faults(*putting(1, 0), claimed("a", 10), claimed("b", 50, id=2), *finished("b", 60))
    assert "at the same time" in fault


def test_a_claim_may_take_an_entry_whose_lease_ends_during_the_claim() -> None:
    late = claimed("b", 20_000_105, id=2, asked=105, started_at=105)
    assert faults(*putting(1, 0), claimed("a", 10), late, *finished("b", 20_000_110)) == []


def test_a_heartbeat_makes_a_lease_valid_for_longer() -> None:
    beat = step("a", 90, "beat", lease_until=190)
    (fault,) = faults(*putting(1, 0), claimed("a", 10), beat, claimed("b", 120, id=2), *finished("b", 130))
    assert "at the same time" in fault


def test_finishing_the_entry_of_another_worker_is_found() -> None:
    found = faults(*putting(1, 0), claimed("a", 10), claimed("b", 120), *finished("a", 130))
    assert any("finished the entry of b" in fault for fault in found)


def test_an_entry_that_is_claimed_after_it_was_finished_is_found() -> None:
    found = faults(*putting(1, 0), claimed("a", 10), *finished("a", 20), claimed("b", 130), *finished("b", 140))
    assert any("claimed what a had finished" in fault for fault in found)


def test_a_put_that_was_never_done_is_found() -> None:
    (fault,) = faults(*putting(1, 0), *putting(2, 5), claimed("a", 10), *finished("a", 20))
    assert "never done" in fault


def test_a_put_that_was_not_acknowledged_need_not_be_done() -> None:
    assert faults(*putting(1, 0), *putting(2, 5, reported=False), claimed("a", 10), *finished("a", 20)) == []


def test_an_expired_entry_that_is_handed_out_is_found() -> None:
    (fault,) = faults(*putting(1, 0, key=None), claimed("a", 10, key=None, expires_at=10), *finished("a", 20))
    assert "expired" in fault


def test_an_entry_that_is_handed_out_before_its_date_is_found() -> None:
    (fault,) = faults(*putting(1, 0), claimed("a", 10, process_at=11), *finished("a", 20))
    assert "before its date" in fault


def test_a_merge_that_lost_the_smallest_priority_is_found() -> None:
    (fault,) = faults(*putting(1, 0, priority=20), *putting(2, 5), claimed("a", 10, serial=2), *finished("a", 20))
    assert "smallest priority" in fault
