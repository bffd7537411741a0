"""One seeded run of a queue: putters and workers that pause and die, on a database that answers late or never.

The store with all its SQL and the engine that runs it, in memory, are real. The connection to it, which may fail at
every call, the processes and the clock are simulated.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import apsw
import msgspec

from tests.simulation.choices import Choice, RecordedChoices
from tests.simulation.recorder import WITHOUT_EFFECT, Recorder
from tidebook.core.errors import LeaseLost, OutcomeUnknown, Unavailable
from tidebook.queue.port import Claimed, Failure, LeasedEntry, NewEntry, QueueRef, QueueSettings
from tidebook.queue.sqlite.store import SqliteQueues
from tidebook.queue.sqlite.tables import SCHEMA
from tidebook.sqlite.writer import WriteTransaction
from tidebook.testing.histories import queues as rules
from tidebook.testing.histories.verdict import RuleVerdict

TROUBLE_S = 12.0
LEASE_MS = 1_000
KEYS = ("a", "b", None)
SETTINGS = QueueSettings(lease_ms=LEASE_MS, max_timeouts=255)


class DatabaseFaults(msgspec.Struct):
    """The probability of each fault of a call, and the longest duration of a call."""

    refused: float = 0.0
    unanswered: float = 0.0
    call_s_max: float = 0.01


class SimulatedDatabase:
    """One database in memory, whose transactions run one after the other."""

    def __init__(self, chance: random.Random, faults: DatabaseFaults) -> None:
        self.chance = chance
        self.faults = faults
        self.connection = apsw.Connection(":memory:")
        for step in SCHEMA.steps:
            self.connection.execute(step)

    def transact(self, run: Callable[[WriteTransaction, Sequence[Any]], Sequence[Any]], call: Any) -> Any:
        transaction = WriteTransaction(self.connection)
        self.connection.execute("BEGIN IMMEDIATE")
        try:
            [found] = run(transaction, [call])
        except BaseException:
            self.connection.execute("ROLLBACK")
            raise
        self.connection.execute("COMMIT")
        return found


class Connection:
    """The connection of one process: the store uses it in place of the writer of a file."""

    def __init__(self, database: SimulatedDatabase) -> None:
        self._database = database
        self._paused_until_s = 0.0

    def pause(self, seconds: float) -> None:
        self._paused_until_s = asyncio.get_running_loop().time() + seconds

    async def resumed(self) -> None:
        while (left_s := self._paused_until_s - asyncio.get_running_loop().time()) > 0:  # noqa: ASYNC110
            await asyncio.sleep(left_s)

    async def _travel(self) -> None:
        await asyncio.sleep(self._database.chance.random() * self._database.faults.call_s_max)

    async def run(self, run: Any, call: Any, size_bytes: int = 0) -> Any:
        """Execute a transaction: the request travels, takes effect at one moment, and the answer travels back."""
        database = self._database
        await self.resumed()
        await self._travel()
        if database.chance.random() < database.faults.refused:
            raise Unavailable("the database does not answer")
        fate = database.chance.random()
        if fate < database.faults.unanswered / 2:
            raise OutcomeUnknown("the database did not answer, and has done nothing")
        found = database.transact(run, call)
        await self._travel()
        await self.resumed()
        if fate < database.faults.unanswered:
            raise OutcomeUnknown("the database did not answer")
        return found


class VirtualClock:
    """The clock of the database."""

    def now_ms(self) -> int:
        return int(asyncio.get_running_loop().time() * 1000)

    def monotonic_ms(self) -> int:
        return self.now_ms()


class Process:
    """A process with the queue open."""

    def __init__(self, run: QueueRun, name: str) -> None:
        self._run = run
        self.name = name
        self.connection = Connection(run.database)
        self.store = SqliteQueues.__new__(SqliteQueues)  # the book has no file
        self.store._writer = self.connection  # type: ignore[assignment]
        self.store._clock = VirtualClock()
        self._holds = itertools.count(1)

    async def put(self) -> None:
        """Put entries until the run ends."""
        chance = self._run.chance
        for number in itertools.count(1):
            value, key = f"{self.name}-{number}", chance.choice(KEYS)
            hash = (f"key {key}" if key else value).encode()
            entry = NewEntry(hash, 0, value.encode(), key, priority=chance.choice((50, 100)))
            await self._run.recorder.record(
                self.name, "put", partial(self.store.put, self._run.queue, [entry], inserted_at=0),
                lambda put: {"inserted": put.inserted, "merged": put.merged}, value=value, key=key,
            )  # fmt: skip
            await asyncio.sleep(chance.random() * 0.3)
            await self.connection.resumed()

    async def work(self) -> None:
        """Claim entries, and finish most of them."""
        async with asyncio.TaskGroup() as group:
            while True:
                for claimed, hold in await self._claim():
                    group.create_task(self._handle(claimed, hold))
                await asyncio.sleep(self._run.chance.random() * 0.2)
                await self.connection.resumed()

    async def _claim(self) -> list[tuple[Claimed, str]]:
        run, taken = self._run, list[tuple[Claimed, str]]()

        def rows(found: list[Claimed]) -> list[dict[str, Any]]:
            taken.extend((each, f"{self.name}/{next(self._holds)}") for each in found)
            return [
                {"hold": hold, "id": each.id, "key": each.key, "value": each.data.decode(),
                 "started_ms": each.started_at, "lease_until_ms": each.lease_until}
                for each, hold in taken
            ]  # fmt: skip

        token, limit = run.chance.randbytes(16), run.chance.choice((1, 3))
        await run.recorder.record(
            self.name, "claim", lambda: self.store.claim(run.queue, {token: limit}, lease_ms=LEASE_MS), rows
        )
        return taken

    async def _handle(self, claimed: Claimed, hold: str) -> None:
        run, store = self._run, self.store
        held = LeasedEntry(claimed.keyhash, claimed.token, claimed.slot)
        fate, record = run.chance.random(), run.recorder.record
        failures = (*WITHOUT_EFFECT, LeaseLost)

        async def beat() -> int:
            found = await store.heartbeat(run.queue, [held], lease_ms=LEASE_MS)
            return _of(found, held)

        async def finish() -> None:
            _of(dict.fromkeys(await store.finish(run.queue, [held]), 0), held)

        async def give_back() -> None:
            [outcome] = await store.fail(run.queue, [Failure(held)])
            if outcome == "lost":
                raise LeaseLost("it is another's")

        if fate < 0.2:
            await asyncio.sleep(0.6)
            await record(
                self.name, "heartbeat", beat, lambda until: {"lease_until_ms": until}, failures=failures, hold=hold
            )
        await asyncio.sleep(run.chance.choice((0.01, 0.01, 0.5, 1.3)))
        await self.connection.resumed()
        if fate > 0.85:
            await record(self.name, "give_back", give_back, failures=failures, hold=hold)
        else:
            await record(self.name, "finish", finish, failures=failures, hold=hold)


def _of(found: dict[LeasedEntry, int], held: LeasedEntry) -> int:
    if held not in found:
        raise LeaseLost("it is another's")
    return found[held]


class QueueRun:
    """One run, determined by the seed, or by choices that are replayed."""

    def __init__(self, seed: int, replayed: Sequence[Choice] | None = None) -> None:
        self.chance = chance = RecordedChoices(seed, replayed)
        self.recorder = Recorder()
        faults = DatabaseFaults(chance.choice((0.0, 0.05)), chance.choice((0.0, 0.05, 0.2)), chance.choice((0.01, 0.3)))
        self.database = SimulatedDatabase(chance.split(), faults)
        self.queue = QueueRef(1, "q", SETTINGS)
        self._lives = 0
        self._workers: list[tuple[Process, asyncio.Task[None]]] = []

    def _start_worker(self) -> None:
        self._lives += 1
        worker = Process(self, f"worker-{self._lives}")
        self._workers.append((worker, asyncio.get_running_loop().create_task(worker.work())))

    async def go(self) -> list[RuleVerdict]:
        """Run, and return the checker's verdicts."""
        putters = [asyncio.create_task(Process(self, f"putter-{number}").put()) for number in (1, 2)]
        for _ in range(3):
            self._start_worker()
        loop = asyncio.get_running_loop()
        while loop.time() < TROUBLE_S:
            await asyncio.sleep(self.chance.random() * 3.0)
            worker, task = self._workers.pop(0)
            match self.chance.randrange(3):
                case 0:
                    task.cancel()
                    self._start_worker()
                case 1:
                    worker.connection.pause(self.chance.random() * 3.0)
                    self._workers.append((worker, task))
                case _:
                    self._workers.append((worker, task))
        for putter in putters:
            putter.cancel()
        self.database.faults = DatabaseFaults()
        await asyncio.sleep(10.0)
        for _, task in self._workers:
            if task.done():
                task.result()
        left: Any = self.database.connection.execute("SELECT data FROM entry").fetchall()
        self.recorder.observe("inspector", "dump_queue", [{"value": data.decode()} for (data,) in left], queue="q")
        history = self.recorder.history
        return [rules.check_holders(history), rules.check_puts(history)]
