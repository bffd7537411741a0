"""The processes of a run: start, kill, pause and stop them."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

from faults.disk import FAIL_SIGNAL, HEAL_SIGNAL
from faults.plan import Plan
from faults.roles.play import play_role, run_command
from tidebook.testing.servers.process import Process, birth_of

#: How many processes of each role there are.
ROLES = {
    "writer": 2,
    "replicator": 2,
    "consumer": 2,
    "producer": 1,
    "relay": 2,
    "worker": 2,
    "wal": 2,
    "remote": 1,
    "decider": 2,
}
#: They bring new data; the others only pass it on, and go on until they have caught up.
SOURCES = ("writer", "producer", "wal", "remote", "decider")
SERVER = "server"
#: It replicates with Spark, if the book uses servers; embedded books have replicators.
PIPELINE = "pipeline"
INSPECTOR = "inspector"
#: Spark takes long on busy cores.
STOP_S_MAX = 60.0
#: The exit code of a command that found a server unavailable: its supervisor starts it again, as systemd does.
UNAVAILABLE = 5
ROOT = Path(__file__).resolve().parents[1]
#: A process forks from one that has imported everything and opened nothing, so that many start quickly on few cores.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["faults.roles.preload"])


class BuildProcess:
    """A process of another build: it cannot be forked from one that has imported this one."""

    def __init__(self, build: Path, arguments: list[str]) -> None:
        path = os.pathsep.join([str(build), str(ROOT)])
        self._child = subprocess.Popen(
            [sys.executable, "-m", "faults.roles", *arguments], cwd=ROOT, env={**os.environ, "PYTHONPATH": path}
        )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._child.pid

    @property
    def exitcode(self) -> int | None:
        """The exit code, or the negative number of the signal; None while it runs."""
        return self._child.poll()

    def kill(self) -> None:
        """End it with SIGKILL."""
        self._child.kill()

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, or for some time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(timeout)


class Crew:
    """The processes of a run, by name: `writer-1` is `writer-1.3` after two kills."""

    def __init__(self, plan: Plan, server_port: int) -> None:
        self._plan = plan
        self._server_port = server_port
        self._running: dict[str, BaseProcess | BuildProcess] = {}
        #: The build that processes are started from, if it is not the present one.
        self._build: Path | None = None
        self._incarnations: dict[str, int] = {}
        self.ended_badly: list[str] = []
        #: How often a command ended because a server was unavailable, and was started again.
        self.restarts: dict[str, int] = {}
        for number in (signal.SIGUSR1, signal.SIGUSR2, FAIL_SIGNAL, HEAL_SIGNAL):
            signal.signal(number, signal.SIG_IGN)  # inherited: a process may get one before it listens

    @property
    def names(self) -> list[str]:
        """The names of all processes."""
        roles = {role: count for role, count in ROLES.items() if not (self._on_servers and role == "replicator")}
        names = [SERVER, *(f"{role}-{number}" for role, count in roles.items() for number in range(1, count + 1))]
        return [*names, PIPELINE] if self._on_servers else names

    @property
    def _on_servers(self) -> bool:
        return self._plan.brokers is not None

    def start(self, name: str) -> None:
        """Start a process, once more if it ran before."""
        incarnation = self._incarnations[name] = self._incarnations.get(name, 0) + 1
        log = str(Path(self._plan.folder) / f"{name}.log")
        if name in (SERVER, PIPELINE):
            command = ["serve", "--port", str(self._server_port)] if name == SERVER else ["pipeline", "replicate"]
            self._running[name] = self._run_command([*command, "--book", self._plan.book], log)
        else:
            role, number = name.rsplit("-", 1)
            seed = hash((self._plan.seed, sum(role.encode()), int(number), incarnation)) % 2**31
            self._running[name] = self._play(role, f"{name}.{incarnation}", seed, log)

    def _run_command(self, command: list[str], log: str) -> BaseProcess | BuildProcess:
        if self._build is not None:
            return BuildProcess(self._build, [log, "tidebook", *command])
        process = _context.Process(target=run_command, args=(command, log))
        process.start()
        return process

    def _play(self, role: str, name: str, seed: int, log: str) -> BaseProcess | BuildProcess:
        folder = self._plan.folder
        if self._build is not None:
            return BuildProcess(self._build, [log, role, name, folder, str(seed)])
        process = _context.Process(target=play_role, args=(role, name, folder, seed, log))
        process.start()
        return process

    async def started(self, name: str) -> None:
        """Wait until a process has begun its history; commands have none."""
        file = self._plan.histories / f"{name}.{self._incarnations[name]}.ndjson"
        while name not in (SERVER, PIPELINE) and not file.exists():  # noqa: ASYNC110
            await asyncio.sleep(0.1)

    def use_build(self, build: Path) -> None:
        """Start processes from another build from now on."""
        self._build = build

    def kill(self, name: str) -> None:
        """End a process with SIGKILL. Spark's Java process and its Python workers live a little longer."""
        process = self._running[name]
        self._note_end(name)
        process.kill()
        process.join()

    def pause(self, name: str) -> None:
        """Stop a process, and those it has started, with SIGSTOP."""
        self._signal_family(name, signal.SIGSTOP)

    def resume(self, name: str) -> None:
        """Let a process go on."""
        self._signal_family(name, signal.SIGCONT)

    def jump(self, name: str) -> None:
        """Put the wall clock of a process forward."""
        self._signal(name, signal.SIGUSR1)

    def jump_back(self, name: str) -> None:
        """Put the wall clock of a process right again."""
        self._signal(name, signal.SIGUSR2)

    def fail_disk(self, name: str) -> None:
        """Let writes and syncs of a process's files fail."""
        self._signal(name, FAIL_SIGNAL)

    def heal_disk(self, name: str) -> None:
        """Let them succeed again."""
        self._signal(name, HEAL_SIGNAL)

    def _signal(self, name: str, number: int) -> None:
        process = self._running[name]
        if process.exitcode is None and process.pid is not None:
            os.kill(process.pid, number)

    def _signal_family(self, name: str, number: signal.Signals) -> None:
        process = self._running[name]
        if process.exitcode is None and process.pid is not None:
            Process(process.pid, birth_of(process.pid) or "").signal_all(number)

    async def watch(self) -> None:
        """Start commands again that ended because a server was unavailable, until cancelled."""
        while True:
            await asyncio.sleep(1.0)
            for name in (SERVER, PIPELINE):
                process = self._running.get(name)
                if process is not None and process.exitcode == UNAVAILABLE:
                    self.restarts[name] = self.restarts.get(name, 0) + 1
                    self.start(name)

    def _note_end(self, name: str) -> None:
        code = self._running[name].exitcode
        if code not in (None, 0) and (name not in (SERVER, PIPELINE) or code != UNAVAILABLE):
            self.ended_badly.append(f"{name}.{self._incarnations[name]} ended with {code}")

    def revive(self) -> None:
        """Start what has ended by itself, and remember that it did."""
        for name, process in self._running.items():
            if process.exitcode is not None:
                self._note_end(name)
                self.start(name)

    async def stop(self, names: list[str]) -> None:
        """Ask processes to stop, and wait for them; kill those that do not."""
        for name in names:
            self._signal_family(name, signal.SIGCONT)
            self._signal(name, signal.SIGTERM)
        deadline = time.monotonic() + STOP_S_MAX
        for name in names:
            process = self._running[name]
            await asyncio.to_thread(process.join, max(0.0, deadline - time.monotonic()))
            if process.exitcode is None:
                self.ended_badly.append(f"{name} did not stop within {STOP_S_MAX:g} s")
                process.kill()
                process.join()
            # One that has only just started may be asked before it listens.
            elif process.exitcode not in (0, -signal.SIGTERM):
                self.ended_badly.append(f"{name}.{self._incarnations[name]} ended with {process.exitcode}")

    async def inspect(self, timeout_s: float) -> None:
        """Run the inspector to its end, or kill it after this time."""
        name = f"{INSPECTOR}-1"
        self.start(name)
        process = self._running.pop(name)
        await asyncio.to_thread(process.join, timeout_s)
        if process.exitcode is None:
            process.kill()
        if process.exitcode != 0:
            self.ended_badly.append(f"{name} ended with {process.exitcode}")

    def kill_all(self) -> None:
        """End everything that still runs."""
        for name, process in self._running.items():
            if process.exitcode is None:
                self._signal_family(name, signal.SIGKILL)
                process.join()
