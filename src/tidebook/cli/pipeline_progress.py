"""Progress of a running replication: a bar on a terminal, one JSON object per line in a pipe."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING

import msgspec
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tidebook.cli import output

if TYPE_CHECKING:
    from tidebook.pipeline.jobs.replicate import Progress as Replicated


class ProgressReporter:
    """Prints the progress of a replication; reports each stopped partition and each wait only once."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._reported: set[str] = set()
        self._last: bytes = b""

    def __enter__(self) -> ProgressReporter:
        if output.human() and sys.stderr.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=output.stderr)
            self._bar.start()
            self._task = self._bar.add_task("replicated")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, progress: Replicated) -> None:
        for at, reason in progress.stopped.items():
            self._warn_once(f"{at} is stopped: {reason}")
        if progress.waiting is not None:
            self._warn_once(f"waiting: {progress.waiting}")
        if self._bar is not None:
            total = sum(each.end - each.start for each in progress.partitions)
            self._bar.update(self._task, total=total, completed=total - progress.lag)
        if not output.human():
            self._emit(progress, done=False)

    def finish(self, progress: Replicated) -> None:
        """Print the final totals."""
        if output.human():
            output.emit({}, f"{progress.records:,} records in {progress.batches:,} batches, {progress.lag:,} remaining")
        else:
            self._last = b""
            self._emit(progress, done=True)

    def _emit(self, progress: Replicated, *, done: bool) -> None:
        row = {
            "batches": progress.batches,
            "records": progress.records,
            "lag": progress.lag,
            "parked": progress.parked,
            "records_per_s": round(progress.records_per_s, 1),
            "batch_s": progress.batch_s,
            "stopped": progress.stopped,
            "waiting": progress.waiting,
            "partitions": [msgspec.to_builtins(each) for each in progress.partitions],
        }
        encoded = msgspec.json.encode(row)
        if encoded != self._last:  # print nothing while the pipeline is idle
            self._last = encoded
            output.emit({"done": done, "seconds": round(progress.seconds, 3), **row})

    def _warn_once(self, text: str) -> None:
        if text not in self._reported:
            self._reported.add(text)
            output.stderr.print(f"tidebook: {text}", markup=False, soft_wrap=True)
