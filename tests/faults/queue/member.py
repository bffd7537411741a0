"""A crew process that puts or works, and records what it does: `python member.py put|work BOOK FILE NAME SEED …`.

Each line is written before the next step, so that a killed process has recorded every step that took effect. Times
(`at`) are of the machine's monotonic clock, which all processes share; dates are the store's.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import sys
import time
from datetime import datetime
from typing import Any

OFF_S = float(os.environ.get("MEMBER_CLOCK_OFF_S", "0"))
if OFF_S and sys.argv[2].endswith(".toml"):  # simulates, for Python code, a machine whose clock is wrong
    _time, _time_ns = time.time, time.time_ns
    time.time = lambda: _time() + OFF_S
    time.time_ns = lambda: _time_ns() + int(OFF_S * 1e9)

from tidebook.core.errors import LeaseLost, OutcomeUnknown, Unavailable  # noqa: E402
from tidebook.queue.job import Job  # noqa: E402
from tidebook.queue.port import QueueSettings  # noqa: E402
from tidebook.queue.queue import Queue  # noqa: E402
from tidebook.runtime.clock import SystemClock  # noqa: E402
from tidebook.wiring.book import Book  # noqa: E402
from tidebook.wiring.settings import read_settings  # noqa: E402

QUEUE = "faults"
SETTINGS = QueueSettings(max_timeouts=255, lease_ms=600, finished_max=300)
LEASE_S = 0.6
KEYS = 5
HOUR_MS = 3_600_000


class History:
    """A file of JSON lines; each is written to the operating system before the call returns."""

    def __init__(self, path: str, member: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._member = member

    def note(self, what: str, **config: Any) -> None:
        line = json.dumps({"at": time.monotonic_ns(), "member": self._member, "what": what, **config})
        os.write(self._file, line.encode() + b"\n")


class CountingClock(SystemClock):
    """A client's clock that is wrong by half a century, and never returns the same time twice."""

    def __init__(self) -> None:
        self._next = itertools.count(1_000)

    def now_ms(self) -> int:
        return next(self._next)


class OffClock(SystemClock):
    """A client's clock that is wrong; the store of an embedded book still uses the machine's clock."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000 + int(OFF_S * 1000)


def ms(date: datetime | None) -> int | None:
    return None if date is None else round(date.timestamp() * 1000)


async def put_all(queue: Queue, clock: CountingClock, history: History, member: str, seed: int, count: int) -> None:
    chance = random.Random(seed)
    for serial in range(1, count + 1):
        key = None if chance.random() < 0.3 else f"{member}-{chance.randrange(KEYS)}"
        config = put_facts(key, serial, chance)
        for _ in range(2 if chance.random() < 0.1 else 1):  # a client that does not know the outcome puts again
            await put_until_acknowledged(queue, clock, history, member, config)
        await asyncio.sleep(chance.random() * 0.02)


def put_facts(key: str | None, serial: int, chance: random.Random) -> dict[str, Any]:
    now_ms = time.time_ns() // 1_000_000
    expires_at = now_ms + HOUR_MS + chance.randrange(HOUR_MS) if chance.random() < 0.7 else None
    if key is None and chance.random() < 0.3:
        expires_at = now_ms + chance.randrange(1, 150)
    return {
        "key": key,
        "serial": serial,
        "priority": chance.choice([0, 20, 100, 230]),
        "process_at": now_ms + chance.randrange(300) if chance.random() < 0.3 else None,
        "expires_at": expires_at,
    }


async def put_until_acknowledged(
    queue: Queue, clock: CountingClock, history: History, member: str, config: dict[str, Any]
) -> None:
    while True:
        # The put gets the next time of the clock.
        history.note("putting", inserted_at=clock.now_ms() + 1, **config)
        try:
            await queue.put(
                {"member": member, "serial": config["serial"]},
                key=config["key"],
                priority=config["priority"],
                process_at=config["process_at"],
                expires_at=config["expires_at"],
            )
        except (Unavailable, OutcomeUnknown) as error:
            history.note("not acknowledged", error=str(error))
            await asyncio.sleep(0.05)
        else:
            history.note("put", **config)
            return


class MemberWorker:
    """Works on entries: some quickly, some for long with heartbeats, some past their lease; some fail."""

    def __init__(self, queue: Queue, history: History, member: str, seed: int) -> None:
        self._queue = queue
        self._history = history
        self._member = member
        self._chance = random.Random(seed)
        self._holds = itertools.count(1)
        self.stopping = asyncio.Event()

    async def work(self) -> None:
        running: set[asyncio.Task[None]] = set()
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(self._listen())
            while not self.stopping.is_set():
                for job, hold in await self._claim():
                    task = group.create_task(self._handle(job, hold))
                    running.add(task)
                    task.add_done_callback(running.discard)
                await asyncio.sleep(0.005 + self._chance.random() * 0.01)
            waiting.cancel()

    async def _listen(self) -> None:
        """Listen as every worker does, with its timers and its connection; nothing here depends on it."""
        while True:
            try:
                async for _ in self._queue.listen():
                    pass
            except (Unavailable, OutcomeUnknown):
                await asyncio.sleep(0.05)

    async def _claim(self) -> list[tuple[Job, str]]:
        asked = time.monotonic_ns()
        try:
            jobs = await self._queue.claim(self._chance.choice([1, 3, 12]), lease=LEASE_S)
        except (Unavailable, OutcomeUnknown) as error:
            self._history.note("not acknowledged", error=str(error))
            await asyncio.sleep(0.05)
            return []
        taken = []
        for job in jobs:
            hold = f"{self._member}/{next(self._holds)}"
            self._history.note(
                "claimed", hold=hold, asked=asked, id=job.id, key=job.key, data=job.data, priority=job.priority,
                timeouts=job.timeouts, inserted_at=ms(job.inserted_at), process_at=ms(job.process_at),
                expires_at=ms(job.expires_at), started_at=ms(job.started_at), lease_until=ms(job.lease_until),
            )  # fmt: skip
            taken.append((job, hold))
        return taken

    async def _handle(self, job: Job, hold: str) -> None:
        fate = self._chance.random()
        if fate < 0.1:
            for _ in range(3):
                await asyncio.sleep(LEASE_S * 0.4)
                if not await self._beat(job, hold):
                    break
        elif fate < 0.15:
            await asyncio.sleep(LEASE_S * 1.5)
        else:
            await asyncio.sleep(self._chance.random() * 0.03)
        fails = self._chance.random() < 0.15
        self._history.note("failing" if fails else "finishing", hold=hold)
        try:
            if fails:
                await self._queue.fail(job, delay=self._chance.random() * 0.1)
            else:
                await self._queue.done(job)
        except LeaseLost:
            self._history.note("lost", hold=hold)
        except (Unavailable, OutcomeUnknown) as error:
            self._history.note("unknown", hold=hold, error=str(error))
        else:
            self._history.note("failed" if fails else "finished", hold=hold)

    async def _beat(self, job: Job, hold: str) -> bool:
        try:
            await self._queue.heartbeat(job, lease=LEASE_S)
        except LeaseLost:
            self._history.note("beat lost", hold=hold)
            return False
        except (Unavailable, OutcomeUnknown):
            return True
        self._history.note("beat", hold=hold, lease_until=ms(job.lease_until))
        return True


async def main(role: str, book: str, file: str, member: str, seed: int, count: int) -> None:
    history, clock = History(file, member), CountingClock()
    async with Book(read_settings(book), clock=clock if role == "put" else OffClock()) as opened:
        queue = opened.queue(QUEUE, settings=SETTINGS)
        if role == "put":
            await put_all(queue, clock, history, member, seed, count)
            return
        worker = MemberWorker(queue, history, member, seed)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.stopping.set)
        await worker.work()


if __name__ == "__main__":
    _, role, book, file, member, seed, count = sys.argv
    asyncio.run(main(role, book, file, member, int(seed), int(count)))
