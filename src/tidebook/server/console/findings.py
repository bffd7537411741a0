"""The findings of a survey: what needs the attention of an operator, the worst first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Literal

import msgspec

from tidebook.outbox.port import OutboxTopicStatus
from tidebook.server.console.counts import QueueNumbers
from tidebook.server.console.formatting import counted, size, span, span_ms
from tidebook.server.console.health import LAG_S_MAX, PartHealth
from tidebook.server.console.render import link
from tidebook.server.console.survey import PARKED_MAX, RegionSurvey, Survey
from tidebook.server.pipeline_jobs import PipelineJob

#: Values above these bounds need attention.
OUTBOX_AGE_S_MAX: Final = 60.0
PINNED_BYTES_MAX: Final = 256_000_000

Level = Literal["bad", "warn"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Something that needs attention, and the page where an operator deals with it."""

    level: Level
    what: str
    detail: str
    href: str


def findings_of(
    survey: Survey, failed_jobs: Sequence[PipelineJob] = (), parts: Sequence[PartHealth] = ()
) -> list[Finding]:
    """Return the findings that need attention, the worst first."""
    found = [
        *(_bad(f"{part} cannot be read", reason, "/doctor") for part, reason in survey.problems.items()),
        *_pipeline_findings(survey),
        *(_bad(each.part, each.detail, each.href) for each in parts if not each.ok and each.href is not None),
        *(each for queue in survey.queues for each in _queue_findings(queue)),
        *(each for topic in survey.outbox for each in _outbox_findings(topic)),
        *(each for region in survey.regions for each in _region_findings(region)),
        *map(_failed_job, failed_jobs),
    ]
    return sorted(found, key=lambda each: each.level)


def _bad(what: str, detail: str, href: str) -> Finding:
    return Finding(level="bad", what=what, detail=detail, href=href)


def _warn(what: str, detail: str, href: str) -> Finding:
    return Finding(level="warn", what=what, detail=detail, href=href)


def _pipeline_findings(survey: Survey) -> Iterator[Finding]:
    if survey.job is not None:
        for where, reason in survey.job.stopped.items():
            yield _bad(f"Partition {where} is stopped", reason, "/pipeline")
    for each in survey.topics:
        if each.problem is not None:
            yield _bad(f"Topic {each.topic}", each.problem, link("/topic", topic=each.topic))
        elif each.lag_s is not None and each.lag_s > LAG_S_MAX:
            detail = f"{each.lag:,} records wait, the oldest for {span(each.lag_s)}"
            yield _warn(f"Topic {each.topic} lags", detail, "/pipeline")
    more = " or more" if sum(survey.parked.values()) >= PARKED_MAX else ""
    for name, count in survey.parked.items():
        noun = "record is parked" if count == 1 else "records are parked"
        yield _bad(f"Topic {name}", f"{count:,}{more} {noun}", "/pipeline")


def _queue_findings(queue: QueueNumbers) -> Iterator[Finding]:
    if queue.dead.value:
        noun = "dead letter" if queue.dead.value == 1 else "dead letters"
        href = link("/queue", queue=queue.queue, status="dead")
        yield _bad(f"Queue {queue.queue}", f"{queue.dead} {noun}", href)
    if queue.paused_at_ms is not None:
        due = "1 entry is due" if queue.due.value == 1 else f"{queue.due} entries are due"
        yield _warn(f"Queue {queue.queue} is paused", due, link("/queue", queue=queue.queue))


def _outbox_findings(topic: OutboxTopicStatus) -> Iterator[Finding]:
    what = f"Outbox {topic.topic}"
    if topic.parked:
        detail = counted(topic.parked, "message is parked", "messages are parked")
        yield _bad(what, detail, link("/outbox", topic=topic.topic))
    if topic.error:
        yield _bad(what, topic.reason or "it fails", "/outbox")
    if topic.oldest_age_ms is not None and topic.oldest_age_ms > OUTBOX_AGE_S_MAX * 1000:
        yield _warn(what, f"the oldest message has waited for {span_ms(topic.oldest_age_ms)}", "/outbox")
    if topic.notice is not None:
        yield _warn(what, topic.notice, "/outbox")


def _region_findings(region: RegionSurvey) -> Iterator[Finding]:
    what, status = f"Region {region.namespace}/{region.region}", region.status
    href = link("/region", namespace=region.namespace, region=region.region)
    if region.problem is not None:
        yield _bad(what, region.problem, href)
    elif status is not None and status.cleaner_error is not None:
        yield _bad(what, f"cleaning fails: {status.cleaner_error}", href)
    if status is not None and status.held_bytes > PINNED_BYTES_MAX:
        yield _warn(what, f"table {status.pinned_by} pins {size(status.held_bytes)} of the log", href)


def _failed_job(job: PipelineJob) -> Finding:
    response = job.response()
    return _bad(f"Job {response.kind}", response.error or "it failed", link("/job", job=response.id))
