"""With killed and stopped workers, a killed database and wrong clocks, the history satisfies the rules."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import pytest

import tidebook
from tests.faults.queue import history, member
from tests.faults.queue.crew import Crew, crew
from tidebook.testing.servers import Postgres

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(1800)]
CASE_TIMEOUT_S = 900


def seeded() -> random.Random:
    seed = int(os.environ.get("TIDEBOOK_SEED", random.SystemRandom().randrange(10**9)))
    print(f"TIDEBOOK_SEED={seed}")
    return random.Random(seed)


async def wait_until_drained(where: Path, running: Crew) -> None:
    """Wait until all entries are put and the queue is empty; the workers keep running."""
    async with asyncio.timeout(CASE_TIMEOUT_S), tidebook.open(where) as book:
        while running.putting:  # noqa: ASYNC110  a process has no event to await
            await asyncio.sleep(0.05)
        queue = book.queue(member.QUEUE)
        while True:
            status = await queue.status()
            if status.waiting == status.processing == 0:
                assert status.dead == 0
                return
            await asyncio.sleep(0.05)


def check_history(running: Crew) -> None:
    found = history.read(running.histories)
    print(f"{running.kills} kills, {running.stops} stops, {len(found.puts)} puts, {len(found.holds)} holds")
    assert found.puts
    assert found.holds
    assert history.faults_in(found)[:5] == []


async def test_killed_and_stopped_workers_finish_every_entry_with_one_holder_at_a_time(
    where: Path, tmp_path: Path, long_form: bool
) -> None:
    rounds, puts = (300, 6_000) if long_form else (10, 200)
    chance = seeded()
    with crew(where, tmp_path, chance, puts=puts) as running:
        for _ in range(rounds):
            await asyncio.sleep(chance.uniform(0.1, 0.6))  # the interval of the faults
            running.disturb()
        running.resume()
        await wait_until_drained(where, running)
    check_history(running)


async def test_a_database_that_is_killed_and_started_again_loses_nothing(
    settings_file: Path, own_postgres: Postgres, tmp_path: Path, long_form: bool
) -> None:
    rounds, puts = (20, 4_000) if long_form else (2, 200)
    chance = seeded()
    with crew(settings_file, tmp_path, chance, puts=puts) as running:
        for number in range(rounds):
            await asyncio.sleep(chance.uniform(0.5, 1.5))
            if number % 2 == 0:
                own_postgres.kill9()
                await asyncio.sleep(chance.uniform(0, 0.3))
                own_postgres.start()
            else:
                own_postgres.restart()
            running.disturb()
        running.resume()
        await wait_until_drained(settings_file, running)
    check_history(running)
