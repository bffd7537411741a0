"""Rule 47: with putters and workers that die and pause, each key has one holder at a time and nothing is lost."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from pathlib import Path

import pytest

import tidebook
from tests.integration.queue.patience import until
from tidebook.core.errors import LeaseLost
from tidebook.queue.job import Job
from tidebook.queue.port import QueueSettings
from tidebook.queue.queue import Queue

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(300)]
KEYS = 12
LEASE_S = 0.4


class Ledger:
    """Records which worker holds each key, and which jobs were done."""

    def __init__(self) -> None:
        self.last_put: dict[str, int] = {}
        self.done: set[tuple[str, int]] = set()
        self.overlaps: list[str] = []
        self._holds: dict[str, dict[int, Job]] = defaultdict(dict)

    def take(self, job: Job) -> None:
        """Record a claim. A worker that still holds the key, and is not finishing it, must have lost its lease."""
        assert job.key is not None
        others = self._holds[job.key].values()
        self.overlaps += [
            f"{job!r} beside {other!r}"
            for other in others
            if job.started_at < other.lease_until and other.started_at < job.lease_until
        ]
        self._holds[job.key][id(job)] = job

    def let_go(self, job: Job) -> None:
        """Record that a job is about to be finished or returned."""
        assert job.key is not None
        del self._holds[job.key][id(job)]


async def putter(book: tidebook.Book, ledger: Ledger, numbers: list[int], chance: random.Random) -> None:
    queue = book.queue("stress")
    for number in numbers:
        key = f"k{number % KEYS}"
        ledger.last_put[key] = number
        await queue.put(number, key=key, priority=chance.choice([0, 20, 100]))
        await asyncio.sleep(chance.random() * 0.01)


async def worker(book: tidebook.Book, ledger: Ledger, stop: asyncio.Event, chance: random.Random) -> None:
    queue = book.queue("stress")
    while not stop.is_set():
        jobs = await queue.claim(chance.choice([1, 3]), lease=LEASE_S)
        if not jobs:
            await asyncio.sleep(0.01)
        for job in jobs:
            ledger.take(job)
        for job in jobs:
            await handle(queue, job, ledger, chance)


async def handle(queue: Queue, job: Job, ledger: Ledger, chance: random.Random) -> None:
    fate = chance.random()
    if fate < 0.05:  # it dies, and holds it until its lease ends
        return
    if fate < 0.10:  # it pauses past its lease
        await asyncio.sleep(LEASE_S * 1.3)
    ledger.let_go(job)
    try:
        if fate < 0.2:
            await queue.fail(job)
        else:
            await queue.done(job)
            ledger.done.add((str(job.key), job.data))
    except LeaseLost:
        pass


async def test_each_key_has_one_holder_and_the_last_of_each_key_is_done(where: Path, long_form: bool) -> None:
    ledger, stop = Ledger(), asyncio.Event()
    rounds = 1_500 if long_form else 200
    settings = QueueSettings(max_timeouts=255)
    async with tidebook.open(where) as first, tidebook.open(where) as second:
        for book in (first, second):
            await book.queue("stress", settings=settings).open()
        workers = [
            asyncio.create_task(worker((first, second)[number % 2], ledger, stop, random.Random(number)))
            for number in range(6)
        ]
        # Each putter has its own keys: so the last put of a key is known.
        numbers = [[n for n in range(rounds) if n % KEYS % 5 == part] for part in range(5)]
        await asyncio.gather(
            *(putter((first, second)[part % 2], ledger, numbers[part], random.Random(part)) for part in range(5))
        )
        await until(lambda: set(ledger.last_put.items()) <= ledger.done, 200)
        stop.set()
        await asyncio.gather(*workers)
        assert ledger.overlaps == []
        status = await first.queue("stress").status()
        assert status.dead == 0
