"""kill -9 of a decider's process and of projection runners: every command once, tables equal to the fold."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import Engine, inspect

import tidebook
from tests.unit.domain.bank import EVENTS, Account, Deposit
from tests.unit.domain.projecting import BALANCES, add, balances, replicating, running, sqlite_engine

ROOT = Path(__file__).resolve().parents[3]


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.faults.domain.bank_process", *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


async def test_every_command_of_a_killed_process_takes_effect_once(tmp_path: Path, long_form: bool) -> None:
    kills, chance, number = 40 if long_form else 4, random.Random(5), 0
    for _ in range(kills):
        process = start("decide", str(tmp_path), str(number))
        try:
            assert process.stdout is not None
            done = -1
            for _ in range(chance.randrange(5, 40)):
                done = int(await asyncio.to_thread(process.stdout.readline))
        finally:
            process.kill()
            rest, _ = process.communicate()
        printed = [int(line) for line in rest.split() if line.isdigit()]
        # What was acknowledged last may be followed by one command whose result nobody saw: it is repeated.
        number = max([done, *printed])
    async with tidebook.open(tmp_path) as book:
        accounts = book.decider("accounts", Account, events=EVENTS, snapshot_every=7)
        for each in range(max(0, number - 20), number + 1):  # all of them again, as a client that saw no answer would
            await accounts.execute(f"a-{each % 5}", Deposit(1), command_id=f"c-{each}")
        found = list[str]()
        for n in range(5):
            events = [event async for event in book.journal("accounts").read(f"a-{n}")]
            assert (await accounts.load(f"a-{n}")).state.balance == len(events)
            found += [event.metadata["command_id"] for event in events if event.metadata is not None]
        assert len(found) == len(set(found))
        assert set(found) >= {f"c-{each}" for each in range(number + 1)}
        assert len(found) <= number + 2


async def test_a_projection_whose_runners_are_killed_is_the_fold(tmp_path: Path, long_form: bool) -> None:
    kills, chance = 40 if long_form else 4, random.Random(7)
    engine = sqlite_engine(tmp_path)
    async with tidebook.open(tmp_path) as book:
        accounts = book.decider("accounts", Account, events=EVENTS)
        written = 0
        for _ in range(kills):
            runners = [start("project", str(tmp_path), "") for _ in range(2)]
            try:
                for _ in range(chance.randrange(20, 60)):
                    await accounts.execute(f"a-{written % 30}", Deposit(1))
                    written += 1
                await wait_until(lambda: BALANCES.name in names(engine) and bool(balances(engine)))
                await asyncio.sleep(chance.uniform(0, 0.3))  # the moment of the kill
            finally:
                for runner in runners:
                    runner.kill()
                    runner.communicate()
        projection = book.projection("balances", topics=["accounts"], into=engine, tables=[BALANCES])(add)
        async with replicating(book, "accounts"), running(projection):
            for n in range(min(30, written)):
                await projection.wait_for(await accounts.execute(f"a-{n}", Deposit(1)))
            expected = {f"a-{n}": (await accounts.load(f"a-{n}")).state.balance for n in range(min(30, written))}
            assert balances(engine) == expected
            assert sum(expected.values()) == written + len(expected)


def names(engine: Engine) -> list[str]:
    return list(inspect(engine).get_table_names())


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(40):
        while not condition():  # noqa: ASYNC110  another process makes it true
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("seed", range(2))
async def test_a_projection_is_the_fold_whatever_the_batching_lag_and_crashes(seed: int, tmp_path: Path) -> None:
    """Random small steps: append, replicate a little, run for a moment, crash, change the batch size."""
    chance, engine = random.Random(seed), sqlite_engine(tmp_path)
    async with tidebook.open(tmp_path) as book:
        accounts = book.decider("accounts", Account, events=EVENTS)
        for _ in range(12):
            for _ in range(chance.randrange(1, 12)):
                await accounts.execute(f"a-{chance.randrange(6)}", Deposit(chance.randrange(1, 9)))
            projection = book.projection("balances", topics=["accounts"], into=engine, tables=[BALANCES])(add)
            projection._progress.batch_max = chance.choice([1, 2, 3, 200])
            async with replicating(book, "accounts"):
                task = asyncio.create_task(projection.run())
                await asyncio.sleep(chance.uniform(0, 0.1))  # the moment of the cancellation
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        projection = book.projection("balances", topics=["accounts"], into=engine, tables=[BALANCES])(add)
        async with replicating(book, "accounts"), running(projection):
            for n in range(6):
                await projection.wait_for(await accounts.execute(f"a-{n}", Deposit(1)))
        assert balances(engine) == {f"a-{n}": (await accounts.load(f"a-{n}")).state.balance for n in range(6)}
