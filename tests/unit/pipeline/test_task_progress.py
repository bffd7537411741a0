"""The tasks of a Spark job are counted while it runs, and stay counted when Spark has forgotten their stage."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from tidebook.pipeline.task_progress import TaskCounter, TaskProgress, report_tasks


class Stages:
    """A tracker of Spark: the stages with their tasks, and how many of these are done."""

    def __init__(self) -> None:
        self.active: list[int] = []
        self.stages: dict[int, tuple[int, int]] = {}

    def getActiveStageIds(self) -> list[int]:
        return self.active

    def getStageInfo(self, stageId: int) -> Any:
        found = self.stages.get(stageId)
        return found and SimpleNamespace(numTasks=found[0], numCompletedTasks=found[1])


def test_stages_that_spark_has_forgotten_stay_counted() -> None:
    spark = Stages()
    counter = TaskCounter(spark)  # type: ignore[arg-type]
    assert counter.count() == TaskProgress(0, 0)
    spark.active, spark.stages = [0, 1], {0: (4, 4), 1: (8, 3)}
    assert counter.count() == TaskProgress(12, 7)
    spark.active, spark.stages = [2], {1: (8, 8), 2: (1, 0)}  # stage 1 has ended since
    assert counter.count() == TaskProgress(13, 12)
    spark.active, spark.stages = [3], {}  # Spark does not know a stage that has just begun
    assert counter.count() == TaskProgress(13, 12)


def test_progress_is_reported_when_it_changes_until_the_block_ends() -> None:
    tracker, found, changed = Stages(), list[TaskProgress](), threading.Event()
    tracker.active, tracker.stages = [0], {0: (2, 1)}
    spark: Any = SimpleNamespace(sparkContext=SimpleNamespace(statusTracker=lambda: tracker))

    def report(progress: TaskProgress) -> None:
        found.append(progress)
        changed.set()

    with report_tasks(spark, report, every_s=0.001):
        assert changed.wait(30)
        changed.clear()
        tracker.stages = {0: (2, 2)}
        assert changed.wait(30)
    tracker.stages = {0: (2, 0)}
    assert found == [TaskProgress(2, 1), TaskProgress(2, 2)]


def test_a_spark_that_stops_ends_the_reports() -> None:
    asked = threading.Event()

    class Stopped(Stages):
        def getActiveStageIds(self) -> list[int]:
            asked.set()
            raise ConnectionRefusedError

    spark: Any = SimpleNamespace(sparkContext=SimpleNamespace(statusTracker=Stopped))
    with report_tasks(spark, lambda progress: None, every_s=0.001):
        assert asked.wait(30)
