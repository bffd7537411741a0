"""Deciders, projection runners and the database are killed: each command takes effect once, and the table is the fold.

There are 20 kills in all, and 200 with --long.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine, inspect
from sqlalchemy.exc import OperationalError

import tidebook
from tests.faults.domain.bank_process import ACCOUNTS
from tests.unit.domain.bank import EVENTS, Account, Deposit
from tests.unit.domain.projecting import BALANCES, add, balances, sqlite_engine
from tidebook.testing.servers.postgres import Postgres

ROOT = Path(__file__).resolve().parents[3]
WITHIN_S = 60.0


class Bank:
    """A book under load: a process that decides and two that run the projection, restarted when they are killed."""

    def __init__(self, folder: Path, url: str = "") -> None:
        self.folder = folder
        self._url = url
        self._acknowledged = folder / "acknowledged"
        folder.mkdir()
        command = [sys.executable, "-W", "ignore", "-m", "tests.faults.domain.bank_process"]
        self._parent = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self._answer()
        self._decider = self._decide()
        self._runners = [self._project() for _ in range(2)]

    def _answer(self) -> str:
        assert self._parent.stdout is not None
        return self._parent.stdout.readline().strip()

    def _start(self, *words: str) -> int:
        assert self._parent.stdin is not None
        self._parent.stdin.write("\t".join(words) + "\n")
        return int(self._answer())

    def _decide(self) -> int:
        """Start at the first command that is not acknowledged, although later ones may have been executed."""
        done = set(self.done())
        start = next(n for n in range(len(done) + 1) if n not in done)
        return self._start("decide", str(self.folder), str(start), str(self._acknowledged))

    def _project(self) -> int:
        return self._start("project", str(self.folder), self._url)

    def done(self) -> list[int]:
        """Return the acknowledged commands; the last line may be incomplete."""
        if not self._acknowledged.exists():
            return []
        return [int(line) for line in self._acknowledged.read_text().split("\n")[:-1]]

    def kill_decider(self) -> None:
        kill(self._decider)
        self._decider = self._decide()

    def kill_runner(self, chance: random.Random) -> None:
        kill(self._runners.pop(chance.randrange(2)))
        self._runners.append(self._project())

    def end(self) -> None:
        for process in (self._decider, *self._runners):
            kill(process)
        self._parent.kill()
        self._parent.communicate()


def kill(process: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


@pytest.fixture
def chance() -> random.Random:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    return random.Random(seed)


@pytest.fixture
def bank(tmp_path: Path) -> Iterator[Bank]:
    made = Bank(tmp_path / "bank")
    yield made
    made.end()


async def more_commands(bank: Bank, count: int) -> None:
    """Wait until this many more commands are acknowledged."""
    before = len(bank.done())
    await wait_until(lambda: len(bank.done()) >= before + count)


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not condition():  # noqa: ASYNC110  another process makes it true
            await asyncio.sleep(0.02)


def applied(engine: Engine) -> int:
    """Return the sum of the balances, -1 while the database is down."""
    try:
        return sum(balances(engine).values()) if inspect(engine).has_table(BALANCES.name) else 0
    except OperationalError:
        return -1


async def check(bank: Bank, engine: Engine, done: list[int]) -> int:
    """Check that each command took effect once and that the table is the fold; return the number of commands."""
    async with tidebook.open(bank.folder, replicate=True) as book:
        accounts = book.decider("accounts", Account, events=EVENTS, snapshot_every=7)
        projection = book.projection("balances", topics=["accounts"], into=engine, tables=[BALANCES])(add)
        for each in sorted(set(done))[-20:]:  # retry, as a client without an answer would
            await accounts.execute(f"a-{each % ACCOUNTS}", Deposit(1), command_id=f"c-{each}")
        found = list[str]()
        folded = dict[str, int]()
        async with book.running(projection):
            await book.settle(timeout_s=WITHIN_S)
            for n in range(ACCOUNTS):
                events = [event async for event in book.journal("accounts").read(f"a-{n}")]
                folded[f"a-{n}"] = len(events)
                assert (await accounts.load(f"a-{n}")).state.balance == len(events)
                found += [event.metadata["command_id"] for event in events if event.metadata is not None]
        assert len(found) == len(set(found)) == sum(folded.values())
        assert set(found) >= {f"c-{each}" for each in done}
        assert balances(engine) == folded
        return len(found)


async def test_killed_deciders_and_runners_lose_and_repeat_nothing(
    bank: Bank, chance: random.Random, long_form: bool
) -> None:
    engine = sqlite_engine(bank.folder)
    for _ in range(80 if long_form else 9):
        before = applied(engine)
        await more_commands(bank, chance.randrange(1, 40))
        await wait_until(lambda before=before: applied(engine) > before)  # type: ignore[misc]
        await asyncio.sleep(chance.uniform(0, 0.1))  # the moment of the kill
        bank.kill_decider()
        await asyncio.sleep(chance.uniform(0, 0.1))
        bank.kill_runner(chance)
    await more_commands(bank, 10)
    bank.end()
    assert await check(bank, engine, bank.done()) > 0


@pytest.mark.postgres
async def test_a_killed_database_loses_and_repeats_nothing(
    tmp_path: Path, chance: random.Random, long_form: bool
) -> None:
    with Postgres(tmp_path / "postgres") as server:
        url = server.url.replace("postgresql://", "postgresql+psycopg://")
        engine = create_engine(url)
        bank = Bank(tmp_path / "bank", url)
        try:
            for _ in range(40 if long_form else 2):
                before = applied(engine)
                await wait_until(lambda before=before: applied(engine) > before)  # type: ignore[misc]
                await asyncio.sleep(chance.uniform(0, 0.1))  # the moment of the kill
                await asyncio.to_thread(server.kill9)
                await more_commands(bank, 5)
                await asyncio.to_thread(server.start)
        finally:
            bank.end()
        assert await check(bank, engine, bank.done()) > 0
        engine.dispose()
