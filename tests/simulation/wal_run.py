"""One seeded run of a write-ahead log region: owners that take it from one another, pause and die, and readers.

All of `tidebook.wal` is real. The log, the network to it, the processes and time are simulated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from tests.simulation.choices import Choice, RecordedChoices
from tests.simulation.log import CALM, LogFaults, SimulatedBroker, SimulatedLog
from tests.simulation.recorder import WITHOUT_EFFECT, Recorder
from tidebook.core.errors import Fenced, NotFound, TidebookError, Truncated
from tidebook.runtime.clock import RandomIds
from tidebook.runtime.metrics import Metrics
from tidebook.testing.clock import ManualClock
from tidebook.testing.histories.verdict import RuleVerdict
from tidebook.testing.histories.wals import check_wal
from tidebook.wal.region import Region
from tidebook.wal.settings import WalSettings
from tidebook.wal.wal import Wal

NAMESPACE, REGION = "simulated", 1
TROUBLE_S = 20.0
TABLES = (1, 2)
KEPT = 8


class Owner:
    """A process that opens the region for writing."""

    def __init__(self, run: WalRun, name: str) -> None:
        self._run = run
        self.name = name
        self.log = SimulatedLog(run.broker)
        self.wal = Wal(
            self.log, NAMESPACE, clock=ManualClock(), ids=RandomIds(), metrics=Metrics(), settings=run.settings
        )
        self.region: Region | None = None
        self._values = 0

    async def live(self) -> None:
        """Claim the region, write, mark, clean and replay until another owner claims it; then claim it again."""
        chance = self._run.chance
        while True:
            try:
                region = await self.wal.open_region(REGION, create=True)
                await self.replay(region)
                while region.writable:
                    async with asyncio.TaskGroup() as group:
                        for _ in range(chance.choice((1, 1, 3))):
                            group.create_task(self._step(region))
                    await asyncio.sleep(chance.random() * 0.05)
            except* TidebookError:
                pass
            await asyncio.sleep(chance.random() * 2.0)
            await self.log.resumed()

    async def _step(self, region: Region) -> None:
        chance, record = self._run.chance, self._run.recorder.record
        table = chance.choice(TABLES)
        match chance.randrange(12):
            case 0:
                await self.replay(region)
            case 1:
                known = region.meta.tables.get(table)
                if known is not None and known.next_seq_num - KEPT > max(known.latest_marked_deleted, 1):
                    seq = known.next_seq_num - KEPT
                    await record(
                        self.name, "wal_mark", lambda: region.mark_deleted(table, seq),
                        failures=(*WITHOUT_EFFECT, NotFound), region="r", table=table, seq=seq,
                    )  # fmt: skip
            case 2:
                await region.snapshot()
            case 3:
                await region.clean()
            case _:
                values = [self._value() for _ in range(chance.choice((1, 2)))]
                await record(
                    self.name, "wal_write", lambda: region.write(table, [value.encode() for value in values]),
                    lambda written: {"first": written.first, "last": written.last},
                    failures=(*WITHOUT_EFFECT, Fenced), region="r", table=table, values=values,
                )  # fmt: skip

    def _value(self) -> str:
        self._values += 1
        return f"{self.name}-{self._values}"

    async def replay(self, region: Region) -> bool:
        """Replay the region and record the result; return whether it succeeded."""

        async def collect() -> list[list[Any]]:
            return [[entry.table, entry.seq, entry.payload.decode()] async for entry in region.read()]

        found = await self._run.recorder.record(
            self.name, "wal_replay", collect, lambda rows: rows, failures=(*WITHOUT_EFFECT, Truncated), region="r"
        )
        return isinstance(found, list)


class WalRun:
    """One run, determined by the seed, or by choices that are replayed."""

    def __init__(self, seed: int, replayed: Sequence[Choice] | None = None) -> None:
        self.chance = chance = RecordedChoices(seed, replayed)
        self.recorder = Recorder()
        faults = LogFaults(
            refused=chance.choice((0.0, 0.05)),
            unanswered=chance.choice((0.0, 0.05, 0.2)),
            late_s_max=chance.choice((0.1, 3.0, 15.0)),
            call_s_max=chance.choice((0.01, 0.2)),
        )
        self.broker = SimulatedBroker(chance.split(), faults)
        self.settings = WalSettings(
            clean_every_s=chance.choice((0, 3.0)),
            in_flight_max=chance.choice((1, 5)),
            pack_bytes=chance.choice((64, 4096)),
        )
        self._lives = 0
        #: References that keep tasks which wait forever from being collected.
        self._dead: list[Owner] = []
        self._owners: list[tuple[Owner, asyncio.Task[None]]] = []

    def _start(self) -> None:
        self._lives += 1
        owner = Owner(self, f"owner-{self._lives}")
        self._owners.append((owner, asyncio.get_running_loop().create_task(owner.live())))

    async def go(self) -> RuleVerdict:
        """Run, and return the checker's verdict."""
        for _ in range(2):
            self._start()
        loop = asyncio.get_running_loop()
        while loop.time() < TROUBLE_S:
            await asyncio.sleep(self.chance.random() * 4.0)
            owner, task = self._owners.pop(0)
            match self.chance.randrange(3):
                case 0:
                    owner.log.kill()
                    task.cancel()
                    self._dead.append(owner)
                    self._start()
                case 1:
                    owner.log.pause(self.chance.random() * 6.0)
                    self._owners.append((owner, task))
                case _:
                    self._owners.append((owner, task))
        for _, task in self._owners:
            if task.done():
                task.result()
            task.cancel()
        self.broker.faults = CALM
        await asyncio.sleep(30.0)  # until late requests have arrived
        for writable in (False, True):
            last = Owner(self, f"last-{writable}")
            if not await last.replay(await last.wal.open_region(REGION, create=True, writable=writable)):
                raise AssertionError("the region cannot be replayed when all is quiet")
        return check_wal(self.recorder.history)
