"""Tasks of a small application: `send.enqueue("ada", subject="hello")`."""

from __future__ import annotations

from django.tasks import TaskContext, task

#: What was sent, and the attempts of `send_at_the_third_attempt`.
SENT: list[tuple[str, str]] = []
ATTEMPTS: list[int] = []


@task  # type: ignore[untyped-decorator]
def send(to: str, *, subject: str = "") -> None:
    SENT.append((to, subject))


@task(takes_context=True)  # type: ignore[untyped-decorator]
def send_at_the_third_attempt(context: TaskContext, to: str) -> None:
    ATTEMPTS.append(context.attempt)
    if context.attempt < 3:
        raise ConnectionError("the mail server is down")
