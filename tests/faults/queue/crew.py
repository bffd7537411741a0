"""Processes that put entries or work on them, and their faults: kills, stops and wrong clocks."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.faults.queue import member

MEMBER = Path(member.__file__)
#: Longer than a lease: a process that is stopped for this long has lost its entries when it continues.
STOPPED_S = (member.LEASE_S * 1.2, member.LEASE_S * 2.5)
END_S_MAX = 60


class Crew:
    """Workers, of which some are killed or stopped at any time, and putters."""

    def __init__(self, where: Path, folder: Path, chance: random.Random, *, workers: int, puts: int) -> None:
        self._where = where
        self.folder = folder
        self._chance = chance
        self._number = 0
        self._stopped: dict[subprocess.Popen[bytes], float] = {}
        self.kills = self.stops = 0
        self._workers = [self._start("work") for _ in range(workers)]
        self._putters = [self._start("put", puts) for _ in range(2)]

    @property
    def histories(self) -> list[Path]:
        return sorted(self.folder.glob("*.history"))

    def _start(self, role: str, puts: int = 0) -> subprocess.Popen[bytes]:
        self._number += 1
        name = f"{role}{self._number}"
        # The clock of every third worker is an hour fast, that of every other third an hour slow.
        off_s = (0, 3_600, -3_600)[self._number % 3] if role == "work" else 0
        arguments = [role, str(self._where), str(self.folder / f"{name}.history"), name, str(self._number), str(puts)]
        with (self.folder / "members.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, str(MEMBER), *arguments],
                stdout=log,
                stderr=log,
                env={**os.environ, "MEMBER_CLOCK_OFF_S": str(off_s)},
            )

    def disturb(self) -> None:
        """Kill or stop a random worker, and resume those that were stopped for long enough."""
        self.resume(time.monotonic())
        which = self._chance.randrange(len(self._workers))
        process = self._workers[which]
        assert process.poll() is None, f"a worker ended by itself: {self.log()}"
        if self._chance.random() < 0.5:
            self.kills += 1
            process.kill()
            process.wait()
            self._stopped.pop(process, None)
            self._workers[which] = self._start("work")
        elif process not in self._stopped:
            self.stops += 1
            process.send_signal(signal.SIGSTOP)
            self._stopped[process] = time.monotonic() + self._chance.uniform(*STOPPED_S)

    def resume(self, now: float = float("inf")) -> None:
        for process, until in list(self._stopped.items()):
            if until <= now:
                process.send_signal(signal.SIGCONT)
                del self._stopped[process]

    @property
    def putting(self) -> bool:
        """Whether a putter is still running; putters are neither killed nor stopped."""
        codes = [putter.poll() for putter in self._putters]
        assert not any(codes), f"a putter failed: {self.log()}"
        return None in codes

    def end(self) -> None:
        """Terminate all processes, and wait for them."""
        self.resume()
        processes = [*self._workers, *self._putters]
        for process in processes:
            if process.poll() is None:
                process.terminate()
        for process in processes:
            try:
                process.wait(END_S_MAX)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise
        # A process that has just started may get the signal before it has installed its handler.
        well = {0, -signal.SIGTERM}
        assert all(worker.returncode in well for worker in self._workers), f"a worker ended badly: {self.log()}"

    def log(self) -> str:
        return (self.folder / "members.log").read_text()[-4_000:]


@contextmanager
def crew(where: Path, folder: Path, chance: random.Random, *, workers: int = 3, puts: int) -> Iterator[Crew]:
    made = Crew(where, folder, chance, workers=workers, puts=puts)
    try:
        yield made
    finally:
        made.end()
