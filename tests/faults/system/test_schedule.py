"""The schedule of faults is a function of its seed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from faults.proxy import MODES
from faults.schedule import (
    DISK_ERROR,
    DISK_FULL,
    FIRST_S,
    FOREIGN,
    MORE_PARTITIONS,
    ONE_DOWN,
    PARTITIONS,
    ROLLING,
    UPGRADE,
    PlannedFault,
    Targets,
    make_schedule,
)

EMBEDDED = Targets(["server", "writer-1", "writer-2"], ["http"], clockless=["server"], fillable=True)
KINDS = {kind: [f"{kind}-{number}" for number in (1, 2, 3)] for kind in ("kafka", "cassandra", "postgres")}
CLUSTER = Targets(
    EMBEDDED.processes, ["http", *KINDS["kafka"], *KINDS["cassandra"]], KINDS, 3.0, [], ["kafka", "cassandra"]
)


def test_a_seed_is_a_schedule() -> None:
    first, second = (make_schedule(5, 60, EMBEDDED) for _ in range(2))
    assert first == second
    assert first != make_schedule(6, 60, EMBEDDED)
    assert all(FIRST_S <= fault.at_s < 60 for fault in first)


@pytest.mark.parametrize("targets", [EMBEDDED, CLUSTER], ids=["embedded", "cluster"])
def test_a_target_has_one_fault_at_a_time(targets: Targets) -> None:
    ends: dict[str, float] = {}
    for fault in make_schedule(1, 600, targets):
        assert ends.get(fault.target, 0.0) <= fault.at_s
        ends[fault.target] = fault.at_s + fault.duration_s


def test_one_server_of_a_kind_is_faulty_at_a_time() -> None:
    ends: dict[str, float] = {}
    for fault in make_schedule(1, 1800, CLUSTER):
        for kind in _kinds(fault):
            assert ends.get(kind, 0.0) <= fault.at_s
            ends[kind] = fault.at_s + fault.duration_s


def _kinds(fault: PlannedFault) -> Iterator[str]:
    for kind, names in KINDS.items():
        if fault.kind == ONE_DOWN or fault.target in (kind, *names):
            yield kind


def test_a_long_schedule_has_every_kind_of_fault() -> None:
    kinds = {fault.kind for fault in make_schedule(1, 600, EMBEDDED)}
    assert kinds == {"kill", "pause", "clock", DISK_ERROR, DISK_FULL, UPGRADE, *MODES}
    kinds = {fault.kind for fault in make_schedule(1, 1800, CLUSTER)}
    assert kinds == {
        "kill",
        "pause",
        "clock",
        ROLLING,
        ONE_DOWN,
        FOREIGN,
        MORE_PARTITIONS,
        *PARTITIONS,
        UPGRADE,
        *MODES,
    }


def test_commands_keep_the_clock_of_the_machine() -> None:
    jumped = {fault.target for fault in make_schedule(1, 600, EMBEDDED, only="clock")}
    assert jumped == {"writer-1", "writer-2"}


def test_only_restricts_to_a_kind_a_target_or_a_role() -> None:
    for only, found in (("kill", "kind"), ("writer-2", "target"), ("http", "target")):
        assert {getattr(fault, found) for fault in make_schedule(1, 120, EMBEDDED, only=only)} == {only}
    assert {fault.target for fault in make_schedule(1, 120, EMBEDDED, only="writer")} == {"writer-1", "writer-2"}
    assert {fault.target for fault in make_schedule(1, 600, CLUSTER, only="kafka")} == {"kafka", *KINDS["kafka"]}
    with pytest.raises(ValueError, match="nothing"):
        make_schedule(1, 60, EMBEDDED, only="nothing")


def test_a_run_of_a_minute_has_one_upgrade() -> None:
    kinds = [fault.kind for fault in make_schedule(1, 60, EMBEDDED)]
    assert kinds.count(UPGRADE) == 1
    assert UPGRADE not in [fault.kind for fault in make_schedule(1, 30, EMBEDDED)]
    assert [fault.kind for fault in make_schedule(1, 30, EMBEDDED, only=UPGRADE)] == [UPGRADE]
