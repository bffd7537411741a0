"""Write operations share commits, report to the event loop that posted them, and fail independently."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import apsw
import pytest

from tidebook.core.errors import InvalidInput, Unavailable
from tidebook.runtime.metrics import Metrics
from tidebook.sqlite import writer as writer_module
from tidebook.sqlite.database import Schema
from tidebook.sqlite.fair_lock import FairLock
from tidebook.sqlite.shared_files import SharedFile
from tidebook.sqlite.writer import WriteTransaction, nothing, unsynced

SCHEMA = Schema(name="numbers", application_id=77, steps=("CREATE TABLE number (n INTEGER PRIMARY KEY)",))


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def file(tmp_path: Path, metrics: Metrics) -> Iterator[SharedFile]:
    file = SharedFile.open(tmp_path, "n.db", SCHEMA, metrics=metrics)
    yield file
    file.release()


def insert(transaction: WriteTransaction, numbers: Sequence[int]) -> list[int]:
    for n in numbers:
        transaction.connection.execute("INSERT INTO number VALUES (?)", (n,))
        if n < 0:
            raise InvalidInput(f"{n} is refused, though it was written")
    return list(numbers)


def numbers(file: SharedFile) -> list[int]:
    with file.database.reading() as connection:
        return [n for (n,) in connection.execute("SELECT n FROM number ORDER BY n")]


async def test_operations_of_one_loop_iteration_share_a_commit(file: SharedFile, metrics: Metrics) -> None:
    answers = await asyncio.gather(*(file.writer.run(insert, n) for n in range(500)))
    assert answers == list(range(500))
    assert numbers(file) == list(range(500))
    assert metrics.counted("sqlite_operations") == 500
    assert metrics.counted("sqlite_commits") <= 10


async def test_an_operation_that_fails_does_not_affect_the_others(file: SharedFile) -> None:
    answers = await asyncio.gather(*(file.writer.run(insert, n) for n in (1, 2, -3, 4, 2, 5)), return_exceptions=True)
    assert [type(each) for each in answers] == [int, int, InvalidInput, int, Unavailable, int]
    assert numbers(file) == [1, 2, 4, 5]


async def test_a_bug_in_an_operation_is_raised_to_its_caller_and_the_writer_continues(file: SharedFile) -> None:
    def mistaken(transaction: WriteTransaction, arguments: Sequence[Any]) -> list[Any]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await file.writer.run(mistaken, None)
    assert await file.writer.run(insert, 1) == 1


async def test_a_rollback_clears_the_cache(file: SharedFile) -> None:
    def remember(transaction: WriteTransaction, arguments: Sequence[int]) -> list[int]:
        for n in arguments:
            transaction.memory["sum"] = transaction.memory.get("sum", 0) + n
            if n < 0:
                raise InvalidInput("undone")
        return [transaction.memory["sum"]] * len(arguments)

    assert await file.writer.run(remember, 1) == 1
    assert await file.writer.run(remember, 2) == 3
    with pytest.raises(InvalidInput):
        await file.writer.run(remember, -5)
    assert await file.writer.run(remember, 4) == 4


async def test_the_cache_is_empty_when_a_group_is_retried_after_a_rollback(file: SharedFile) -> None:
    def remember(transaction: WriteTransaction, arguments: Sequence[int]) -> list[int]:
        sums = []
        for n in arguments:
            sums.append(transaction.memory.get("sum", 0) + n)
            transaction.memory["sum"] = sums[-1]
            if n < 0:
                raise InvalidInput("undone")
        return sums

    answers = await asyncio.gather(*(file.writer.run(remember, n) for n in (1, 2, -5, 4)), return_exceptions=True)
    assert [each if isinstance(each, int) else type(each) for each in answers] == [1, 3, InvalidInput, 4]


async def test_a_callback_that_fails_does_not_affect_the_next_one(file: SharedFile) -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
    answered = asyncio.Event()

    def fail(outcome: Any) -> None:
        raise ZeroDivisionError

    file.writer.post(insert, 1, fail)
    file.writer.post(insert, 2, lambda outcome: answered.set())
    await answered.wait()
    assert [type(each["exception"]) for each in reported] == [ZeroDivisionError]


def test_each_loop_gets_its_own_outcomes(file: SharedFile) -> None:
    found: dict[int, list[int]] = {}

    async def use(first: int) -> None:
        mine = threading.get_ident()
        threads: set[int] = set()
        done = asyncio.Event()
        got: list[int] = []

        def on_done(outcome: int) -> None:
            threads.add(threading.get_ident())
            got.append(outcome)
            if len(got) == 200:
                done.set()

        for n in range(first, first + 200):
            file.writer.post(insert, n, on_done)
        await done.wait()
        assert threads == {mine}
        found[first] = got

    users = [threading.Thread(target=asyncio.run, args=(use(first),)) for first in (0, 1000, 2000)]
    for each in users:
        each.start()
    for each in users:
        each.join()
    assert found == {first: list(range(first, first + 200)) for first in (0, 1000, 2000)}


async def test_a_closed_loop_does_not_stop_the_writer(file: SharedFile) -> None:
    holding, posted = threading.Event(), threading.Event()

    def hold(transaction: WriteTransaction, arguments: Sequence[Any]) -> list[Any]:
        holding.wait(30)
        return list(arguments)

    async def leave() -> None:
        file.writer.post(hold, None, lambda outcome: None)
        file.writer.post(insert, 1, lambda outcome: None)

    def short_lived() -> None:
        asyncio.run(leave())
        posted.set()

    thread = threading.Thread(target=short_lived)
    thread.start()
    thread.join()
    assert posted.is_set()
    holding.set()
    assert await file.writer.run(insert, 2) == 2
    assert numbers(file) == [1, 2]


async def test_a_cancelled_call_does_not_withdraw_the_operation(file: SharedFile) -> None:
    task = asyncio.create_task(file.writer.run(insert, 1))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await file.writer.run(nothing, None)
    assert numbers(file) == [1]


async def test_the_bytes_of_a_transaction_are_bounded(
    file: SharedFile, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "TRANSACTION_BYTES_MAX", 1000)
    await asyncio.gather(*(file.writer.run(insert, n, 100) for n in range(50)))
    assert metrics.counted("sqlite_commits") >= 5


async def test_too_many_waiting_operations_are_refused(file: SharedFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "WAITING_MAX", 3)
    holding = threading.Event()

    def hold(transaction: WriteTransaction, arguments: Sequence[Any]) -> list[Any]:
        holding.wait(30)
        return list(arguments)

    held = asyncio.create_task(file.writer.run(hold, None))
    await asyncio.sleep(0)

    def post_many() -> None:
        for n in range(20):
            file.writer.post(insert, n, lambda outcome: None)

    with pytest.raises(Unavailable, match="are waiting already"):
        post_many()
    holding.set()
    await held


async def test_close_executes_the_posted_operations(tmp_path: Path) -> None:
    file = SharedFile.open(tmp_path, "n.db", SCHEMA)
    answers: list[int] = []
    for n in range(300):
        file.writer.post(insert, n, answers.append)
    await asyncio.to_thread(file.release)
    await asyncio.sleep(0)
    assert answers == list(range(300))
    with pytest.raises(Unavailable):
        file.writer.post(insert, 1, answers.append)


async def test_a_lock_that_is_not_released_in_time_fails_waiting_writes_but_not_later_ones(
    file: SharedFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "LOCK_S_MAX", 0.05)
    stopped = FairLock(file.path)
    stopped.acquire(10)
    answers = await asyncio.gather(*(file.writer.run(insert, n) for n in range(3)), return_exceptions=True)
    assert [type(each) for each in answers] == [Unavailable] * 3
    assert numbers(file) == []
    stopped.release()
    assert await file.writer.run(insert, 1) == 1
    stopped.close()


async def test_a_foreign_program_that_keeps_the_file_locked_fails_the_writes(file: SharedFile) -> None:
    with file.database.writing as connection:
        connection.set_busy_timeout(10)
    foreign = apsw.Connection(str(file.path))
    foreign.execute("BEGIN IMMEDIATE")
    with pytest.raises(Unavailable, match="locked"):
        await file.writer.run(insert, 1)
    foreign.execute("INSERT INTO number VALUES (7)")
    foreign.execute("COMMIT")
    foreign.close()
    assert await file.writer.run(insert, 1) == 1
    assert numbers(file) == [1, 7]


def level_of(transaction: WriteTransaction, arguments: Sequence[None]) -> list[int]:
    """Return SQLite's `synchronous` level: 2 is FULL, 1 is NORMAL."""
    return [transaction.connection.execute("PRAGMA synchronous").get for _ in arguments]


async def test_unsynced_operations_are_synced_only_together_with_others(file: SharedFile) -> None:
    unsynced_level = unsynced(lambda transaction, arguments: level_of(transaction, arguments))
    assert await file.writer.run(level_of, None) == 2
    assert await file.writer.run(unsynced_level, None) == 1
    both = await asyncio.gather(*(file.writer.run(run, None) for run in (unsynced_level, level_of)))
    assert both == [2, 2]
    assert await asyncio.gather(*(file.writer.run(unsynced_level, None) for _ in range(3))) == [1, 1, 1]
    assert await file.writer.run(level_of, None) == 2


async def test_a_rollback_that_fails_is_reported_and_the_writer_continues(file: SharedFile) -> None:
    def break_off(transaction: WriteTransaction, arguments: Sequence[Any]) -> list[Any]:
        """Roll back as after a disk failure: the transaction and its savepoint are gone."""
        transaction.connection.execute("INSERT INTO number VALUES (7)")
        transaction.connection.execute("RELEASE one")
        raise InvalidInput("no way back")

    answers = await asyncio.gather(file.writer.run(insert, 1), file.writer.run(break_off, None), return_exceptions=True)
    assert [type(each) for each in answers] == [InvalidInput, InvalidInput]
    assert numbers(file) == []
    assert await file.writer.run(insert, 2) == 2


async def test_a_lock_that_fails_is_reported_and_the_writer_continues(
    file: SharedFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as broken:
        broken.setattr(fcntl, "flock", refuse)
        with pytest.raises(Unavailable, match="No locks available"):
            await file.writer.run(insert, 1)
    assert await file.writer.run(insert, 2) == 2
