"""One run: the workload under a schedule of faults, the wait until everything has recovered, and the checker."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from confluent_kafka import KafkaException

from faults.crew import INSPECTOR, PIPELINE, SERVER, SOURCES, Crew
from faults.disk import SmallDisk
from faults.plan import ACCOUNTS, LEASE_S, SERVER_LEASE_S, TOPIC, Plan, write_plan
from faults.proxy import Mode, TcpProxy
from faults.roles.context import Context
from faults.roles.inspector import catch_up_s_max
from faults.roles.streams import create_effects
from faults.schedule import (
    DEAF,
    DISK_FULL,
    FOREIGN,
    MORE_PARTITIONS,
    MUTE,
    ONE_DOWN,
    PARTITIONS,
    ROLLING,
    UPGRADE,
    PlannedFault,
    Targets,
    make_schedule,
)
from faults.servers import RunServers
from faults.topics import add_partition, send_foreign
from faults.upgrade import make_next_build
from tidebook.core.errors import Unavailable
from tidebook.testing.histories.call import RecordedHistory, pair_lines
from tidebook.testing.histories.checker import check_history
from tidebook.testing.histories.line import read_lines
from tidebook.testing.histories.verdict import RuleVerdict
from tidebook.wiring.book import open as open_book

#: Within this time after the last fault, every operation of `awaited_successes` must succeed.
RECOVERY_S_MAX = 30.0
#: The same bound with servers: Spark, Kafka and Cassandra take many seconds to start, more on busy cores.
SERVER_RECOVERY_S_MAX = 120.0
START_S_MAX = 120.0
SERVER_START_S_MAX = 480.0
#: The operations that must succeed again in every process of a role. The other roles record no calls, or only
#: consume what these have written: they have recovered when everything has caught up.
RECOVERING = {
    "writer": ("append", "read"),
    "remote": ("append", "read"),
    "producer": ("transaction", "put"),
    "worker": ("claim", "finish"),
    "wal": ("wal_replay",),
    "decider": ("execute",),
}
#: An owner of a write-ahead log may lose it before it has written, so that one write by any of them is enough.
ANY_OWNER = ("wal", "wal_write")
#: A rolling upgrade waits this long for one process before it stops the next.
UPGRADED_S_MAX = 60.0
HTTP = "http"
SETTINGS = f"""folder = "data"
[journal]
partitions = 2
[outbox]
lock_limit_s = {2 * LEASE_S}
rest_s = 0.2
poll_s = 0.2
"""


class DoneFault(msgspec.Struct, frozen=True):
    """A fault that was injected, with times of the monotonic clock."""

    kind: str
    target: str
    start_ns: int
    end_ns: int
    #: When servers that were down were restarted; they are ready at `end_ns`.
    down_ns: int | None = None


class RunResult(msgspec.Struct):
    """The result of a run, with everything that a report needs."""

    seed: int
    command: str
    began_ns: int
    faults: list[DoneFault] = []
    quiet_ns: int = 0
    #: How long after the last fault every awaited operation had succeeded; None if one did not within the bound.
    recovered_s: float | None = None
    #: How long the consumers took to catch up after the last write.
    caught_up_s: float | None = None
    #: The operations that did not succeed again within the bound, and their processes.
    unrecovered: list[str] = []
    lacking: list[str] = []
    ended_badly: list[str] = []
    #: Why the run ended before its time; None if it did not.
    ended_early: str | None = None
    verdicts: list[RuleVerdict] = []
    checked_s: float = 0.0
    #: The bound of `recovered_s`.
    recovery_s_max: float = RECOVERY_S_MAX
    #: The restarts of commands that found a server unavailable, and of servers that ended while they started.
    restarts: dict[str, int] = {}

    @property
    def ok(self) -> bool:
        """Whether every rule was checked and holds, everything recovered and caught up, and nothing ended badly."""
        recovered = self.recovered_s is not None and self.caught_up_s is not None
        ended = not self.ended_badly and self.ended_early is None
        return recovered and ended and all(verdict.ok and verdict.checked for verdict in self.verdicts)


async def run_faults(
    folder: Path,
    *,
    seconds: float,
    seed: int,
    only: str | None,
    command: str,
    say: Callable[[str], None],
    servers: RunServers | None = None,
) -> RunResult:
    """Run the workload under faults, then wait until everything has recovered; `check_run` checks its history.

    A run that is cancelled or fails after its processes were started returns its result so far, with the reason.
    """
    (folder / "history").mkdir(parents=True)
    disk = SmallDisk.mount(folder / "data") if servers is None else None
    book = folder / "tidebook.toml"
    port = _free_port()
    proxies = {HTTP: TcpProxy(("127.0.0.1", port))}
    await proxies[HTTP].start()
    host, proxied = proxies[HTTP].address
    plan = Plan(str(folder), str(book), seed, time.monotonic_ns(), f"http://{host}:{proxied}")
    recovery_s_max, start_s_max = RECOVERY_S_MAX, START_S_MAX
    if servers is None:
        book.write_text(SETTINGS)
    else:
        recovery_s_max, start_s_max = SERVER_RECOVERY_S_MAX, SERVER_START_S_MAX
        proxies |= servers.proxies
        book.write_text(servers.settings(lock_limit_s=2 * SERVER_LEASE_S))
        plan = msgspec.structs.replace(plan, lease_s=SERVER_LEASE_S, sql_url=servers.sql_url, brokers=servers.brokers)
    async with open_book(book, create=True) as opened:  # so that no process has to create the topic
        for topic in (TOPIC, ACCOUNTS):
            await opened.journal(topic).create()
        if servers is not None:
            await opened.outbox.create_tables()
    await asyncio.to_thread(create_effects, Context(plan, "setup", seed))
    plan = msgspec.structs.replace(plan, began_ns=time.monotonic_ns())
    write_plan(plan)
    crew = Crew(plan, port, say)
    result = RunResult(
        seed,
        command,
        plan.began_ns,
        ended_badly=crew.ended_badly,
        recovery_s_max=recovery_s_max,
        restarts=crew.restarts,
    )
    watch = asyncio.create_task(crew.watch())
    try:
        for name in crew.names:
            crew.start(name)
        _, missing = await _recovered(crew, plan, plan.began_ns, start_s_max)
        if missing:
            raise RuntimeError(f"no {', '.join(missing)} within {start_s_max:g} s: see the logs in {folder}")
        if servers is not None:
            async with asyncio.timeout(start_s_max):
                await _replicated_some(book)
        say(f"all processes work {(time.monotonic_ns() - plan.began_ns) / 1e9:.1f} s after their start")
        result.began_ns = time.monotonic_ns()
        targets = Targets(
            crew.names,
            [*proxies],
            {} if servers is None else servers.kinds,
            plan.lease_s,
            [SERVER, PIPELINE],
            [] if servers is None else servers.partitionable,
            disk is not None,
        )
        schedule = make_schedule(seed, seconds, targets, only=only)
        say(f"{len(schedule)} faults in {seconds:g} s, seed {seed}")
        injector = FaultInjector(plan, crew, proxies, servers, disk, result.began_ns, say)
        result.faults = injector.done
        await injector.disturb(schedule, seconds)
        plan.be_quiet()
        result.quiet_ns = time.monotonic_ns()
        took_s, result.unrecovered = await _recovered(crew, plan, result.quiet_ns, recovery_s_max)
        result.recovered_s = None if result.unrecovered else took_s
        say(
            f"NOT RECOVERED within {recovery_s_max:g} s after the last fault: see the logs in {folder}"
            if result.unrecovered
            else f"all recovered {took_s:.1f} s after the last fault"
        )
        await crew.stop([name for name in crew.names if name.rsplit("-", 1)[0] in SOURCES])
        # The inspector of a long run takes longer, because it records more data.
        await crew.inspect(catch_up_s_max(plan) + 2 * recovery_s_max + seconds / 4)
        watch.cancel()
        await crew.stop([name for name in crew.names if name.rsplit("-", 1)[0] not in SOURCES])
    except asyncio.CancelledError:
        result.ended_early = "interrupted"
    except Exception as error:  # the history so far is worth a check, whatever has ended the run
        traceback.print_exc()
        result.ended_early = f"{type(error).__name__}: {error}"
    finally:
        watch.cancel()
        crew.kill_all()
        await proxies[HTTP].close()
    result.quiet_ns = result.quiet_ns or time.monotonic_ns()
    result.faults.sort(key=lambda fault: fault.start_ns)
    if servers is not None:
        result.restarts |= servers.failed_starts
    return result


def check_run(result: RunResult, folder: Path) -> RecordedHistory:
    """Check the history of a run, and complete its result; the servers are no longer needed."""
    began = time.monotonic()
    history = pair_lines(read_lines(sorted((folder / "history").glob("*.ndjson"))))
    result.verdicts = check_history(history)
    caught = history.of("caught_up")
    found: dict[str, Any] = caught[-1].result if caught else {"took_s": 0.0, "lacking": ["the inspector ended early"]}
    result.lacking = found["lacking"]
    result.caught_up_s = None if found["lacking"] else found["took_s"]
    result.checked_s = time.monotonic() - began
    return history


async def _replicated_some(book: Path) -> None:
    """Wait until Spark replicates: it starts last, and faults should hit it at work, not only at its start."""
    async with open_book(book) as opened:
        while True:
            with contextlib.suppress(Unavailable):  # on a busy machine, a node may not answer in time
                if await opened.store.pointer(TOPIC, 0) is not None:
                    return
            await asyncio.sleep(1.0)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


class FaultInjector:
    """Injects the faults of a schedule, each at its time."""

    def __init__(
        self,
        plan: Plan,
        crew: Crew,
        proxies: Mapping[str, TcpProxy],
        servers: RunServers | None,
        disk: SmallDisk | None,
        began_ns: int,
        say: Callable[[str], None],
    ) -> None:
        self._plan, self._crew, self._proxies, self._servers, self._disk = plan, crew, proxies, servers, disk
        self._began_ns = began_ns
        self._say = say
        #: Targets of current faults; a server may take longer to start than the schedule assumes.
        self._busy: set[str] = set()
        self.done: list[DoneFault] = []

    async def disturb(self, schedule: Sequence[PlannedFault], seconds: float) -> None:
        """Inject every fault at its time; return when all faults have ended and the duration of the run has passed."""
        async with asyncio.TaskGroup() as group:
            for fault in schedule:
                group.create_task(self._do(fault))
            group.create_task(asyncio.sleep(seconds))
        self._crew.revive()

    async def _do(self, fault: PlannedFault) -> None:
        await asyncio.sleep(max(0.0, fault.at_s - (time.monotonic_ns() - self._began_ns) / 1e9))
        held = self._held(fault)
        if self._busy & held:
            return
        self._busy |= held
        start_ns = time.monotonic_ns()
        try:
            down_ns = await self._do_it(fault)
        except Exception as error:  # for example a server that does not start: the run continues, and has failed
            traceback.print_exc()
            down_ns = None
            self._crew.report_bad_end(f"{fault.kind} {fault.target}: {type(error).__name__}: {error}")
        self._busy -= held
        self.done.append(DoneFault(fault.kind, fault.target, start_ns, time.monotonic_ns(), down_ns))
        from_s, to_s = ((ns - self._began_ns) / 1e9 for ns in (start_ns, time.monotonic_ns()))
        self._say(f"  {from_s:6.1f} to {to_s:6.1f} s: {fault.kind} {fault.target}")

    async def _do_it(self, fault: PlannedFault) -> int | None:
        """Inject a fault, wait and end it; return the time at which servers that were down were restarted, or None."""
        if fault.is_network:
            proxy = self._proxies[fault.target]
            proxy.set_mode(_mode(fault.kind))
            await asyncio.sleep(fault.duration_s)
            proxy.set_mode("pass")
        elif self._servers is not None and (
            fault.target in self._servers.nodes
            or fault.kind in (ROLLING, ONE_DOWN, FOREIGN, MORE_PARTITIONS, *PARTITIONS)
        ):
            return await self._do_to_servers(self._servers, fault)
        elif fault.kind == UPGRADE:
            await self._upgrade()
        elif fault.kind == DISK_FULL:
            assert self._disk is not None
            self._disk.fill()
            await asyncio.sleep(fault.duration_s)
            self._disk.make_room()
        else:
            await self._do_to_process(fault)
        return None

    async def _upgrade(self) -> None:
        """Replace every process by one of the next build, in the order of the documentation."""
        build = await asyncio.to_thread(make_next_build, Path(self._plan.folder) / "next-build")
        first = [name for name in (PIPELINE, SERVER) if name in self._crew.names]
        first += [name for name in self._crew.names if name.startswith(("replicator", "relay"))]
        for name in [*first, *(name for name in self._crew.names if name not in first)]:
            while name in self._busy:  # noqa: ASYNC110 - another fault is being done to it
                await asyncio.sleep(0.1)
            self._busy.add(name)
            self._crew.use_build(build, name)
            await self._crew.stop([name])
            self._crew.start(name)
            self._busy.remove(name)
            with contextlib.suppress(TimeoutError):  # the end of the run reports what did not recover
                async with asyncio.timeout(UPGRADED_S_MAX):
                    await self._crew.started(name)
        self._crew.use_build(build, f"{INSPECTOR}-1")

    def _held(self, fault: PlannedFault) -> set[str]:
        kinds = {} if self._servers is None else self._servers.kinds
        if fault.kind == ONE_DOWN:
            return {*kinds}
        return {next((kind for kind, names in kinds.items() if fault.target in names), fault.target)}

    async def _do_to_process(self, fault: PlannedFault) -> None:
        begin, end = {
            "kill": (self._crew.kill, self._crew.start),
            "pause": (self._crew.pause, self._crew.resume),
            "clock": (self._crew.jump, self._crew.jump_back),
            "disk_error": (self._crew.fail_disk, self._crew.heal_disk),
        }[fault.kind]
        begin(fault.target)
        await asyncio.sleep(fault.duration_s)
        end(fault.target)

    async def _do_to_servers(self, servers: RunServers, fault: PlannedFault) -> int | None:
        """Inject a fault; return the time at which servers that were down were restarted, or None."""
        brokers, chance = servers.brokers, random.Random(f"{self._plan.seed} {fault.at_s}")
        match fault.kind:
            case "kill":
                await servers.kill(fault.target)
                await asyncio.sleep(fault.duration_s)
                return await self._restart(servers, fault.target)
            case "pause":
                await servers.pause(fault.target)
                await asyncio.sleep(fault.duration_s)
                await servers.resume(fault.target)
            case _ if fault.kind == ROLLING:
                for name in servers.kinds[fault.target]:
                    await servers.restart(name)
            case _ if fault.kind in PARTITIONS:
                name = chance.choice(servers.kinds[fault.target])
                servers.cut_off(name, sends=fault.kind == DEAF, receives=fault.kind == MUTE)
                await asyncio.sleep(fault.duration_s)
                servers.heal(fault.target)
            case _ if fault.kind == ONE_DOWN:
                down = [chance.choice(servers.kinds[kind]) for kind in ("kafka", "cassandra")]
                for name in down:
                    await servers.kill(name)
                await asyncio.sleep(fault.duration_s)
                return await self._restart(servers, *down)
            case _ if fault.kind == FOREIGN:
                await asyncio.to_thread(send_foreign, brokers, chance, self._plan.key(chance.random()))
            case _ if fault.kind == MORE_PARTITIONS:
                with contextlib.suppress(KafkaException):  # the broker is down: skip this fault
                    await asyncio.to_thread(add_partition, brokers)
            case _:
                raise ValueError(f"{fault.kind} is not a fault of servers")
        return None

    async def _restart(self, servers: RunServers, *names: str) -> int:
        down_ns = time.monotonic_ns()
        results = await asyncio.gather(*map(servers.restart, names), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return down_ns


def _mode(kind: str) -> Mode:
    return kind  # type: ignore[return-value]


async def _recovered(crew: Crew, plan: Plan, since_ns: int, bound_s: float) -> tuple[float, list[str]]:
    """Wait until each operation of `awaited_successes` has succeeded after `since_ns`.

    Return how long that took, and the operations without a success within the bound.
    """
    awaited = awaited_successes(crew.names)
    deadline = time.monotonic() + bound_s
    sizes = {file: file.stat().st_size for file in plan.histories.iterdir()}  # earlier lines are not read again
    while True:
        # This runs in a thread, so that the proxies of this process continue.
        first = await asyncio.to_thread(first_successes_ns, plan, since_ns, sizes)
        missing = awaited - first.keys()
        if not missing or time.monotonic() > deadline:
            took_s = (max((first[each] for each in awaited & first.keys()), default=since_ns) - since_ns) / 1e9
            return took_s, [f"{op} of {name}" for name, op in sorted(missing)]
        await asyncio.sleep(0.2)


def awaited_successes(names: Sequence[str]) -> set[tuple[str, str]]:
    """Return the operations that must succeed again, each with its process, or with its role if any process will do."""
    return {(name, op) for name in names for op in RECOVERING.get(name.rsplit("-", 1)[0], ())} | {ANY_OWNER}


def first_successes_ns(plan: Plan, since_ns: int, sizes: Mapping[Path, int]) -> dict[tuple[str, str], int]:
    """Return when each operation first succeeded after a moment, by process and by role."""
    found: dict[tuple[str, str], int] = {}
    for line in read_lines(plan.histories.iterdir(), after=sizes):
        if line.type == "ok" and line.ns > since_ns:
            name = line.process.rsplit(".", 1)[0]
            for who in (name, name.rsplit("-", 1)[0]):
                found[who, line.op] = min(line.ns, found.get((who, line.op), line.ns))
    return found
