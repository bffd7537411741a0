"""The report of a run counts what was answered in time, and shows every kind of failure."""

from __future__ import annotations

from pathlib import Path

from faults.report import ANSWERED_WITHIN_S, AVAILABLE_AFTER_S, POINTS_MAX, facts, summarize, write_report
from faults.run import DoneFault, RunResult
from faults.schedule import ONE_DOWN
from tidebook.testing.histories.call import NEVER_NS, RecordedCall, RecordedHistory
from tidebook.testing.histories.verdict import RuleVerdict

SECOND_NS = 1_000_000_000
CHECKED = RuleVerdict("a rule", 1)


def call(number: int, start_s: float, end_s: float | None, outcome: str = "ok", **more: object) -> RecordedCall:
    end_ns = NEVER_NS if end_s is None else int(end_s * SECOND_NS)
    return RecordedCall("writer-1.1", number, "append", {}, int(start_s * SECOND_NS), end_ns, outcome, **more)  # type: ignore[arg-type]


def result(*faults: DoneFault, **more: object) -> RunResult:
    found = {"recovered_s": 1.0, "caught_up_s": 1.0, "verdicts": [CHECKED], "quiet_ns": 100 * SECOND_NS} | more
    return RunResult(1, "./dev faults", 0, list(faults), **found)  # type: ignore[arg-type]


def test_a_call_that_is_answered_only_after_the_restart_was_not_available() -> None:
    down_s = 30.0
    fault = DoneFault(ONE_DOWN, "servers", 0, 45 * SECOND_NS, int(down_s * SECOND_NS))
    history = RecordedHistory(
        [
            call(1, 1, 2),  # before the others have taken over
            call(2, AVAILABLE_AFTER_S + 1, AVAILABLE_AFTER_S + 2),
            call(3, AVAILABLE_AFTER_S + 3, down_s - 1),  # slow, but while the servers were down
            call(4, down_s - 1, down_s - 2 + ANSWERED_WITHIN_S),
            call(5, down_s - 10, down_s + 1),  # only because they were restarted
            call(6, down_s - 9, None, "unknown", error="OutcomeUnknown"),
            call(7, down_s + 1, down_s + 2),
        ]
    )
    found = facts(result(fault), history)
    assert found["one_down"] == {"append": [3, 5]}


def test_errors_and_restarts_are_counted() -> None:
    observed = RecordedCall("consumer-2.1", 1, "restarted", {"part": "join"}, 5, 5, "ok", {"error": "Unavailable"})
    history = RecordedHistory(
        [
            call(1, 1, 2),
            call(2, 2, 3, "fail", error="Unavailable"),
            call(3, 3, 4, "fail", error="Unavailable"),
            call(4, 4, None, "unknown", error="OutcomeUnknown"),
            call(5, 5, None, "unknown"),
            observed,
        ]
    )
    found = facts(result(restarts={"server": 1}), history)
    assert found["operations"]["append"]["errors"] == {"Unavailable": 2, "OutcomeUnknown": 1, "process killed": 1}
    assert found["restarts"] == {"server": 1, "consumer-2 (join, Unavailable)": 1}
    assert list(found["operations"]) == ["append"]


def test_a_rule_without_facts_or_a_process_without_success_fails_the_run() -> None:
    assert result().ok
    assert not result(verdicts=[RuleVerdict("a rule", 0)]).ok
    lines = [*summarize(facts(result(verdicts=[RuleVerdict("a rule", 0)]), RecordedHistory([])))]
    assert "  NO FACTS a rule (0 checked)" in lines
    missing = result(recovered_s=None, unrecovered=["append of writer-1"])
    assert not missing.ok
    assert "NOT RECOVERED within 30 s: append of writer-1" in [*summarize(facts(missing, RecordedHistory([])))]


def test_the_timeline_keeps_rare_failures(tmp_path: Path) -> None:
    calls = [call(number, number / 100, number / 100 + 0.001) for number in range(2 * POINTS_MAX + 1)]
    calls += [call(number, 1, 1.01 + number, "fail", error="Unavailable") for number in range(3)]
    history = RecordedHistory(calls)
    run = result()
    page = write_report(tmp_path, facts(run, history), run, history).read_text()
    assert page.count(", 2]") == 3  # of a sample of every third call, one might be left
