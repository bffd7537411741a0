"""Kill a process at each step of its work on a region, and check what the next process finds.

Run as a program. Each run is a fork that ends itself with SIGKILL before or after its n-th call to the log. No
acknowledged step may be missing, and nothing else may appear but the one step that was in progress.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from tests.integration.wal.base import contents, make_wal, state_of
from tidebook.log.port import Acknowledged, Log, OnSent, Outgoing, TopicState
from tidebook.log.sqlite import SqliteLog
from tidebook.wal.region import Region

Step = list[Any]
#: The steps of a run; each is reported before it begins and after it is done.
STEPS: list[Step] = [
    ["write", 1, ["a", "b"]],
    ["write", 2, ["c"]],
    ["mark", 1, 2],
    ["snapshot"],
    ["write", 1, ["d"]],
    ["clean"],
    ["many", [[1, ["e"]], [3, ["f", "g"]]]],
    ["drop", 2],
    ["write", 2, ["h"]],
    ["mark", 1, 5],
    ["clean"],
    ["mark", 3, 3],
    ["mark", 2, 2],
    ["clean"],
    ["write", 3, ["i"]],
    ["clean"],
]


class KillingLog:
    """Kill the process before or after its n-th change of the log."""

    def __init__(self, log: Log, *, at: int, after: bool) -> None:
        self._log = log
        self._left = at
        self._after = after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    def _due(self) -> bool:
        self._left -= 1
        if self._left == 0 and not self._after:
            die()
        return self._left == 0

    def send(self, record: Outgoing, on_sent: OnSent) -> None:
        self._log.send(record, (lambda _: die()) if self._due() else on_sent)

    async def append(self, record: Outgoing) -> Acknowledged:
        return await self._change(lambda: self._log.append(record))

    async def truncate(self, topic: str, partition: int, *, before: int) -> None:
        await self._change(lambda: self._log.truncate(topic, partition, before=before))

    async def create_topic(self, topic: str, partitions: int, **named: Any) -> TopicState:
        return await self._change(lambda: self._log.create_topic(topic, partitions, **named))

    async def _change(self, change: Callable[[], Awaitable[Any]]) -> Any:
        due = self._due()
        done = await change()
        if due:
            die()
        return done


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def report(diary: Path, *words: Any) -> None:
    with diary.open("ab", buffering=0) as file:
        file.write(json.dumps(words).encode() + b"\n")


def answered(diary: Path) -> list[list[Any]]:
    return [json.loads(line) for line in diary.read_text().splitlines()] if diary.exists() else []


async def do(region: Region, step: Step) -> None:
    match step:
        case ["write", table, payloads]:
            await region.write(table, [p.encode() for p in payloads])
        case ["many", writes]:
            await region.write_many([(table, [p.encode() for p in payloads]) for table, payloads in writes])
        case ["mark", table, seq]:
            await region.mark_deleted(table, seq)
        case ["drop", table]:
            await region.drop_table(table)
        case ["snapshot"]:
            await region.snapshot()
        case ["clean"]:
            await region.clean()
        case _:
            raise AssertionError(step)


def expected(steps: list[Step]) -> dict[int, list[list[Any]]]:
    """Return the expected contents of the tables after these steps."""
    tables: dict[int, tuple[int, list[list[Any]]]] = {}
    for step in steps:
        match step:
            case ["write", table, payloads]:
                following, held = tables.get(table, (1, []))
                held = held + [[following + i, payload] for i, payload in enumerate(payloads)]
                tables[table] = (following + len(payloads), held)
            case ["many", writes]:
                for table, payloads in writes:
                    following, held = tables.get(table, (1, []))
                    held = held + [[following + i, payload] for i, payload in enumerate(payloads)]
                    tables[table] = (following + len(payloads), held)
            case ["mark", table, seq]:
                following, held = tables[table]
                tables[table] = (following, [pair for pair in held if pair[0] >= seq])
            case ["drop", table]:
                del tables[table]
    return {table: held for table, (_, held) in sorted(tables.items()) if held}


async def run_steps(folder: Path, *, at: int, after: bool) -> None:
    log = SqliteLog(folder)
    wal = make_wal(KillingLog(log, at=at, after=after), "crash")
    region = await wal.open_region(7, create=True)
    for step in STEPS:
        report(folder / "diary", "begin", step)
        await do(region, step)
        report(folder / "diary", "done", step)
    await wal.close()
    await log.close()


async def inspect(folder: Path) -> None:
    """Check what the next owner and a reader find, and that both can continue."""
    lines = answered(folder / "diary")
    done = [step for word, step in lines if word == "done"]
    under_way = [step for word, step in lines[-1:] if word == "begin"]
    log = SqliteLog(folder)
    wal = make_wal(log, "crash")
    region = await wal.open_region(7, create=True)
    held = {t: [[seq, p.decode()] for seq, p in pairs] for t, pairs in sorted((await contents(region)).items())}
    assert held in (expected(done), expected(done + under_way)), (held, done, under_way)
    reader = await make_wal(log, "crash").open_region(7, writable=False)
    assert state_of(reader.meta) == state_of(region.meta)
    # The next owner continues where the killed one stopped.
    for step in [under_way[0]] if under_way and held == expected(done) else []:
        await do(region, step)
    left = STEPS[len(done) + len(under_way) :]
    for step in left:
        await do(region, step)
    held = {t: [[seq, p.decode()] for seq, p in pairs] for t, pairs in sorted((await contents(region)).items())}
    assert held == expected(STEPS), (held, done, under_way)
    await wal.close()
    await log.close()


async def run_concurrently(folder: Path, *, seconds: float) -> None:
    """Run many writers, a marker and a cleaner concurrently, until a timer kills the process."""
    asyncio.get_running_loop().call_later(seconds, die)
    wal = make_wal(SqliteLog(folder), "crash", pack_bytes=200)
    region = await wal.open_region(7, create=True)
    diary = os.open(folder / "diary", os.O_APPEND | os.O_CREAT | os.O_WRONLY)

    async def write(writer: int) -> None:
        for n in range(100_000):
            written = await region.write(writer % 3, [b"%d-%d-%d" % (os.getpid(), writer, n)])
            line = ["wrote", writer % 3, written.first, f"{os.getpid()}-{writer}-{n}"]
            os.write(diary, json.dumps(line).encode() + b"\n")

    async def mark() -> None:
        while True:
            await asyncio.sleep(0.005)
            for table, held in list(region.meta.tables.items()):
                seq = max(held.latest_marked_deleted, held.next_seq_num - 20)
                if seq > held.latest_marked_deleted:
                    os.write(diary, json.dumps(["mark", table, seq]).encode() + b"\n")
                    await region.mark_deleted(table, seq)
            await region.clean()

    await asyncio.gather(mark(), *map(write, range(6)))


async def inspect_concurrent(folder: Path) -> None:
    wrote: dict[tuple[int, int], str] = {}
    marks: dict[int, int] = {}
    for line in answered(folder / "diary"):
        if line[0] == "wrote":
            assert wrote.setdefault((line[1], line[2]), line[3]) == line[3], f"a number was given twice: {line}"
        else:
            marks[line[1]] = max(marks.get(line[1], 0), line[2])
    log = SqliteLog(folder)
    wal = make_wal(log, "crash")
    region = await wal.open_region(7, create=True)
    held = {(t, seq): p.decode() for t, pairs in (await contents(region)).items() for seq, p in pairs}
    for (table, seq), payload in wrote.items():
        assert held.get((table, seq), payload) == payload
        assert (table, seq) in held or seq < marks.get(table, 0), f"lost: table {table}, {seq}"
    for table in region.meta.tables:
        numbers = sorted(seq for t, seq in held if t == table)
        assert numbers == list(range(numbers[0], numbers[-1] + 1)) if numbers else True
    await wal.close()
    await log.close()


def in_fork(body: Callable[[], Awaitable[None]]) -> int:
    """Run in a forked process; return its exit status, negative if a signal ended it."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            asyncio.run(body())  # type: ignore[arg-type]
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def every_step(after: bool) -> int:
    """Kill at the first call, the second, and so on, until a run completes."""
    for at in range(1, 1000):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            ended = in_fork(lambda at=at, folder=folder: run_steps(folder, at=at, after=after))  # type: ignore[misc]
            assert ended in (0, -signal.SIGKILL), f"run {at} ended with {ended}"
            assert in_fork(lambda folder=folder: inspect(folder)) == 0, f"run {at}, after={after}"  # type: ignore[misc]
            if ended == 0:
                return at - 1
    raise AssertionError("a run never completes")


def kill_at_random(rounds: int, seed: int) -> int:
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(rounds):
            seconds = chance.uniform(0.05, 0.4)
            in_fork(lambda seconds=seconds: run_concurrently(folder, seconds=seconds))  # type: ignore[misc]
            assert in_fork(lambda: inspect_concurrent(folder)) == 0, f"round {number} of seed {seed}"
        return len(answered(folder / "diary"))


if __name__ == "__main__":
    if sys.argv[1] == "busy":
        print(kill_at_random(int(sys.argv[2]), int(sys.argv[3])))
    else:
        print(every_step(after=sys.argv[1] == "after"))
