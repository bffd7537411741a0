"""The health of a book's parts: whether each server or file answers, and whether the records are replicated."""

from __future__ import annotations

from typing import Final

import msgspec

from tidebook.core.errors import TidebookError
from tidebook.replication.inline import InlineStatus
from tidebook.replication.status import JobStatus
from tidebook.server.console.formatting import span
from tidebook.server.console.survey import Survey
from tidebook.server.console.view import View

#: A larger lag of replication needs attention.
LAG_S_MAX: Final = 60.0
#: A replication that has reported within this time is running: it reports every few seconds.
REPORT_S_MAX: Final = 60.0


class PartHealth(msgspec.Struct, frozen=True, kw_only=True):
    """One server or file that the book uses."""

    part: str
    kind: str
    ok: bool
    detail: str
    #: The page of a finding about this part if it fails; None if the survey reports the failure already.
    href: str | None = None


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
    here = view.book.replication
    parts.append(replication_health(None if here is None else here.status(), survey, now_ms=view.now_ms))
    try:
        health = await view.book.health()
        for run in health.running:
            detail = run.problem or run.state
            parts.append(
                PartHealth(part=run.name, kind="in this process", ok=run.healthy, detail=detail, href="/doctor")
            )
    except TidebookError:
        pass  # the log and the store are reported above
    return parts


def replication_health(here: InlineStatus | None, survey: Survey, *, now_ms: int) -> PartHealth:
    """Return whether records are replicated: by this process, or by the one that has reported last."""
    job = survey.job
    href: str | None = "/pipeline"
    if here is not None:
        failure = here.last_error if here.state == "waiting" else here.silent_holder
        if failure is None and here.stopped:
            failure, href = "a partition is stopped", None  # each stopped partition is a finding of its own
        runs = "replicates in this process" if here.state == "active" else here.describe()
        return PartHealth(part="Replication", kind="inline", ok=failure is None, detail=failure or runs, href=href)
    waits = any(each.lag_s is not None and each.lag_s > LAG_S_MAX for each in survey.topics)
    if job is None:
        detail = f"no process has reported{', and records wait' if waits else ''}"
        return PartHealth(part="Replication", kind="none", ok=not waits, detail=detail, href=href)
    silent = waits and not reports(job, now_ms=now_ms)
    detail = f"last reported {span(max(0, now_ms - job.at_ms) / 1000)} ago by {job.process or 'an unnamed process'}"
    if silent:
        detail += ", and records wait"
    elif job.stopped:
        detail, href = f"a partition is stopped; {detail}", None
    ok = not silent and not job.stopped
    return PartHealth(part="Replication", kind=job.engine, ok=ok, detail=detail, href=href)


def reports(job: JobStatus, *, now_ms: int) -> bool:
    """Return whether the replication that wrote a status is running, as far as its reports show."""
    return now_ms - job.at_ms <= max(REPORT_S_MAX, 3 * job.batch_s) * 1000
