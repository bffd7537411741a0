"""The writer: operations share commits, answer in their own loop, and fail alone."""

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
from tidebook.core.metrics import Metrics
from tidebook.folder import inbox as inbox_module
from tidebook.folder import writer as writer_module
from tidebook.folder.inbox import Session, nothing, unsynced
from tidebook.folder.lock import FairLock
from tidebook.folder.opened import File
from tidebook.folder.schema import Schema

SCHEMA = Schema(name="numbers", application_id=77, steps=("CREATE TABLE number (n INTEGER PRIMARY KEY)",))


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def file(tmp_path: Path, metrics: Metrics) -> Iterator[File]:
    file = File.open(tmp_path, "n.db", SCHEMA, metrics=metrics)
    yield file
    file.release()


def insert(session: Session, numbers: Sequence[int]) -> list[int]:
    for n in numbers:
        session.connection.execute("INSERT INTO number VALUES (?)", (n,))
        if n < 0:
            raise InvalidInput(f"{n} is refused, though it was written")
    return list(numbers)


def numbers(file: File) -> list[int]:
    return [n for (n,) in file.database.reader().execute("SELECT n FROM number ORDER BY n")]


async def test_operations_of_one_breath_share_a_commit(file: File, metrics: Metrics) -> None:
    answers = await asyncio.gather(*(file.writer.run(insert, n) for n in range(500)))
    assert answers == list(range(500))
    assert numbers(file) == list(range(500))
    assert metrics.counted("folder_operations") == 500
    assert metrics.counted("folder_commits") <= 10


async def test_one_that_fails_leaves_its_neighbours_alone(file: File) -> None:
    answers = await asyncio.gather(*(file.writer.run(insert, n) for n in (1, 2, -3, 4, 2, 5)), return_exceptions=True)
    assert [type(each) for each in answers] == [int, int, InvalidInput, int, Unavailable, int]
    assert numbers(file) == [1, 2, 4, 5]


async def test_a_mistake_in_an_operation_reaches_its_caller_and_the_writer_goes_on(file: File) -> None:
    def mistaken(session: Session, asked: Sequence[Any]) -> list[Any]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await file.writer.run(mistaken, None)
    assert await file.writer.run(insert, 1) == 1


async def test_what_is_remembered_goes_with_what_was_undone(file: File) -> None:
    def remember(session: Session, asked: Sequence[int]) -> list[int]:
        for n in asked:
            session.memory["sum"] = session.memory.get("sum", 0) + n
            if n < 0:
                raise InvalidInput("undone")
        return [session.memory["sum"]] * len(asked)

    assert await file.writer.run(remember, 1) == 1
    assert await file.writer.run(remember, 2) == 3
    with pytest.raises(InvalidInput):
        await file.writer.run(remember, -5)
    assert await file.writer.run(remember, 4) == 4


async def test_nothing_is_remembered_of_a_group_that_was_undone_when_it_is_run_again(file: File) -> None:
    def remember(session: Session, asked: Sequence[int]) -> list[int]:
        sums = []
        for n in asked:
            sums.append(session.memory.get("sum", 0) + n)
            session.memory["sum"] = sums[-1]
            if n < 0:
                raise InvalidInput("undone")
        return sums

    answers = await asyncio.gather(*(file.writer.run(remember, n) for n in (1, 2, -5, 4)), return_exceptions=True)
    assert [each if isinstance(each, int) else type(each) for each in answers] == [1, 3, InvalidInput, 4]


async def test_a_callback_that_fails_does_not_keep_the_next_from_its_answer(file: File) -> None:
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))
    answered = asyncio.Event()

    def fail(outcome: Any) -> None:
        raise ZeroDivisionError

    file.writer.post(insert, 1, fail)
    file.writer.post(insert, 2, lambda outcome: answered.set())
    await answered.wait()
    assert [type(each["exception"]) for each in told] == [ZeroDivisionError]


def test_each_loop_gets_its_own_answers(file: File) -> None:
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


async def test_a_loop_that_is_gone_stops_nobody(file: File) -> None:
    holding, posted = threading.Event(), threading.Event()

    def hold(session: Session, asked: Sequence[Any]) -> list[Any]:
        holding.wait(30)
        return list(asked)

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


async def test_a_cancelled_wait_does_not_take_the_operation_back(file: File) -> None:
    task = asyncio.create_task(file.writer.run(insert, 1))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await file.writer.run(nothing, None)
    assert numbers(file) == [1]


async def test_a_transaction_is_bounded_in_bytes(file: File, metrics: Metrics, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "TRANSACTION_BYTES_MAX", 1000)
    await asyncio.gather(*(file.writer.run(insert, n, 100) for n in range(50)))
    assert metrics.counted("folder_commits") >= 5


async def test_too_many_waiting_operations_are_refused(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox_module, "WAITING_MAX", 3)
    holding = threading.Event()

    def hold(session: Session, asked: Sequence[Any]) -> list[Any]:
        holding.wait(30)
        return list(asked)

    held = asyncio.create_task(file.writer.run(hold, None))
    await asyncio.sleep(0)

    def post_many() -> None:
        for n in range(20):
            file.writer.post(insert, n, lambda outcome: None)

    with pytest.raises(Unavailable, match="wait already"):
        post_many()
    holding.set()
    await held


async def test_a_closed_writer_has_finished_what_was_posted(tmp_path: Path) -> None:
    file = File.open(tmp_path, "n.db", SCHEMA)
    answers: list[int] = []
    for n in range(300):
        file.writer.post(insert, n, answers.append)
    await asyncio.to_thread(file.release)
    await asyncio.sleep(0)
    assert answers == list(range(300))
    with pytest.raises(Unavailable):
        file.writer.post(insert, 1, answers.append)


async def test_a_lock_that_is_not_let_go_fails_the_writes_and_later_ones_go_on(
    file: File, monkeypatch: pytest.MonkeyPatch
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


async def test_a_foreign_program_that_keeps_the_file_locked_fails_the_writes(file: File) -> None:
    file.database.connection.set_busy_timeout(10)
    foreign = apsw.Connection(str(file.path))
    foreign.execute("BEGIN IMMEDIATE")
    with pytest.raises(Unavailable, match="locked"):
        await file.writer.run(insert, 1)
    foreign.execute("INSERT INTO number VALUES (7)")
    foreign.execute("COMMIT")
    foreign.close()
    assert await file.writer.run(insert, 1) == 1
    assert numbers(file) == [1, 7]


def level_of(session: Session, asked: Sequence[None]) -> list[int]:
    """SQLite's own word for how a commit waits: 2 is FULL, 1 is NORMAL."""
    return [session.connection.execute("PRAGMA synchronous").get for _ in asked]


async def test_what_may_be_forgotten_waits_for_the_disk_only_beside_what_may_not(file: File) -> None:
    unsynced_level = unsynced(lambda session, asked: level_of(session, asked))
    assert await file.writer.run(level_of, None) == 2
    assert await file.writer.run(unsynced_level, None) == 1
    both = await asyncio.gather(*(file.writer.run(run, None) for run in (unsynced_level, level_of)))
    assert both == [2, 2]
    assert await asyncio.gather(*(file.writer.run(unsynced_level, None) for _ in range(3))) == [1, 1, 1]
    assert await file.writer.run(level_of, None) == 2


async def test_a_rollback_that_fails_is_told_and_the_writer_lives_on(file: File) -> None:
    def break_off(session: Session, asked: Sequence[Any]) -> list[Any]:
        """As a failed disk would: the transaction is gone, and with it the savepoint."""
        session.connection.execute("INSERT INTO number VALUES (7)")
        session.connection.execute("RELEASE one")
        raise InvalidInput("no way back")

    answers = await asyncio.gather(file.writer.run(insert, 1), file.writer.run(break_off, None), return_exceptions=True)
    assert [type(each) for each in answers] == [InvalidInput, InvalidInput]
    assert numbers(file) == []
    assert await file.writer.run(insert, 2) == 2


async def test_a_lock_that_cannot_be_had_is_told_and_the_writer_lives_on(
    file: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as broken:
        broken.setattr(fcntl, "flock", refuse)
        with pytest.raises(Unavailable, match="No locks available"):
            await file.writer.run(insert, 1)
    assert await file.writer.run(insert, 2) == 2
