"""The conclusions of the console from a survey: states that need a person, the horizon, lag and gaps."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tidebook.api.pipeline import PipelineJobResponse
from tidebook.core.replication_plan import TagRow
from tidebook.outbox.port import OutboxTopicStatus
from tidebook.replication.inline import InlineStatus
from tidebook.replication.status import JobStatus, PartitionStatus
from tidebook.server.console.counts import Count, QueueNumbers
from tidebook.server.console.findings import PINNED_BYTES_MAX, findings_of
from tidebook.server.console.health import PartHealth, replication_health
from tidebook.server.console.pipeline import describe_outcome, job_data, partition_row
from tidebook.server.console.survey import RegionSurvey, Survey, TopicSurvey, horizon_of, summary
from tidebook.server.console.tags import TagGap, find_gaps
from tidebook.server.pipeline_jobs import PipelineJob
from tidebook.tags.event import TaggedEvent
from tidebook.wal.region import RegionStatus

NONE, SOME = Count(0), Count(3)


def topic(name: str, **fields: Any) -> TopicSurvey:
    return TopicSurvey(topic=name, **{"partitions": 2, "epoch": 1, "records": 9, "lag": 0, "end": 9, **fields})


def queue(name: str, **fields: Any) -> QueueNumbers:
    return QueueNumbers(queue=name, **{"due": SOME, "later": NONE, "processing": NONE, "dead": NONE, **fields})


def outbox(name: str, **fields: Any) -> OutboxTopicStatus:
    empty: dict[str, Any] = dict.fromkeys(OutboxTopicStatus.__struct_fields__, None)
    numbers = {"waiting": 0, "waiting_is_bound": False, "error": False, "parked": 0, "held": 0, "per_minute": 0}
    return OutboxTopicStatus(**{**empty, **numbers, "topic": name, **fields})


def region(held_bytes: int = 0, cleaner_error: str | None = None) -> RegionSurvey:
    status = RegionStatus(1, 1, 2, 0, 9, held_bytes, 5, None, 0.0, cleaner_error)
    return RegionSurvey(namespace="metrics", region=1, status=status)


def test_every_state_that_needs_a_person_is_found_and_the_worst_comes_first() -> None:
    job = JobStatus(0, 1, 1, 0, 1.0, 1.0, stopped={"orders/1": "it is damaged"})
    survey = Survey(
        at_ms=0,
        took_s=0.0,
        topics=[topic("broken", problem="the log does not have it"), topic("slow", lag=7, lag_s=61.0), topic("sound")],
        queues=[queue("mail", dead=Count(2)), queue("held", paused_at_ms=1), queue("sound")],
        outbox=[
            outbox("parked", parked=1),
            outbox("failing", error=True, reason="no broker"),
            outbox("old", oldest_age_ms=61_000),
            outbox("twice", notice="it may be sent twice"),
            outbox("sound"),
        ],
        regions=[region(PINNED_BYTES_MAX + 1), region(cleaner_error="disk is full"), region()],
        parked={"orders": 1},
        job=job,
        problems={"queues": "no answer"},
    )
    failed = PipelineJob("verify")
    failed.state = "failed"
    found = [(each.level, each.what) for each in findings_of(survey, [failed])]
    assert found == [
        ("bad", "queues cannot be read"),
        ("bad", "Partition orders/1 is stopped"),
        ("bad", "Topic broken"),
        ("bad", "Topic orders"),
        ("bad", "Queue mail"),
        ("bad", "Outbox parked"),
        ("bad", "Outbox failing"),
        ("bad", "Region metrics/1"),
        ("bad", "Job verify"),
        ("warn", "Topic slow lags"),
        ("warn", "Queue held is paused"),
        ("warn", "Outbox old"),
        ("warn", "Outbox twice"),
        ("warn", "Region metrics/1"),
    ]


def test_the_slowest_partition_holds_the_horizon_back() -> None:
    topics = [topic("a", slowest=1, slowest_ms=5_000, lag=2), topic("b", slowest=0, slowest_ms=9_000, lag=1)]
    found = horizon_of(topics, 10_000)
    assert found is not None
    assert (found.topic, found.partition, found.age_s, found.lag) == ("a", 1, 5.0, 3)
    never = horizon_of([*topics, topic("c")], 10_000)
    assert never is not None
    assert (never.topic, never.horizon) == ("c", None)
    assert horizon_of([], 10_000) is None
    assert horizon_of([*topics, topic("c", problem="no answer")], 10_000) is None


def test_a_lagging_partition_has_an_estimate_of_when_it_is_caught_up() -> None:
    lagging = PartitionStatus("orders", 0, 1, 0, 500, 100, 400, 12.0)
    job = JobStatus(0, 1, 1, 0, 200.0, 1.0, stopped={"orders/1": "damaged"})
    assert partition_row(lagging, job, 1, now_ms=0).caught_up_s == 2.0
    assert partition_row(lagging, job, 4, now_ms=0).caught_up_s == 8.0  # four partitions share the rate
    assert partition_row(PartitionStatus("orders", 0, 1, 0, 500, 500, 0, 0.0), job, 1, now_ms=0).caught_up_s is None
    stopped = partition_row(PartitionStatus("orders", 1, 1, 0, 500, 100, 400, 12.0), job, 1, now_ms=0)
    assert (stopped.stopped, stopped.caught_up_s) == ("damaged", None)
    assert partition_row(lagging, None, 1, now_ms=0).caught_up_s is None
    assert partition_row(lagging, job, 1, now_ms=59_000).caught_up_s == 2.0
    assert partition_row(lagging, job, 1, now_ms=61_000).caught_up_s is None  # the process no longer reports
    long_batches = msgspec.structs.replace(job, batch_s=100.0)
    assert partition_row(lagging, long_batches, 1, now_ms=61_000).caught_up_s == 2.0


def test_a_part_that_fails_is_a_finding_unless_the_survey_has_one() -> None:
    parts = [
        PartHealth(part="Log", kind="SQLite", ok=False, detail="no answer"),
        PartHealth(part="relay", kind="in this process", ok=False, detail="no broker", href="/doctor"),
        PartHealth(part="worker mail", kind="in this process", ok=True, detail="running", href="/doctor"),
    ]
    found = findings_of(Survey(at_ms=0, took_s=0.0), parts=parts)
    assert [(each.level, each.what, each.detail) for each in found] == [("bad", "relay", "no broker")]


LAGS = Survey(at_ms=0, took_s=0.0, topics=[topic("orders", lag=3, lag_s=61.0)])


@pytest.mark.parametrize(
    ("here", "ok", "detail"),
    [
        (InlineStatus(state="active"), True, "replicates in this process"),
        (InlineStatus(state="active", failures=1, last_error="the disk was full"), True, "replicates in this process"),
        (InlineStatus(state="passive"), True, "passive: another process replicates"),
        (InlineStatus(state="passive", silent_holder="it is silent"), False, "it is silent"),
        (InlineStatus(state="waiting"), True, "waiting: there is no topic yet"),
        (InlineStatus(state="waiting", last_error="the disk is full"), False, "the disk is full"),
        (InlineStatus(state="active", stopped={"orders/0": "damaged"}), False, "a partition is stopped"),
    ],
)
def test_replication_in_this_process_is_a_failure_only_while_it_cannot_continue(
    here: InlineStatus, ok: bool, detail: str
) -> None:
    found = replication_health(here, LAGS, now_ms=0)
    assert (found.ok, found.detail) == (ok, detail)


def test_replication_elsewhere_fails_if_records_wait_and_nothing_reports() -> None:
    job = JobStatus(0, 1, 1, 0, 200.0, 1.0, process="host:1")
    idle = Survey(at_ms=0, took_s=0.0, job=job)
    lags = msgspec.structs.replace(LAGS, job=job)
    stopped = msgspec.structs.replace(idle, job=msgspec.structs.replace(job, stopped={"orders/0": "damaged"}))
    found = [
        replication_health(None, idle, now_ms=3_600_000),
        replication_health(None, lags, now_ms=5_000),
        replication_health(None, lags, now_ms=3_600_000),
        replication_health(None, msgspec.structs.replace(LAGS, job=None), now_ms=0),
        replication_health(None, stopped, now_ms=5_000),
    ]
    assert [(each.ok, each.detail) for each in found] == [
        (True, "last reported 1 h ago by host:1"),
        (True, "last reported 5 s ago by host:1"),
        (False, "last reported 1 h ago by host:1, and records wait"),
        (False, "no process has reported, and records wait"),
        (False, "a partition is stopped; last reported 5 s ago by host:1"),
    ]


def test_offsets_that_the_log_lost_are_counted() -> None:
    assert partition_row(PartitionStatus("orders", 0, 1, 150, 500, 100, 350, 12.0), None, 1, now_ms=0).lost == 50
    assert partition_row(PartitionStatus("orders", 0, 1, 100, 500, 100, 400, 12.0), None, 1, now_ms=0).lost == 0


def test_numbers_of_the_overview_that_were_counted_to_a_bound_are_estimates() -> None:
    few, many = outbox("a", waiting=7), outbox("b", waiting=10_000, waiting_is_bound=True)
    assert summary(Survey(at_ms=0, took_s=0.0, outbox=[few]))["outbox_waiting"] == Count(7)
    assert summary(Survey(at_ms=0, took_s=0.0, outbox=[few, many]))["outbox_waiting"] == Count(10_007, exact=False)
    queues = [queue("mail", dead=Count(2)), queue("jobs", dead=Count(10_000, exact=False))]
    assert summary(Survey(at_ms=0, took_s=0.0, queues=queues))["dead"] == Count(10_002, exact=False)


def test_a_job_shows_its_differences_and_the_last_of_its_other_lines() -> None:
    differences = [{"what": "event missing", "topic": f"t-{n % 2}", "id": "a", "seq_nr": n} for n in range(600)]
    lines = [*({"step": n} for n in range(30)), *differences, "done"]
    answer = PipelineJobResponse(
        id="0", kind="verify", state="differences", started_at_ms=0, ended_at_ms=5, exit_code=1,
        progress=None, line_count=700, lines=lines, result=None, error=None,
    )  # fmt: skip
    found = job_data(answer, now_ms=9)
    assert (found.differences, found.left_out) == (differences[:500], 100)
    assert (found.progress[0], found.progress[-1], len(found.progress)) == ('{"step":11}', '"done"', 20)
    assert (found.forgotten, found.topics) == (69, ["t-0", "t-1"])


COMPARED = {"journals": 31, "events": 3_030, "differences": {}, "repaired": 0, "left": 0, "partial": []}


@pytest.mark.parametrize(
    ("kind", "state", "result", "expected"),
    [
        ("verify", "running", COMPARED, None),
        ("verify", "failed", COMPARED, None),
        (
            "verify",
            "done",
            COMPARED,
            "31 journals with 3,030 events compared: no difference, the store has what the log has.",
        ),
        (
            "verify",
            "differences",
            {**COMPARED, "differences": {"event missing": 2, "head differs": 1}, "left": 3, "partial": ["orders"]},
            "31 journals with 3,030 events compared: 3 differences, 0 repaired, 3 left. "
            "The log of orders no longer has its first records: earlier events were not compared.",
        ),
        (
            "rebuild",
            "done",
            {**COMPARED, "journals": 1, "events": 1, "differences": {"event missing": 1}, "repaired": 1},
            "1 journal with 1 event compared: 1 difference, 1 repaired, 0 left.",
        ),
        ("export", "done", {"batches": 1, "events": 3_030, "seconds": 1.0}, "3,030 events exported."),
        ("export", "done", "a line of text", None),
        ("rebuild", "done", None, None),
    ],
)  # fmt: skip
def test_a_job_that_has_ended_says_what_it_did(kind: Any, state: Any, result: Any, expected: str | None) -> None:
    answer = PipelineJobResponse(
        id="0", kind=kind, state=state, started_at_ms=0, ended_at_ms=5, exit_code=0,
        progress=None, line_count=1, lines=[], result=result, error=None,
    )  # fmt: skip
    assert describe_outcome(answer) == expected


def tagged(id: str, number: int, incarnation: int = 0) -> TaggedEvent:
    return TaggedEvent(TagRow("paid", 0, "orders", 0, number, 0, 1, id, 1, incarnation, number, number, 0, b""))


def test_gaps_are_missing_numbers_of_a_journal_within_one_incarnation() -> None:
    events = [tagged("a", 1), tagged("b", 7), tagged("a", 2), tagged("a", 5), tagged("a", 9, incarnation=3)]
    assert find_gaps(events) == [TagGap(topic="orders", id="a", first=3, last=4)]
