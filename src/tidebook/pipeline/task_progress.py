"""Report, while a job runs, how many of its tasks Spark has completed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from pyspark import StatusTracker
    from pyspark.sql import SparkSession

EVERY_S: Final = 1.0
#: Make Spark update its counts as often: because its UI is off, it would only do so once a minute.
SPARK_SETTINGS: Final = {"spark.ui.liveUpdate.period": "1s"}


class TaskProgress(msgspec.Struct, frozen=True):
    """The number of tasks in all stages that Spark has begun so far, and how many of them are done."""

    tasks: int
    done: int


@contextmanager
def report_tasks(
    spark: SparkSession, report: Callable[[TaskProgress], None], *, every_s: float = EVERY_S
) -> Iterator[None]:
    """Call `report` in a thread whenever the progress has changed, until the block ends."""
    stop, tracker = threading.Event(), spark.sparkContext.statusTracker()
    following = threading.Thread(target=_follow, args=(tracker, report, stop, every_s), daemon=True)
    following.start()
    try:
        yield
    finally:
        stop.set()
        following.join()


def _follow(
    tracker: StatusTracker, report: Callable[[TaskProgress], None], stop: threading.Event, every_s: float
) -> None:
    from py4j.protocol import Py4JError

    counter, last = TaskCounter(tracker), TaskProgress(0, 0)
    while not stop.wait(every_s):
        try:
            found = counter.count()
        except (Py4JError, OSError):  # Spark is stopping, which the job reports
            return
        if found != last:
            report(found)
        last = found


class TaskCounter:
    """Counts the tasks of all stages that have begun; Spark itself forgets old ones."""

    def __init__(self, tracker: StatusTracker) -> None:
        self._tracker = tracker
        self._begun: dict[int, TaskProgress] = {}

    def count(self) -> TaskProgress:
        """Return the progress."""
        open = {id for id, each in self._begun.items() if each.done < each.tasks}
        for id in sorted(open.union(self._tracker.getActiveStageIds())):
            stage = self._tracker.getStageInfo(id)
            if stage is not None:
                self._begun[id] = TaskProgress(stage.numTasks, min(stage.numTasks, stage.numCompletedTasks))
        begun = self._begun.values()
        return TaskProgress(sum(each.tasks for each in begun), sum(each.done for each in begun))
