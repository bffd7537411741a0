"""`book.running`, `book.health` and `book.settle` over real queues, feeds and relays, and `tidebook run`."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import tidebook
from tests.pipeline.commands import running
from tidebook.core.errors import Unavailable
from tidebook.core.event import Event
from tidebook.log.port import Outgoing
from tidebook.queue import Entry, Job, Retry
from tidebook.runtime import supervisor
from tidebook.testing.conformance.store_slices import newer_version
from tidebook.wiring.book import Book


async def test_events_go_through_a_feed_and_a_worker_into_another_journal_before_settle_returns(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path / "book", replicate=True) as book:
        mails = book.journal("mails")

        async def send(job: Job) -> None:
            await mails.append(job.data["id"], [Event(job.data["payload"], tags={"sent"})])

        async with book.running(book.feed("paid", "mail"), book.worker("mail", send)) as running_parts:
            for number in range(20):
                await book.journal("orders").append(f"o-{number}", [Event(number, tags={"paid"})])
            await book.settle()
            sent = [event.payload async for event in book.tags.read("sent")]
            assert sorted(sent) == list(range(20))
            assert [each.state for each in running_parts.status()] == ["running", "running"]
            assert (await book.health()).ok
        assert [each.state for each in running_parts.status()] == ["stopped", "stopped"]


def test_the_blocking_facade_settles(tmp_path: Path) -> None:
    done = []
    with tidebook.open_sync(tmp_path / "book", replicate=True) as book:
        parts = (book.feed("paid", "mail"), book.worker("mail", lambda job: done.append(job.data["payload"])))
        with book.running(*parts) as running_parts:
            book.journal("orders").append("o-1", [Event(1, tags={"paid"})])
            book.settle()
            assert done == [1]
            assert [each.name for each in running_parts.status()] == ["feed paid/mail", "worker mail"]
            assert book.health().ok


async def test_an_outbox_message_reaches_its_journal_before_settle_returns(tmp_path: Path) -> None:
    sqlalchemy = pytest.importorskip("sqlalchemy")
    async with tidebook.open(tmp_path / "book", replicate=True) as book:
        engine = sqlalchemy.create_engine(book.outbox.url)
        async with book.running(book.relay(threads=1)):
            with engine.begin() as connection:
                book.outbox.append(connection, "orders", "o-1", [Event(1, tags={"paid"})])
            await book.settle()
            assert [event.payload async for event in book.tags.read("paid")] == [1]
        engine.dispose()


async def test_settle_works_without_replication_in_this_process(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path / "book") as book:
        await book.journal("orders").append("o-1", [Event(1, tags={"paid"})])
        await book.settle()
        assert [event.payload async for event in book.tags.read("paid")] == [1]


async def test_settle_reports_what_it_waits_for(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path / "book", replicate=True) as book:
        blocked = asyncio.Event()

        async def wait(job: Job) -> None:
            await blocked.wait()

        async with book.running(book.worker("mail", wait)):
            await book.queue("mail").put("x")
            with pytest.raises(Unavailable, match=r"not settled within 0\.2 s.*worker mail"):
                await book.settle(timeout_s=0.2)
            blocked.set()


async def test_settle_raises_if_a_partition_is_stopped(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path / "book") as book:
        done = await book.journal("orders").append("o-1", [Event(1)])
        await book.log.append(Outgoing("orders", done.partition, None, newer_version()))
        with pytest.raises(Unavailable, match=f"orders/{done.partition} is stopped"):
            await book.settle()


async def test_health_reports_a_part_that_fails_and_a_stopped_partition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "RESTART_FIRST_S", 1000.0)

    async def broken() -> None:
        raise RuntimeError("it cannot work")

    async with tidebook.open(tmp_path / "book", replicate=True) as book:
        done = await book.journal("orders").append("o-1", [Event(1)])
        await book.log.append(Outgoing("orders", done.partition, None, newer_version()))
        async with book.running(broken):
            async with asyncio.timeout(20):
                while len((await book.health()).problems) < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            health = await book.health()
        assert not health.ok
        assert any(f"orders/{done.partition} is stopped" in each for each in health.problems)
        assert any("it cannot work" in each for each in health.problems)


async def test_a_worker_whose_run_failed_is_restarted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "RESTART_FIRST_S", 0.001)
    async with tidebook.open(tmp_path / "book") as book:
        threads: list[str] = []
        worker = book.worker("mail", lambda job: threads.append(threading.current_thread().name), retry=Retry())
        claim, failures = worker._claim_free_slots, 2

        async def fail_first(**options: Any) -> int:
            nonlocal failures
            if failures:
                failures -= 1
                raise RuntimeError("a bug in the queue")
            return await claim(**options)

        monkeypatch.setattr(worker, "_claim_free_slots", fail_first)
        async with book.running(worker) as parts:
            await book.queue("mail").put_many([Entry(data=n) for n in range(5)])
            await book.settle()
            assert len(threads) == 5
            assert parts.status()[0].failures == 2


APP = """
import asyncio
from contextlib import asynccontextmanager
from pathlib import Path

def send(job):
    with open("sent.txt", "a") as file:
        file.write(f"{job.data['payload']}\\n")

def app(book):
    return [book.feed("paid", "mail"), book.worker("mail", send)]

@asynccontextmanager
async def in_block(book):
    Path("entered").touch()
    try:
        yield app(book)
    finally:
        Path("left").touch()

async def slow(job):
    Path("begun").touch()
    await asyncio.sleep(1.0)
    Path("finished").touch()

async def one(book):
    return book.worker("mail", slow)

def broken(book):
    async def fails():
        raise RuntimeError("it cannot work")
    return fails

def ended(book):
    async def nothing():
        pass
    return [nothing]

def empty(book):
    return []
"""


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "shop.py").write_text(APP)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    return tmp_path


def in_folder(folder: Path) -> str:
    return f"import os; os.chdir({str(folder)!r}); from tidebook.cli.app import main; main()"


async def lines_of(file: Path, count: int) -> list[str]:
    async with asyncio.timeout(30):
        while not file.exists() or len(file.read_text().splitlines()) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return file.read_text().splitlines()


@pytest.mark.parametrize("name", ["app", "in_block"])
async def test_run_serves_the_parts_of_an_application_until_sigterm(shop: Path, name: str) -> None:
    where = shop / "book"
    with running("run", f"shop:{name}", "--json", "--book", str(where), code=in_folder(shop)) as command:
        await asyncio.to_thread(command.until, lambda row: row["name"] == "worker mail" and row["state"] == "running")
        async with tidebook.open(where) as book:
            await _append(book, 3)
        assert sorted(await lines_of(shop / "sent.txt", 3)) == ["0", "1", "2"]
        code, _ = command.end()
    assert code == 0
    assert (shop / "left").exists() == (name == "in_block")


async def _append(book: Book, count: int) -> None:
    for number in range(count):
        await book.journal("orders").append(f"o-{number}", [Event(number, tags={"paid"})])


async def test_run_lets_a_job_finish_after_sigterm(shop: Path) -> None:
    where = shop / "book"
    async with tidebook.open(where) as book:
        await book.queue("mail").put("x")
    with running("run", "shop:one", "--json", "--book", str(where), code=in_folder(shop)) as command:
        async with asyncio.timeout(30):
            while not (shop / "begun").exists():  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        began_s = time.monotonic()
        code, _ = command.end()
        assert time.monotonic() - began_s < 10
    assert code == 0
    assert (shop / "finished").exists()


async def test_run_reports_a_failed_part_and_restarts_it(shop: Path) -> None:
    with running("run", "shop:broken", "--json", "--book", str(shop / "book"), code=in_folder(shop)) as command:
        row = await asyncio.to_thread(command.until, lambda row: row["failures"] >= 2)
        assert row["last_error"] == "RuntimeError: it cannot work"
        assert command.end()[0] == 0


@pytest.mark.parametrize(("name", "code"), [("ended", 0), ("empty", 2), ("missing", 2)])
def test_run_ends_when_all_parts_have_ended_and_refuses_other_objects(shop: Path, name: str, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", in_folder(shop), "run", f"shop:{name}", "--book", str(shop / "book")],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == code, done.stderr


SYNC = """
import os, signal, sys, threading, tidebook
with tidebook.open_sync(sys.argv[1], replicate=True) as book:
    with book.running(book.worker("mail", print)) as running:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
        running.until_stopped()
    print(running.status()[0].state, flush=True)
"""


def test_a_blocking_program_waits_for_sigterm_and_drains(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SYNC, str(tmp_path / "book")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "stopped\n"), done.stderr
