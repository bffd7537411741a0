"""Jobs of the pipeline, each in a child process: `tidebook pipeline verify`, `rebuild` or `export`, which prints JSON.

Spark runs in the child, so that neither its memory use nor its failures affect the server.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict, deque
from typing import Any, Final

import msgspec

from tidebook.api.errors import TooManyRequests
from tidebook.api.pipeline import JOB_LINES_MAX, JobKind, JobProgress, JobState, PipelineJobResponse
from tidebook.core.errors import NotFound

#: How many jobs are remembered; a running one is never forgotten.
JOBS_KEPT_MAX: Final = 100
#: How long a job may take to stop before it is killed.
STOP_S: Final = 20.0
LINE_BYTES_MAX: Final = 2**20
ERROR_CHARS_MAX: Final = 1_000


class PipelineJob:
    """One job: its child process and its output."""

    def __init__(self, kind: JobKind) -> None:
        self.id = secrets.token_hex(8)
        self.kind = kind
        self.state: JobState = "running"
        self.started_at_ms = _now_ms()
        self.ended_at_ms: int | None = None
        self.exit_code: int | None = None
        self.progress: JobProgress | None = None
        self.line_count = 0
        self._lines: deque[tuple[int, Any]] = deque(maxlen=JOB_LINES_MAX)
        self._errors = b""
        self._child: Process | None = None
        self._cancelled = False

    async def run(self, command: list[str]) -> None:
        """Run the child process to its end."""
        self._child = child = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True, limit=LINE_BYTES_MAX
        )
        try:
            if self._cancelled:  # cancelled before the process existed
                child.terminate()
            await asyncio.gather(self._read_lines(child), self._read_errors(child))
            await child.wait()
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()
            self.exit_code = child.returncode
            self.ended_at_ms = _now_ms()
            self.state = self._ended_state()

    def _ended_state(self) -> JobState:
        if self._cancelled:
            return "cancelled"
        # A check that found differences exits with code 1; other codes are failures.
        match self.exit_code:
            case 0:
                return "done"
            case 1:
                return "differences"
            case _:
                return "failed"

    async def _read_lines(self, child: Process) -> None:
        assert child.stdout is not None
        while True:
            try:
                line = await child.stdout.readline()
            except ValueError:  # a line over the limit was discarded
                continue
            if not line:
                return
            try:
                value = msgspec.json.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                value = line.decode(errors="replace").rstrip()
            if isinstance(value, dict) and value.keys() == {"progress"}:
                self.progress = msgspec.convert(value["progress"], JobProgress)
                continue
            self.line_count += 1
            self._lines.append((self.line_count, value))

    async def _read_errors(self, child: Process) -> None:
        assert child.stderr is not None
        while part := await child.stderr.read(65_536):
            self._errors = (self._errors + part)[-65_536:]

    async def cancel(self) -> None:
        """Stop the child: terminate it, and kill it if it does not end."""
        child = self._child
        if child is not None and child.returncode is not None:
            return
        self._cancelled = True
        if child is None:
            return
        child.terminate()
        try:
            await asyncio.wait_for(child.wait(), STOP_S)
        except TimeoutError:
            child.kill()
            await child.wait()

    def response(self, *, after_line: int | None = None) -> PipelineJobResponse:
        """Return the state, with the lines after `after_line`; without lines if that is None."""
        lines = [] if after_line is None else [value for number, value in self._lines if number > after_line]
        ended = self.state != "running"
        error = None
        if self.state == "failed":
            last = self._errors.decode(errors="replace").strip().splitlines()
            error = last[-1][:ERROR_CHARS_MAX] if last else f"it ended with code {self.exit_code}"
        return PipelineJobResponse(
            id=self.id,
            kind=self.kind,
            state=self.state,
            started_at_ms=self.started_at_ms,
            ended_at_ms=self.ended_at_ms,
            exit_code=self.exit_code,
            progress=self.progress,
            line_count=self.line_count,
            lines=lines,
            result=self._lines[-1][1] if ended and self._lines else None,
            error=error,
        )


class PipelineJobs:
    """The jobs that this server has started, the latest last."""

    def __init__(self, where: str, *, jobs_max: int) -> None:
        self._where = where
        self._max = jobs_max
        self._jobs: OrderedDict[str, PipelineJob] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, kind: JobKind, arguments: list[str]) -> PipelineJob:
        """Start a job; raise `TooManyRequests` if as many as allowed are running."""
        if len(self._tasks) >= self._max:
            raise TooManyRequests(f"{len(self._tasks)} jobs run already: wait for one to end", retry_after_s=10.0)
        job = PipelineJob(kind)
        self._jobs[job.id] = job
        ended = [id for id, each in self._jobs.items() if each.state != "running"]
        for id in ended[: max(0, len(self._jobs) - JOBS_KEPT_MAX)]:
            del self._jobs[id]
        options = ["--progress", "--json", "--book", self._where]
        command = [sys.executable, "-m", "tidebook.cli", "pipeline", kind, *options, *arguments]
        task = asyncio.create_task(job.run(command))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return job

    def find(self, id: str) -> PipelineJob:
        """Return a job; raise `NotFound` if there is none of this id."""
        found = self._jobs.get(id)
        if found is None:
            raise NotFound(f"there is no job {id[:40]!r}: a server remembers its last {JOBS_KEPT_MAX}")
        return found

    def list(self) -> list[PipelineJob]:
        """Return all jobs, newest first."""
        return [*reversed(self._jobs.values())]

    async def close(self) -> None:
        """Cancel the jobs that run."""
        await asyncio.gather(*(job.cancel() for job in self._jobs.values()))
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
