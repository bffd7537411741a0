"""A backend of `django.tasks` (Django 6) on the queues of a book: durable, with priorities, dates and retries.

    TASKS = {"default": {"BACKEND": "examples.django_tasks.backend.TidebookTasks", "OPTIONS": {"BOOK": "./data"}}}

`run_workers()`, in a management command, runs the tasks until SIGTERM; any number of processes may do so.
"""

from __future__ import annotations

import threading
from typing import Any

from django.tasks import task_backends
from django.tasks.backends.base import BaseTaskBackend
from django.tasks.base import Task, TaskContext, TaskResult, TaskResultStatus
from django.tasks.signals import task_enqueued
from django.utils import timezone
from django.utils.crypto import get_random_string
from django.utils.module_loading import import_string

import tidebook
from tidebook import SyncBook
from tidebook.queue import Job
from tidebook.queue.priority import DEFAULT


class TidebookTasks(BaseTaskBackend):  # type: ignore[misc]  # Django has no types
    """Puts tasks into the queue `django-NAME` of a book."""

    supports_defer = True
    supports_async_task = True
    supports_priority = True

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        self._lock = threading.Lock()
        self._book: SyncBook | None = None

    @property
    def book(self) -> SyncBook:
        """Return the book of this process, opened at its first use; a forked worker opens a separate one."""
        with self._lock:
            if self._book is None or self._book.forked:
                self._book = tidebook.open_sync(self.options["BOOK"])
                self._book.__enter__()
            return self._book

    def enqueue(self, task: Task, args: list[Any], kwargs: dict[str, Any]) -> TaskResult:
        """Put a task into its queue; return once it is durable."""
        self.validate_task(task)
        result = self._result(task, get_random_string(32), args, kwargs, TaskResultStatus.READY, attempts=0)
        data = {"id": result.id, "task": task.module_path, "args": result.args, "kwargs": result.kwargs}
        # Django's priorities are -100 to 100, the greatest first; a queue's are 0 to 255, the smallest first.
        self.book.queue(f"django-{task.queue_name}").put(
            data, priority=DEFAULT - task.priority, process_at=task.run_after
        )
        task_enqueued.send(type(self), task_result=result)
        return result

    def run(self, job: Job[dict[str, Any]]) -> None:
        """Run the task of a job; an error returns the job to the queue, and finally makes it a dead letter."""
        task, args, kwargs = import_string(job.data["task"]), job.data["args"], job.data["kwargs"]
        if task.takes_context:
            attempts = job.timeouts + 1
            running = self._result(task, job.data["id"], args, kwargs, TaskResultStatus.RUNNING, attempts=attempts)
            args = [TaskContext(task_result=running), *args]
        task.call(*args, **kwargs)

    def _result(
        self, task: Task, id: str, args: list[Any], kwargs: dict[str, Any], status: TaskResultStatus, *, attempts: int
    ) -> TaskResult:
        now = timezone.now() if attempts else None
        return TaskResult(
            task=task, id=id, status=status, enqueued_at=timezone.now(), started_at=now, last_attempted_at=now,
            finished_at=None, args=args, kwargs=kwargs, backend=self.alias, errors=[],
            worker_ids=["tidebook"] * attempts,
        )  # fmt: skip


def run_workers(alias: str = "default") -> None:
    """Run the tasks of all queues of a backend until SIGTERM or Ctrl-C, then finish the started ones."""
    backend: TidebookTasks = task_backends[alias]
    book = backend.book
    with book.running(*(book.worker(f"django-{name}", backend.run) for name in backend.queues)) as running:
        running.until_stopped()
