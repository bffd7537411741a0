"""Tasks of Django 6 on the queues of a book."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("django.tasks", reason="django.tasks is in Django 6, which needs Python 3.12")

from django.conf import settings
from django.utils import timezone

from tidebook.queue.retry import Retry

if TYPE_CHECKING:
    from examples.django_tasks.backend import TidebookTasks


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[TidebookTasks]:
    if not settings.configured:
        name = "examples.django_tasks.backend.TidebookTasks"
        settings.configure(USE_TZ=True, TASKS={"default": {"BACKEND": name, "OPTIONS": {}}})
    from django.tasks import task_backends

    made: TidebookTasks = task_backends["default"]
    made.options["BOOK"] = tmp_path / "book"
    yield made
    made.book.__exit__(None, None, None)
    made._book = None


@pytest.fixture
def mail(backend: TidebookTasks) -> Any:
    from examples.django_tasks import mail

    mail.SENT.clear()
    mail.ATTEMPTS.clear()
    return mail


def run_due(backend: TidebookTasks) -> None:
    """Run the tasks that are due now, as a worker would."""
    worker = backend.book.worker("django-default", backend.run, retry=Retry(first_s=0.0))
    with backend.book.running(worker):
        backend.book.settle()


def test_a_task_is_durable_and_run_once(backend: TidebookTasks, mail: Any) -> None:
    assert mail.send.enqueue("ada", subject="hello").status == "READY"
    assert mail.SENT == []
    run_due(backend)
    run_due(backend)
    assert mail.SENT == [("ada", "hello")]


def test_priorities_and_dates_are_those_of_the_queue(backend: TidebookTasks, mail: Any) -> None:
    mail.send.using(priority=-5).enqueue("later")
    mail.send.using(priority=50).enqueue("first")
    mail.send.using(run_after=timezone.now() + timedelta(days=1)).enqueue("tomorrow")
    jobs = backend.book.queue("django-default").claim(10)
    assert [job.data["args"] for job in jobs] == [["first"], ["later"]]


def test_a_task_that_fails_is_retried_and_knows_its_attempt(backend: TidebookTasks, mail: Any) -> None:
    mail.send_at_the_third_attempt.enqueue("ada")
    run_due(backend)
    assert mail.ATTEMPTS == [1, 2, 3]
