"""Handlers of the pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import assert_never

import msgspec

from tidebook.api.pipeline import (
    JobBody,
    ParkedRecordResponse,
    ParkedRecordsResponse,
    PartitionResponse,
    PipelineJobResponse,
    PipelineJobsResponse,
    PipelineResponse,
)
from tidebook.core.errors import InvalidInput, NotFound
from tidebook.core.key import topic_name
from tidebook.replication.status import partition_statuses, read_job_status, topic_configs
from tidebook.server.call import Call, Handler, topics_of


async def status(call: Call) -> PipelineResponse:
    """Return how far each partition is replicated."""
    book, topics = call.book, [topic_name(each) for each in topics_of(call.query.topics) or ()]
    configs = await topic_configs(book.store, topics)
    for name in topics:
        if name not in configs:
            raise NotFound(f"topic {name}: there is no such topic in the store")
    job = await read_job_status(book.store)
    found = await partition_statuses(book.log, book.store, configs, now_ms=book.clock.now_ms())
    stopped = {} if job is None else job.stopped
    partitions = [
        PartitionResponse(
            **msgspec.structs.asdict(each), stopped=stopped.get(f"{each.topic}/{each.partition}") if each.lag else None
        )
        for each in found
    ]
    return PipelineResponse(partitions=partitions, job=None if job is None else msgspec.to_builtins(job))


async def parked(call: Call) -> ParkedRecordsResponse:
    """List records that cannot be read."""
    topic = None if call.query.topic is None else topic_name(call.query.topic)
    records: list[ParkedRecordResponse] = []
    async for each in call.book.store.parked(topic):
        if len(records) == call.query.limit:
            break
        records.append(
            ParkedRecordResponse(
                topic=each.topic,
                partition=each.partition,
                epoch=each.position.epoch,
                offset=each.position.offset,
                reason=each.reason,
                size_bytes=len(each.value) if each.whole_bytes is None else each.whole_bytes,
            )
        )
    return ParkedRecordsResponse(records)


async def start(call: Call) -> PipelineJobResponse:
    """Start a job."""
    arguments = job_arguments(call.body, call.state.settings.export_folder)
    return call.state.jobs.start(call.body.kind, arguments).response()


def job_arguments(body: JobBody, export_folder: str | None) -> list[str]:
    """Return the arguments of the command that runs a job; raise `InvalidInput` if they do not fit together."""
    topics = [topic_name(each) for each in body.topics]
    chosen = [argument for each in topics for argument in ("--topic", each)]
    if body.kind != "export" and (body.to is not None or body.delta):
        raise InvalidInput("to and delta are for an export")
    if body.kind != "verify" and body.repair:
        raise InvalidInput("repair is for verify")
    match body.kind:
        case "verify":
            return [*chosen, *(["--repair"] if body.repair else [])]
        case "rebuild":
            if len(topics) != 1:
                raise InvalidInput("rebuild takes one topic: give topics with one name")
            return ["--", *topics] if topics[0].startswith("-") else topics
        case "export":
            return [*chosen, "--to", _export_target(body.to, export_folder), *(["--delta"] if body.delta else [])]
        case _:
            assert_never(body.kind)


def _export_target(to: str | None, export_folder: str | None) -> str:
    """Return the folder of an export, which must be below the configured one: a client may not choose any path."""
    if export_folder is None:
        raise InvalidInput("exports over HTTP are off: set [server] export_folder to the folder for them")
    if not to or "\0" in to:
        raise InvalidInput("an export needs to: the name of a folder below [server] export_folder")
    root = Path(export_folder).expanduser().resolve()
    target = (root / to).resolve()
    if root != target and root not in target.parents:
        raise InvalidInput(f"{to[:100]!r} is outside [server] export_folder")
    return str(target)


async def jobs(call: Call) -> PipelineJobsResponse:
    """List the jobs."""
    return PipelineJobsResponse([each.response() for each in call.state.jobs.list()])


async def job(call: Call) -> PipelineJobResponse:
    """Return a job's progress and result."""
    return call.state.jobs.find(call.parameters[0]).response(after_line=call.query.after_line)


async def cancel(call: Call) -> None:
    """Cancel a job."""
    await call.state.jobs.find(call.parameters[0]).cancel()


HANDLERS: dict[str, Handler] = {
    "pipeline.status": status,
    "pipeline.parked": parked,
    "pipeline.start": start,
    "pipeline.jobs": jobs,
    "pipeline.job": job,
    "pipeline.cancel": cancel,
}
