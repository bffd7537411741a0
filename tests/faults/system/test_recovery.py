"""A run notices a process, or one of its operations, that does not succeed again."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from faults.crew import ROLES, SOURCES, Crew
from faults.plan import TAGS, Plan
from faults.roles.inspector import delivered_values
from faults.run import ANY_OWNER, RECOVERING, awaited_successes, first_successes_ns
from tidebook.testing.histories.line import HistoryFile

NAMES = [f"{role}-{number}" for role, count in ROLES.items() for number in range(1, count + 1)]


def plan_in(folder: Path) -> Plan:
    plan = Plan(str(folder), "book", 1, 0, "http://127.0.0.1:1")
    plan.histories.mkdir()
    return plan


def test_every_operation_of_every_source_is_awaited() -> None:
    assert {*SOURCES} <= RECOVERING.keys() <= ROLES.keys()
    awaited = awaited_successes(NAMES)
    assert {("writer-1", "append"), ("writer-1", "read"), ("writer-2", "append"), ("wal-2", "wal_replay")} <= awaited
    assert len(awaited) == 1 + sum(ROLES[role] * len(ops) for role, ops in RECOVERING.items())


def test_only_later_successes_of_the_process_count(tmp_path: Path) -> None:
    plan, ns = plan_in(tmp_path), 10
    history = HistoryFile(plan.histories / "writer-1.2.ndjson", "writer-1.2", now_ns=lambda: ns)
    history.begin("append").ok()
    sizes = {file: file.stat().st_size for file in plan.histories.iterdir()}
    assert first_successes_ns(plan, 9, {}) == {("writer-1", "append"): 10, ("writer", "append"): 10}
    assert first_successes_ns(plan, 10, {}) == {}
    assert first_successes_ns(plan, 9, sizes) == {}
    history.begin("append").fail(OSError())
    history.begin("append").unknown(OSError())
    history.begin("append")
    assert first_successes_ns(plan, 9, sizes) == {}
    ns = 12
    history.begin("append").ok()
    history.begin("append").ok()
    assert first_successes_ns(plan, 9, sizes)["writer-1", "append"] == 12
    history.close()


def test_one_write_by_any_owner_is_enough(tmp_path: Path) -> None:
    plan = plan_in(tmp_path)
    history = HistoryFile(plan.histories / "wal-2.1.ndjson", "wal-2.1", now_ns=lambda: 10)
    history.begin("wal_write").ok()
    history.close()
    found = first_successes_ns(plan, 0, {})
    assert ANY_OWNER in found
    assert ("wal-1", "wal_replay") in awaited_successes(NAMES) - found.keys()


def test_a_stream_that_delivered_nothing_is_listed(tmp_path: Path) -> None:
    found = delivered_values(plan_in(tmp_path))
    assert {*found} == {(f"consumer-{number}", tag) for number in (1, 2) for tag in TAGS}
    assert not any(found.values())


def test_a_process_that_ends_by_itself_is_reported(tmp_path: Path) -> None:
    crew = Crew(plan_in(tmp_path), 1, lambda text: None)
    crew._incarnations["relay-1"] = 1
    for code, reported in ((None, 0), (0, 1), (3, 2)):
        crew._running["relay-1"] = SimpleNamespace(exitcode=code)  # type: ignore[assignment]
        crew._note_end("relay-1")
        assert len(crew.ended_badly) == reported
