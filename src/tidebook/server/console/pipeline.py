"""The pipeline: the progress of each partition and its estimated end, parked records, and jobs with their findings."""

from __future__ import annotations

from contextlib import aclosing, suppress
from typing import Annotated, Any, Final, assert_never

import msgspec
from msgspec import Meta

from tidebook.api.pipeline import JobBody, JobKind, PipelineJobResponse
from tidebook.api.routes import BY_NAME
from tidebook.core.errors import InvalidInput, NotFound
from tidebook.core.replication_plan import Parked
from tidebook.pipeline.parked import replay_parked
from tidebook.replication.inline import InlineStatus
from tidebook.replication.status import JobStatus, PartitionStatus, partition_statuses, topic_configs
from tidebook.server.console.act import Act, ActResult, Preview, api_act
from tidebook.server.console.formatting import counted, size
from tidebook.server.console.health import PartHealth, replication_health, reports
from tidebook.server.console.page import Page
from tidebook.server.console.pagination import PageNumber, paginate
from tidebook.server.console.render import link
from tidebook.server.console.routes import PARKED_REPLAY
from tidebook.server.console.view import View
from tidebook.server.pipeline import job_arguments

#: For how many topics of a page the partitions are read; those that lag most come first.
TOPICS_MAX: Final = 20
PARKED_MAX: Final = 50
LINES_SHOWN_MAX: Final = 500
#: How many of the other lines of output are shown, and how much of each.
PROGRESS_LINES_MAX: Final = 20
PROGRESS_CHARS_MAX: Final = 400
#: The dry run of a job that changes the store ends with this.
STOP_REPLICATION: Final = (
    "Stop replication first, and start it again when the job has ended: "
    "a journal that changes meanwhile may not be repaired."
)


class PipelinePageQuery(msgspec.Struct, frozen=True):
    """Topics with this text in their name."""

    prefix: str = ""
    page: PageNumber = 1


class PartitionRow(msgspec.Struct, frozen=True, kw_only=True):
    """One partition."""

    topic: str
    partition: int
    end: int
    replicated: int
    lag: int
    lag_s: float
    #: The estimated time until it has caught up, if all lagging partitions share the rate of the last batch; None if no
    #: process reports.
    caught_up_s: float | None
    stopped: str | None
    lost: int


class ParkedRecordRow(msgspec.Struct, frozen=True, kw_only=True):
    """A record of the log that cannot be read."""

    topic: str
    partition: int
    offset: int
    id: str | None
    reason: str
    size_bytes: int


class PipelineData(msgspec.Struct, frozen=True, kw_only=True):
    partitions: list[PartitionRow]
    total_topics: int
    page: int
    pages: int
    job: JobStatus | None
    here: InlineStatus | None
    #: Whether replication works, as on the overview.
    health: PartHealth
    parked: list[ParkedRecordRow]
    parked_more: bool
    jobs: list[PipelineJobResponse]
    exports: bool
    now_ms: int


async def pipeline(view: View) -> PipelineData:
    """Show the progress of replication."""
    book, survey = view.book, await view.context.surveyor.read()
    lags = {each.topic: each.lag for each in survey.topics}
    names = [name for name in await book.topics() if view.fields.prefix.casefold() in name.casefold()]
    names.sort(key=lambda name: -lags.get(name, 0))
    shown, page, pages = paginate(names, view.fields.page, rows_max=TOPICS_MAX)
    configs = await topic_configs(book.store, shown) if shown else {}
    statuses = await partition_statuses(book.log, book.store, configs, now_ms=view.now_ms)
    lagging = sum(each.lag > 0 for each in statuses) + sum(lags[name] > 0 for name in lags.keys() - set(shown))
    parked, more = await _parked(view)
    here = None if book.replication is None else book.replication.status()
    return PipelineData(
        partitions=[partition_row(each, survey.job, lagging, now_ms=view.now_ms) for each in statuses],
        total_topics=len(names),
        page=page,
        pages=pages,
        job=survey.job,
        here=here,
        health=replication_health(here, survey, now_ms=view.now_ms),
        parked=parked,
        parked_more=more,
        jobs=[each.response() for each in view.state.jobs.list()],
        exports=view.state.settings.export_folder is not None,
        now_ms=view.now_ms,
    )


def partition_row(status: PartitionStatus, job: JobStatus | None, lagging: int, *, now_ms: int) -> PartitionRow:
    """Return a partition as the page shows it; `lagging` partitions share the rate of the job."""
    rate = 0.0 if job is None or not reports(job, now_ms=now_ms) else job.records_per_s / max(1, lagging)
    stopped = None if job is None or not status.lag else job.stopped.get(f"{status.topic}/{status.partition}")
    lost = status.lost
    return PartitionRow(
        topic=status.topic,
        partition=status.partition,
        end=status.end,
        replicated=status.replicated,
        lag=status.lag,
        lag_s=status.lag_s,
        caught_up_s=status.lag / rate if status.lag and rate > 0 and stopped is None else None,
        stopped=stopped,
        lost=0 if lost is None else lost.last - lost.first + 1,
    )


async def _parked(view: View) -> tuple[list[ParkedRecordRow], bool]:
    rows: list[ParkedRecordRow] = []
    async with aclosing(view.book.store.parked()) as records:  # type: ignore[type-var]
        async for each in records:
            if len(rows) == PARKED_MAX:
                return rows, True
            rows.append(
                ParkedRecordRow(
                    topic=each.topic,
                    partition=each.partition,
                    offset=each.position.offset,
                    id=each.id,
                    reason=each.reason,
                    size_bytes=_size_bytes(each),
                )
            )
    return rows, False


def _size_bytes(parked: Parked) -> int:
    """Return the size of a record, of which only the beginning may be stored."""
    return len(parked.value) if parked.whole_bytes is None else parked.whole_bytes


class ReplayForm(msgspec.Struct, frozen=True):
    """A parked record, and the journal to append it to if it names none."""

    topic: str
    partition: Annotated[int, Meta(ge=0)]
    offset: Annotated[int, Meta(ge=0)]
    id: str | None = None
    #: Append the bytes as the payload of one event.
    raw: bool = False


async def _find_parked(view: View) -> Parked:
    form = view.fields
    async with aclosing(view.book.store.parked(form.topic)) as records:  # type: ignore[type-var]
        async for each in records:
            if (each.partition, each.position.offset) == (form.partition, form.offset):
                return each
    raise NotFound(f"no record is parked at {form.topic[:100]}/{form.partition} {form.offset:,}: it was replayed")


async def preview_replay(view: View) -> Preview:
    """Describe what a replay would append."""
    form, parked = view.fields, await _find_parked(view)
    id = form.id or parked.id
    if id is None:
        raise InvalidInput("the record names no journal: give the id of one")
    what = "as the payload of one event" if form.raw else "as the action that its writer meant"
    held = size(_size_bytes(parked))
    text = (
        f"This appends the record at {form.topic}/{form.partition} {form.offset:,} ({held}) to the end of journal "
        f"{id}, {what}, and removes it from the parked ones. The record at this offset remains without effect."
    )
    members = [parked.position.epoch, parked.position.offset]
    return Preview(text=text, count=1, word=form.topic, sample=[parked.reason], members=members)


async def replay(view: View) -> ActResult:
    """Append a parked record to its journal again."""
    form, parked = view.fields, await _find_parked(view)
    done = await replay_parked(view.book, parked, raw=form.raw, id=form.id)
    if done.error is not None:
        raise InvalidInput(f"the record stays parked: {done.error}")
    numbers = "" if done.first is None else f" as events {done.first:,} to {done.last:,}"
    to = link("/journal", topic=form.topic, id=done.id, at=done.first)
    return ActResult(message=f"The record is replayed{numbers}.", to=to)


# ---- one job


class JobPageQuery(msgspec.Struct, frozen=True):
    job: str


class JobData(msgspec.Struct, frozen=True, kw_only=True):
    """A job, its progress, and the differences that it found, row by row."""

    job: PipelineJobResponse
    #: What a job that has ended has done; None if that is not known.
    outcome: str | None
    differences: list[dict[str, Any]]
    progress: list[str]
    left_out: int
    #: How many of the first lines of output are no longer kept.
    forgotten: int
    topics: list[str]
    now_ms: int


async def job(view: View) -> JobData:
    return job_data(view.state.jobs.find(view.fields.job).response(after_line=0), now_ms=view.now_ms)


def job_data(response: PipelineJobResponse, *, now_ms: int) -> JobData:
    """Return what the page shows of a job: the differences among its lines of output, and the last of the others."""
    differences, others = list[dict[str, Any]](), list[Any]()
    for line in response.lines:
        is_difference = isinstance(line, dict) and {"what", "topic"} <= line.keys()
        (differences if is_difference else others).append(line)
    return JobData(
        job=msgspec.structs.replace(response, lines=[]),
        outcome=describe_outcome(response),
        differences=differences[:LINES_SHOWN_MAX],
        progress=[msgspec.json.encode(each).decode()[:PROGRESS_CHARS_MAX] for each in others[-PROGRESS_LINES_MAX:]],
        left_out=max(0, len(differences) - LINES_SHOWN_MAX),
        forgotten=response.line_count - len(response.lines),
        topics=sorted({str(each["topic"]) for each in differences}),
        now_ms=now_ms,
    )


class _Compared(msgspec.Struct):
    """The last line of output of verify and rebuild."""

    journals: int
    events: int
    differences: dict[str, int]
    repaired: int
    left: int
    partial: list[str]


class _Exported(msgspec.Struct):
    """The last line of output of an export."""

    events: int


def describe_outcome(response: PipelineJobResponse) -> str | None:
    """Return what a completed job has done, as a sentence; None if its output does not contain the result."""
    if response.state not in ("done", "differences"):
        return None
    try:
        if response.kind == "export":
            return f"{counted(msgspec.convert(response.result, _Exported).events, 'event')} exported."
        done = msgspec.convert(response.result, _Compared)
    except msgspec.ValidationError:
        return None
    text = f"{counted(done.journals, 'journal')} with {counted(done.events, 'event')} compared: "
    if found := sum(done.differences.values()):
        text += f"{counted(found, 'difference')}, {done.repaired:,} repaired, {done.left:,} left."
    else:
        text += "no difference, the store has what the log has."
    if done.partial:
        text += (
            f" The log of {', '.join(done.partial)} no longer has its first records: earlier events were not compared."
        )
    return text


class JobForm(msgspec.Struct, frozen=True):
    """A job to start; topics are separated by commas. `found_by` is the verify job whose differences are repaired."""

    kind: JobKind
    topics: str = ""
    repair: bool = False
    found_by: str = ""
    to: str | None = None
    delta: bool = False

    def body(self) -> JobBody:
        """Return the request of the API."""
        topics = tuple(each.strip() for each in self.topics.split(",") if each.strip())
        return JobBody(self.kind, topics, self.repair, self.to, self.delta)


async def preview_start(view: View) -> Preview:
    """Describe what a job would do."""
    form: JobForm = view.fields
    body = form.body()
    job_arguments(body, view.state.settings.export_folder)  # raises if they do not fit together
    which = counted(len(body.topics), "topic") if body.topics else "all topics"
    match form.kind:
        case "verify":
            does = "compares store and log"
            if body.repair:
                known = _difference_count(view, form.found_by)
                does += ", and repairs what differs"
                does += f" ({known} when it was last compared)" if known else ""
        case "rebuild":
            does = "writes the store again from the log"
        case "export":
            does = f"exports events to {body.to}"
        case _:
            assert_never(form.kind)
    changes = body.repair or form.kind == "rebuild"
    text = f"This {does}: {which}. It runs in a separate process and may take a while."
    if changes:
        text += f" {STOP_REPLICATION}"
    return Preview(
        text=text,
        count=len(body.topics),
        word=form.kind if changes else None,
        sample=list(body.topics)[:5],
        members=body.topics,
    )


def _difference_count(view: View, job: str) -> str | None:
    """Return how many differences a verify job found, as text; None if no such job is known or it has no result."""
    with suppress(NotFound, msgspec.ValidationError):
        result = msgspec.convert(view.state.jobs.find(job).response().result, _Compared)
        return counted(sum(result.differences.values()), "difference")
    return None


async def start(view: View) -> ActResult:
    form = view.fields
    arguments = job_arguments(form.body(), view.state.settings.export_folder)
    started = view.state.jobs.start(form.kind, arguments)
    return ActResult(message=f"Job {form.kind} is started.", to=link("/job", job=started.id))


async def cancel(view: View) -> ActResult:
    found = view.state.jobs.find(view.fields.job)
    if found.state != "running":
        return ActResult(message="The job had ended already.", changed=False)
    await found.cancel()
    return ActResult(message="The job is cancelled.")


PAGES = (
    Page("pipeline", BY_NAME["pipeline.status"], pipeline, PipelinePageQuery),
    Page("job", BY_NAME["pipeline.job"], job, JobPageQuery),
)
ACTS = (
    api_act("pipeline.start", "Start job", start, JobForm, preview_start),
    Act("pipeline.replay", "Replay", PARKED_REPLAY, replay, ReplayForm, preview_replay),
    api_act("pipeline.cancel", "Cancel job", cancel, JobPageQuery),
)
