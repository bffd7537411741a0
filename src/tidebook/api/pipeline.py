"""Requests and responses of the pipeline."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

JobKind = Literal["verify", "rebuild", "export"]
JobState = Literal["running", "done", "differences", "failed", "cancelled"]
#: How many lines of a job's output are kept; later ones replace the oldest.
JOB_LINES_MAX = 1_000


class PartitionResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The replication progress of one partition."""

    topic: str
    partition: int
    epoch: int
    start: int
    end: int
    replicated: int
    lag: int
    lag_s: float
    stopped: str | None


class PipelineResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The replication progress of all partitions, and the last report of the replication job."""

    partitions: list[PartitionResponse]
    job: dict[str, Any] | None


class PipelineQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Topics, separated by commas; by default all."""

    topics: str | None = None


class ParkedRecordsQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The topic of the parked records (all topics by default), and the maximum number to list."""

    topic: str | None = None
    limit: Annotated[int, Meta(ge=1, le=1_000)] = 100


class ParkedRecordResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A record of the log that cannot be read."""

    topic: str
    partition: int
    epoch: int
    offset: int
    reason: str
    size_bytes: int


class ParkedRecordsResponse(msgspec.Struct, frozen=True):
    """Records that cannot be read."""

    records: list[ParkedRecordResponse]


class JobBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A job to start: `verify` topics (and repair the store), `rebuild` a topic, or `export` events to a folder."""

    kind: JobKind
    topics: Annotated[tuple[str, ...], Meta(max_length=1_000)] = ()
    repair: bool = False
    #: The folder of an export, as the server sees it; below `[server] export_folder`.
    to: str | None = None
    delta: bool = False


class JobProgress(msgspec.Struct, frozen=True):
    """The number of tasks in the stages that Spark has started so far, and how many of them are done."""

    tasks: int
    done: int


class PipelineJobResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A job: its state, its latest output, and its result, which is the last line of the output."""

    id: str
    kind: JobKind
    state: JobState
    started_at_ms: int
    ended_at_ms: int | None
    exit_code: int | None
    #: None until Spark has started.
    progress: JobProgress | None
    #: The number of lines that it has printed, and the latest ones.
    line_count: int
    lines: list[Any]
    result: Any
    error: str | None


class PipelineJobsResponse(msgspec.Struct, frozen=True):
    """The jobs that this server has started, newest first, without their lines."""

    jobs: list[PipelineJobResponse]


class JobQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The line after which the output is returned."""

    after_line: Annotated[int, Meta(ge=0)] = msgspec.field(default=0)
