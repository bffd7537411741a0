"""The schedule of faults is a function of its seed."""

from __future__ import annotations

import pytest

from faults.proxy import MODES
from faults.schedule import FIRST_S, make_schedule

PROCESSES = ["server", "writer-1", "writer-2"]


def test_a_seed_is_a_schedule() -> None:
    first, second = (make_schedule(5, 60, PROCESSES, ["http"]) for _ in range(2))
    assert first == second
    assert first != make_schedule(6, 60, PROCESSES, ["http"])
    assert all(FIRST_S <= fault.at_s < 60 for fault in first)


def test_a_target_has_one_fault_at_a_time() -> None:
    ends: dict[str, float] = {}
    for fault in make_schedule(1, 600, PROCESSES, ["http"]):
        assert ends.get(fault.target, 0.0) <= fault.at_s
        ends[fault.target] = fault.at_s + fault.duration_s


def test_a_long_schedule_has_every_kind_of_fault() -> None:
    kinds = {fault.kind for fault in make_schedule(1, 600, PROCESSES, ["http"])}
    assert kinds == {"kill", "pause", *MODES}


def test_only_restricts_to_a_kind_a_target_or_a_role() -> None:
    for only, found in (("kill", "kind"), ("writer-2", "target"), ("http", "target")):
        assert {getattr(fault, found) for fault in make_schedule(1, 120, PROCESSES, ["http"], only=only)} == {only}
    targets = {fault.target for fault in make_schedule(1, 120, PROCESSES, ["http"], only="writer")}
    assert targets == {"writer-1", "writer-2"}
    with pytest.raises(ValueError, match="nothing"):
        make_schedule(1, 60, PROCESSES, ["http"], only="nothing")
