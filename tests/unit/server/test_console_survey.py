"""What the console concludes from a survey: what needs a person, the horizon, lag and gaps."""

from __future__ import annotations

from typing import Any

from tidebook.core.replication_plan import TagRow
from tidebook.outbox.port import OutboxTopicStatus
from tidebook.replication.status import JobStatus, PartitionStatus
from tidebook.server.console.overview import PINNED_BYTES_MAX, find
from tidebook.server.console.pipeline import partition_row
from tidebook.server.console.queue_numbers import QueueNumbers
from tidebook.server.console.render import Count
from tidebook.server.console.survey import RegionSurvey, Survey, TopicSurvey, horizon_of
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


def test_everything_that_needs_a_person_is_found_and_the_worst_comes_first() -> None:
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
    found = [(each.level, each.what) for each in find(survey, [failed])]
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
    survey = Survey(at_ms=0, took_s=0.0, job=JobStatus(0, 1, 1, 0, 200.0, 1.0, stopped={"orders/1": "damaged"}))
    assert partition_row(lagging, survey).caught_up_s == 2.0
    assert partition_row(PartitionStatus("orders", 0, 1, 0, 500, 500, 0, 0.0), survey).caught_up_s is None
    stopped = partition_row(PartitionStatus("orders", 1, 1, 0, 500, 100, 400, 12.0), survey)
    assert (stopped.stopped, stopped.caught_up_s) == ("damaged", None)
    assert partition_row(lagging, Survey(at_ms=0, took_s=0.0)).caught_up_s is None


def tagged(id: str, number: int, incarnation: int = 0) -> TaggedEvent:
    return TaggedEvent(TagRow("paid", 0, "orders", 0, number, 0, 1, id, 1, incarnation, number, number, 0, b""))


def test_gaps_are_missing_numbers_of_a_journal_within_one_incarnation() -> None:
    events = [tagged("a", 1), tagged("b", 7), tagged("a", 2), tagged("a", 5), tagged("a", 9, incarnation=3)]
    assert find_gaps(events) == [TagGap(topic="orders", id="a", first=3, last=4)]
