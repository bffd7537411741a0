"""One run: the workload under a schedule of faults, then quiet, then the checker."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from faults.crew import SOURCES, Crew
from faults.plan import LEASE_S, TOPIC, Plan, write_plan
from faults.proxy import Mode, TcpProxy
from faults.roles.context import Context
from faults.roles.inspector import CATCH_UP_S_MAX
from faults.roles.streams import create_effects
from faults.schedule import PlannedFault, make_schedule
from tidebook.testing.histories.call import RecordedHistory, pair_lines
from tidebook.testing.histories.checker import check_history
from tidebook.testing.histories.line import read_lines
from tidebook.testing.histories.verdict import RuleVerdict
from tidebook.wiring.book import open as open_book

#: Within this time after the last fault every process must have done something again.
RECOVERY_S_MAX = 30.0
START_S_MAX = 120.0
SETTINGS = f"""folder = "data"
[journal]
partitions = 2
[outbox]
lock_limit_s = {2 * LEASE_S}
rest_s = 0.2
poll_s = 0.2
"""


class DoneFault(msgspec.Struct, frozen=True):
    """A fault as it was done, by the monotonic clock."""

    kind: str
    target: str
    start_ns: int
    end_ns: int


class RunResult(msgspec.Struct):
    """Everything that a report needs."""

    seed: int
    command: str
    began_ns: int
    faults: list[DoneFault]
    quiet_ns: int
    #: How long after the last fault every process had done something again; None: not all within the bound.
    recovered_s: float | None
    #: How long the consumers took to catch up after the last write.
    caught_up_s: float | None
    lacking: list[str]
    ended_badly: list[str]
    verdicts: list[RuleVerdict]
    checked_s: float

    @property
    def ok(self) -> bool:
        """Whether no rule is violated, everything recovered and caught up, and nothing ended by itself."""
        recovered = self.recovered_s is not None and self.caught_up_s is not None
        return recovered and not self.ended_badly and all(verdict.ok for verdict in self.verdicts)


async def run_faults(
    folder: Path, *, seconds: float, seed: int, only: str | None, command: str, say: Callable[[str], None]
) -> tuple[RunResult, RecordedHistory]:
    """Run the workload for some time under faults, then let it settle, and check its history."""
    (folder / "history").mkdir(parents=True)
    book = folder / "tidebook.toml"
    book.write_text(SETTINGS)
    port = _free_port()
    proxy = TcpProxy(("127.0.0.1", port))
    await proxy.start()
    host, proxied = proxy.address
    plan = Plan(str(folder), str(book), seed, time.monotonic_ns(), f"http://{host}:{proxied}")
    async with open_book(book, create=True) as opened:  # so that no process has to create the topic
        await opened.journal(TOPIC).create()
    create_effects(Context(plan, "setup", seed))
    plan = msgspec.structs.replace(plan, began_ns=time.monotonic_ns())
    write_plan(plan)
    crew = Crew(plan, port)
    try:
        for name in crew.names:
            crew.start(name)
        if await _recovered(crew, plan, plan.began_ns, START_S_MAX) is None:
            raise RuntimeError(f"the processes did not start within {START_S_MAX:g} s: see the logs in {folder}")
        began_ns = time.monotonic_ns()
        schedule = make_schedule(seed, seconds, crew.names, ["http"], only=only)
        say(f"{len(schedule)} faults in {seconds:g} s, seed {seed}")
        done = await _disturb(crew, proxy, schedule, began_ns, seconds)
        quiet_ns = time.monotonic_ns()
        recovered_s = await _recovered(crew, plan, quiet_ns, RECOVERY_S_MAX)
        say("not recovered" if recovered_s is None else f"all recovered {recovered_s:.1f} s after the last fault")
        await crew.stop([name for name in crew.names if name.rsplit("-", 1)[0] in SOURCES])
        await crew.inspect(CATCH_UP_S_MAX + RECOVERY_S_MAX)
        await crew.stop([name for name in crew.names if name.rsplit("-", 1)[0] not in SOURCES])
    finally:
        crew.kill_all()
        await proxy.close()
    history = pair_lines(read_lines(sorted(plan.histories.glob("*.ndjson"))))
    began = time.monotonic()
    verdicts = check_history(history)
    caught = history.of("caught_up")
    found: dict[str, Any] = caught[-1].result if caught else {"took_s": 0.0, "lacking": ["the inspector ended early"]}
    result = RunResult(
        seed, command, began_ns, done, quiet_ns, recovered_s, None if found["lacking"] else found["took_s"],
        found["lacking"], crew.ended_badly, verdicts, time.monotonic() - began,
    )  # fmt: skip
    return result, history


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


async def _disturb(
    crew: Crew, proxy: TcpProxy, schedule: list[PlannedFault], began_ns: int, seconds: float
) -> list[DoneFault]:
    """Do every fault at its time; return when all have ended and the time is over."""
    done: list[DoneFault] = []

    async def do(fault: PlannedFault) -> None:
        await asyncio.sleep(max(0.0, fault.at_s - (time.monotonic_ns() - began_ns) / 1e9))
        start_ns = time.monotonic_ns()
        if fault.is_network:
            proxy.set_mode(_mode(fault.kind))
            await asyncio.sleep(fault.duration_s)
            proxy.set_mode("pass")
        elif fault.kind == "kill":
            crew.kill(fault.target)
            await asyncio.sleep(fault.duration_s)
            crew.start(fault.target)
        else:
            crew.pause(fault.target)
            await asyncio.sleep(fault.duration_s)
            crew.resume(fault.target)
        done.append(DoneFault(fault.kind, fault.target, start_ns, time.monotonic_ns()))

    async with asyncio.TaskGroup() as group:
        for fault in schedule:
            group.create_task(do(fault))
        group.create_task(asyncio.sleep(seconds))
    crew.revive()
    return sorted(done, key=lambda fault: fault.start_ns)


def _mode(kind: str) -> Mode:
    return kind  # type: ignore[return-value]


async def _recovered(crew: Crew, plan: Plan, since_ns: int, bound_s: float) -> float | None:
    """Wait until each process that records calls has had a success since a moment; return how long it took."""
    recording = [name for name in crew.names if name.rsplit("-", 1)[0] in ("writer", "producer", "worker", "remote")]
    deadline = time.monotonic() + bound_s
    first: dict[str, int] = {}
    while len(first) < len(recording):
        if time.monotonic() > deadline:
            return None
        await asyncio.sleep(0.2)
        for name in recording:
            if name not in first:
                lines = read_lines(plan.histories.glob(f"{name}.*.ndjson"))
                moments = [line.ns for line in lines if line.type == "ok" and line.ns > since_ns]
                if moments:
                    first[name] = min(moments)
    return (max(first.values()) - since_ns) / 1e9
