"""The overview: first the findings that need attention, then the numbers of the book and the health of its parts."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from tidebook.server.console.findings import Finding, findings_of
from tidebook.server.console.health import PartHealth, part_health
from tidebook.server.console.page import Page
from tidebook.server.console.routes import OVERVIEW
from tidebook.server.console.survey import Survey, summary
from tidebook.server.console.view import View

FINDINGS_MAX: Final = 50


class OverviewQuery(msgspec.Struct, frozen=True):
    """How many hours the charts show."""

    hours: Annotated[float, Meta(gt=0, le=6)] = 1.0


class OverviewData(msgspec.Struct, frozen=True, kw_only=True):
    findings: list[Finding]
    findings_left_out: int
    numbers: dict[str, Any]
    #: Empty for a token with a prefix: the parts serve the whole book.
    parts: list[PartHealth]
    as_of_ms: int
    hours: float


async def overview(view: View) -> OverviewData:
    survey = visible(await view.context.surveyor.read(), view)
    jobs = [] if view.principal.prefix else view.state.jobs.list()  # a job concerns the whole book
    parts = [] if view.principal.prefix else await part_health(view, survey)
    findings = findings_of(survey, [job for job in jobs if job.state == "failed"][:5], parts)
    return OverviewData(
        findings=findings[:FINDINGS_MAX],
        findings_left_out=max(0, len(findings) - FINDINGS_MAX),
        numbers=summary(survey),
        parts=parts,
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


PAGES = (Page("overview", OVERVIEW, overview, OverviewQuery),)
