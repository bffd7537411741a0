"""The overview: first the findings that need attention, then the numbers of the book and the health of its parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from tidebook.core.errors import TidebookError
from tidebook.outbox.port import OutboxTopicStatus
from tidebook.server.console.page import Page
from tidebook.server.console.queue_numbers import QueueNumbers
from tidebook.server.console.render import link, size, span, span_ms
from tidebook.server.console.routes import OVERVIEW
from tidebook.server.console.survey import PARKED_MAX, RegionSurvey, Survey, summary
from tidebook.server.console.view import View
from tidebook.server.pipeline_jobs import PipelineJob

#: Values above these bounds need attention.
LAG_S_MAX: Final = 60.0
OUTBOX_AGE_S_MAX: Final = 60.0
PINNED_BYTES_MAX: Final = 256_000_000
FINDINGS_MAX: Final = 50

Level = Literal["bad", "warn"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Something that needs attention, and the page where an operator deals with it."""

    level: Level
    what: str
    detail: str
    href: str


class PartHealth(msgspec.Struct, frozen=True, kw_only=True):
    """One server or file that the book uses."""

    part: str
    kind: str
    ok: bool
    detail: str


class OverviewQuery(msgspec.Struct, frozen=True):
    """How many hours the charts show."""

    hours: Annotated[float, Meta(gt=0, le=6)] = 1.0


class OverviewData(msgspec.Struct, frozen=True, kw_only=True):
    """The values that the template of the page shows."""

    findings: list[Finding]
    findings_left_out: int
    numbers: dict[str, Any]
    #: Empty for a token with a prefix: the parts serve the whole book.
    parts: list[PartHealth]
    as_of_ms: int
    hours: float


async def overview(view: View) -> OverviewData:
    """Show the book at a glance."""
    survey = visible(await view.parts.surveyor.read(), view)
    jobs = [] if view.principal.prefix else view.state.jobs.list()  # a job concerns the whole book
    findings = find(survey, [job for job in jobs if job.state == "failed"][:5])
    return OverviewData(
        findings=findings[:FINDINGS_MAX],
        findings_left_out=max(0, len(findings) - FINDINGS_MAX),
        numbers=summary(survey),
        parts=[] if view.principal.prefix else await part_health(view, survey),
        as_of_ms=survey.at_ms,
        hours=view.fields.hours,
    )


def visible(survey: Survey, view: View) -> Survey:
    """Return the part of a survey that the token may see."""
    prefix = view.principal.prefix
    if not prefix:
        return survey
    return msgspec.structs.replace(
        survey,
        topics=[each for each in survey.topics if each.topic.startswith(prefix)],
        topics_left_out=0,
        queues=[each for each in survey.queues if each.queue.startswith(prefix)],
        regions=[each for each in survey.regions if each.namespace.startswith(prefix)],
        parked={topic: count for topic, count in survey.parked.items() if topic.startswith(prefix)},
        outbox=[],
        job=None,
        problems={},
    )


def find(survey: Survey, failed_jobs: list[PipelineJob]) -> list[Finding]:
    """Return the findings that need attention, the worst first."""
    found = [
        *(_bad(f"{part} cannot be read", reason, "/doctor") for part, reason in survey.problems.items()),
        *_pipeline_findings(survey),
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
        noun = "message is parked" if topic.parked == 1 else "messages are parked"
        yield _bad(what, f"{topic.parked:,} {noun}", link("/outbox", topic=topic.topic))
    if topic.error:
        yield _bad(what, topic.reason or "it fails", "/outbox")
    if topic.oldest_age_ms is not None and topic.oldest_age_ms > OUTBOX_AGE_S_MAX * 1000:
        yield _warn(what, f"the oldest message waits for {span_ms(topic.oldest_age_ms)}", "/outbox")
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


async def part_health(view: View, survey: Survey) -> list[PartHealth]:
    """Return the parts of the book: what each is, and whether it answers."""
    settings = view.book.settings
    parts = []
    for name, section, failed in (
        ("Log", "log", "log and store"),
        ("Store", "store", "log and store"),
        ("Queues", "sql", "queues"),
        ("Outbox", "sql", "outbox"),
    ):
        url = settings.section(section).url
        kind = "SQLite" if url is None else url.partition(":")[0].partition("+")[0]
        problem = survey.problems.get(failed)
        detail = "answers" if problem is None else problem
        parts.append(PartHealth(part=name, kind=kind, ok=problem is None, detail=detail))
    parts.append(await _replication(view, survey))
    try:
        health = await view.book.health()
        for run in health.running:
            parts.append(
                PartHealth(part=run.name, kind="in this process", ok=run.healthy, detail=run.problem or run.state)
            )
    except TidebookError:
        pass  # the log and the store are reported above
    return parts


async def _replication(view: View, survey: Survey) -> PartHealth:
    here, job = view.book.replication, survey.job
    if here is not None:
        status = here.status()
        ok = not status.stopped and status.last_error is None
        detail = "replicates in this process" if ok else status.last_error or "a partition is stopped"
        return PartHealth(part="Replication", kind="inline", ok=ok, detail=detail)
    if job is None:
        return PartHealth(part="Replication", kind="none", ok=True, detail="no process has reported")
    age_s = max(0, view.now_ms - job.at_ms) / 1000
    detail = f"last reported {span(age_s)} ago by {job.process or 'an unnamed process'}"
    return PartHealth(part="Replication", kind=job.engine, ok=not job.stopped, detail=detail)


PAGES = (Page(name="overview", path="/", route=OVERVIEW, read=overview, template="overview.html", query=OverviewQuery),)
