"""The arguments of a worker and its book are checked before anything is claimed."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

import tidebook
from tidebook.core.errors import InvalidInput
from tidebook.queue import Retry, Worker
from tidebook.queue.sqlite.store import SqliteQueues

NAN, ENDLESS = float("nan"), float("inf")


@pytest.mark.parametrize(
    "wrong",
    [
        {"first_s": NAN},
        {"factor": NAN},
        {"longest_s": ENDLESS},
        {"spread": 2},
        {"first_s": "1"},
        {"first_s": -1},
        {"factor": 0.5},
        {"longest_s": 0.1},
    ],
)
def test_a_retry_policy_without_growing_delays_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="is not a retry policy"):
        Retry(**wrong)


@pytest.mark.parametrize(
    ("handler", "options", "reported"),
    [
        (3, {}, "cannot be called"),
        (print, {"grace_s": NAN}, "grace"),
        (print, {"grace_s": -1}, "grace"),
        (print, {"lease_s": 0}, "lease"),
        (print, {"concurrency": 0}, "concurrency"),
    ],
)
async def test_a_worker_without_a_valid_handler_and_times_is_refused(
    tmp_path: Path, handler: Any, options: dict[str, Any], reported: str
) -> None:
    async with tidebook.open(tmp_path) as book:
        with pytest.raises(InvalidInput, match=reported):
            Worker(book.queue("mail"), handler, **options)


def test_a_worker_refuses_a_queue_of_a_blocking_book(tmp_path: Path) -> None:
    with (
        tidebook.open_sync(tmp_path) as book,
        pytest.raises(InvalidInput, match=r"use book\.worker\('mail', handler\), and start it with book\.running"),
    ):
        Worker(book.queue("mail"), print)  # type: ignore[arg-type]


async def test_settings_of_another_type_are_refused(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path) as book:
        with pytest.raises(InvalidInput, match="QueueSettings, not dict"):
            book.queue("mail", settings={"lease_ms": 1})  # type: ignore[call-overload]


async def test_an_async_transaction_is_refused_by_a_call_that_is_not_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def put_within() -> None:
        """Never run."""

    begun = put_within()
    async with tidebook.open(tmp_path) as book:
        mail = await book.queue("mail").open()
        monkeypatch.setattr(SqliteQueues, "put_within", lambda *_, **__: begun)
        with pytest.raises(InvalidInput, match="is async"):
            mail.put_in(object(), 1)
    assert (
        inspect.getcoroutinestate(begun) == inspect.CORO_CLOSED
    )  # it was closed, so Python does not warn that it was never awaited
