"""A relay that kills itself (-9) at a named point: `python -m tests.integration.outbox.dying BOOK POINT`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import tidebook
from tidebook.outbox.topic_relay import TopicRelay
from tidebook.wiring.outbox import BookJournals

#: When, during one batch.
POINTS = (
    "after the lock",
    "after the session was opened",
    "before the first append",
    "after the first append",
    "between appends",
    "after the batch was sent",
    "before the session is closed",
    "after the session was closed",
)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def after(inner: Callable[..., Any], count: int = 1) -> Callable[..., Any]:
    """Kill the process after the function has returned `count` times."""
    left = [count]

    def call(*args: Any, **options: Any) -> Any:
        result = inner(*args, **options)
        left[0] -= 1
        if not left[0]:
            die()
        return result

    return call


def after_await(inner: Callable[..., Any], count: int) -> Callable[..., Any]:
    left = [count]

    async def call(*args: Any, **options: Any) -> Any:
        result = await inner(*args, **options)
        left[0] -= 1
        if not left[0]:
            die()
        return result

    return call


def before(*_: Any, **__: Any) -> None:
    die()


def main(path: str, point: str) -> None:
    with tidebook.open_sync(path) as book:
        box: Any = book.outbox
        store: Any = type(box._parts.database.connect())
        match point:
            case "after the lock":
                store.try_lock = after(store.try_lock)
            case "after the session was opened":
                store.begin = after(store.begin)
            case "before the first append":
                BookJournals.append = before  # type: ignore[assignment, method-assign]
            case "after the first append":
                BookJournals.append = after_await(BookJournals.append, 1)  # type: ignore[method-assign]
            case "between appends":
                BookJournals.append = after_await(BookJournals.append, 4)  # type: ignore[method-assign]
            case "after the batch was sent":
                TopicRelay._send = after(TopicRelay._send)  # type: ignore[method-assign]
            case "before the session is closed":
                store.finish = before
            case "after the session was closed":
                store.finish = after(store.finish)
        box.relay()


if __name__ == "__main__":
    main(*sys.argv[1:])
