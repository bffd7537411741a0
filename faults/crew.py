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
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

from faults.disk import FAIL_SIGNAL, HEAL_SIGNAL
from faults.plan import CONSUMERS, Plan
from faults.roles.play import play_role, run_command
from tidebook.testing.servers.process import Process, birth_of

#: The number of processes of each role.
ROLES = {
    "writer": 2,
    "replicator": 2,
    "consumer": CONSUMERS,
    "producer": 1,
    "relay": 2,
    "worker": 2,
    "wal": 2,
    "remote": 1,
    "decider": 2,
}
#: The roles that create new data; the others only pass it on, and run until they have caught up.
SOURCES = ("writer", "producer", "wal", "remote", "decider")
SERVER = "server"
#: The command that replicates with Spark if the book uses servers; embedded books have replicators.
PIPELINE = "pipeline"
INSPECTOR = "inspector"
#: How long a process may take to stop: Spark takes long on busy cores.
STOP_S_MAX = 60.0
#: How long a process may take to end after SIGKILL.
KILL_S_MAX = 10.0
#: The exit code of a command if a server is unavailable; its supervisor then restarts it, as systemd does.
UNAVAILABLE = 5
ROOT = Path(__file__).resolve().parents[1]
#: Processes are forked from one that has imported all modules and opened nothing, so that they start quickly.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["faults.roles.preload"])


class BuildProcess:
    """A process that runs another build; it cannot be forked from a process that has imported the current one."""

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
        """End the process with SIGKILL."""
        self._child.kill()

    def join(self, timeout: float | None = None) -> None:
        """Wait until the process ends, or until the timeout."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(timeout)


class Crew:
    """The processes of a run, by name. After two restarts, process `writer-1` writes the history `writer-1.3`."""

    def __init__(self, plan: Plan, server_port: int, say: Callable[[str], None]) -> None:
        self._plan = plan
        self._server_port = server_port
        self._running: dict[str, BaseProcess | BuildProcess] = {}
        #: The same processes, found by pid: `multiprocessing` reports all as ended once their fork server was killed.
        self._by_pid: dict[str, Process] = {}
        self._say = say
        #: The builds of processes that are started from another build than the current one, by process name.
        self._builds: dict[str, Path] = {}
        #: The processes that were killed or stopped on purpose, and are not yet started again.
        self._down: set[str] = set()
        self._incarnations: dict[str, int] = {}
        self.ended_badly: list[str] = []
        #: The number of restarts of each command after it ended because a server was unavailable.
        self.restarts: dict[str, int] = {}
        for number in (signal.SIGUSR1, signal.SIGUSR2, FAIL_SIGNAL, HEAL_SIGNAL):
            # Inherited by the processes, which may get a signal before they have a handler.
            signal.signal(number, signal.SIG_IGN)

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
        """Start a process, or restart it if it ran before."""
        self._down.discard(name)
        incarnation = self._incarnations[name] = self._incarnations.get(name, 0) + 1
        log = str(Path(self._plan.folder) / f"{name}.log")
        if name in (SERVER, PIPELINE):
            command = ["serve", "--port", str(self._server_port)] if name == SERVER else ["pipeline", "replicate"]
            process = self._run_command(name, [*command, "--book", self._plan.book], log)
        else:
            role, number = name.rsplit("-", 1)
            seed = hash((self._plan.seed, sum(role.encode()), int(number), incarnation)) % 2**31
            process = self._play(role, f"{name}.{incarnation}", seed, log)
        assert process.pid is not None
        self._running[name] = process
        self._by_pid[name] = Process(process.pid, birth_of(process.pid) or "")

    def _run_command(self, name: str, command: list[str], log: str) -> BaseProcess | BuildProcess:
        if name in self._builds:
            return BuildProcess(self._builds[name], [log, "tidebook", *command])
        process = _context.Process(target=run_command, args=(command, log))
        process.start()
        return process

    def _play(self, role: str, name: str, seed: int, log: str) -> BaseProcess | BuildProcess:
        folder = self._plan.folder
        build = self._builds.get(name.split(".")[0])
        if build is not None:
            return BuildProcess(build, [log, role, name, folder, str(seed)])
        process = _context.Process(target=play_role, args=(role, name, folder, seed, log))
        process.start()
        return process

    async def started(self, name: str) -> None:
        """Wait until a process has begun its history; do not wait for commands, which have none."""
        file = self._plan.histories / f"{name}.{self._incarnations[name]}.ndjson"
        while name not in (SERVER, PIPELINE) and not file.exists():  # noqa: ASYNC110
            await asyncio.sleep(0.1)

    def use_build(self, build: Path, name: str) -> None:
        """Start a process from another build from now on."""
        self._builds[name] = build

    def kill(self, name: str) -> None:
        """End a process with SIGKILL. Spark's Java process and its Python workers end a little later."""
        process = self._running[name]
        self._note_end(name)
        self._down.add(name)
        process.kill()
        process.join()

    def pause(self, name: str) -> None:
        """Stop a process and its descendants with SIGSTOP."""
        self._signal_family(name, signal.SIGSTOP)

    def resume(self, name: str) -> None:
        """Let a process continue."""
        self._signal_family(name, signal.SIGCONT)

    def jump(self, name: str) -> None:
        """Set the wall clock of a process forward."""
        self._signal(name, signal.SIGUSR1)

    def jump_back(self, name: str) -> None:
        """Reset the wall clock of a process."""
        self._signal(name, signal.SIGUSR2)

    def fail_disk(self, name: str) -> None:
        """Make writes and syncs of a process's files fail."""
        self._signal(name, FAIL_SIGNAL)

    def heal_disk(self, name: str) -> None:
        """Make writes and syncs of a process's files succeed again."""
        self._signal(name, HEAL_SIGNAL)

    def _signal(self, name: str, number: int) -> None:
        process = self._running[name]
        if process.exitcode is None and process.pid is not None:
            os.kill(process.pid, number)

    def _signal_family(self, name: str, number: signal.Signals) -> None:
        self._by_pid[name].signal_all(number)

    async def watch(self) -> None:
        """Restart the processes that end by themselves, until cancelled."""
        while True:
            await asyncio.sleep(1.0)
            self.revive()

    def report_bad_end(self, text: str) -> None:
        """Report an unexpected end, which makes the run fail."""
        self.ended_badly.append(text)
        self._say(f"  ENDED UNEXPECTEDLY: {text}")

    def _note_end(self, name: str) -> None:
        """Count a command that ended because a server was unavailable; report any other process that has ended."""
        code = self._running[name].exitcode
        if name in (SERVER, PIPELINE) and code == UNAVAILABLE:
            self.restarts[name] = self.restarts.get(name, 0) + 1
        elif code is not None:  # even 0: a role ends only when it is stopped
            self.report_bad_end(f"{name}.{self._incarnations[name]} ended with {code}")

    def revive(self) -> None:
        """Record and restart the processes that have ended unexpectedly."""
        for name, process in [*self._running.items()]:
            if process.exitcode is not None and name not in self._down:
                self._note_end(name)
                self.start(name)

    async def stop(self, names: list[str]) -> None:
        """Ask processes to stop, wait for them, and kill those that do not stop."""
        self._down |= {*names}
        ended = [name for name in names if self._running[name].exitcode is not None]
        for name in names:
            self._note_end(name)
            self._signal_family(name, signal.SIGCONT)
            self._signal(name, signal.SIGTERM)
        deadline = time.monotonic() + STOP_S_MAX
        for name in names:
            process = self._running[name]
            if name in ended:
                continue
            await asyncio.to_thread(process.join, max(0.0, deadline - time.monotonic()))
            if process.exitcode is None:
                self.report_bad_end(f"{name} did not stop within {STOP_S_MAX:g} s")
                process.kill()
                process.join()
            # A process that has just started may get the signal before it has a handler.
            elif process.exitcode not in (0, -signal.SIGTERM):
                self.report_bad_end(f"{name}.{self._incarnations[name]} ended with {process.exitcode}")

    async def inspect(self, timeout_s: float) -> None:
        """Run the inspector to its end, or kill it after this time."""
        name = f"{INSPECTOR}-1"
        self.start(name)
        self._down.add(name)  # it ends by itself, and is not restarted
        process = self._running[name]
        await asyncio.to_thread(process.join, timeout_s)
        if process.exitcode is None:
            process.kill()
        if process.exitcode != 0:
            self.report_bad_end(f"{name} ended with {process.exitcode}")

    def kill_all(self) -> None:
        """Kill all processes that still run, and their descendants."""
        for name, process in self._by_pid.items():
            if process.kill_all(KILL_S_MAX):
                self._running[name].join()
            else:
                self.report_bad_end(f"{name} did not end within {KILL_S_MAX:g} s after SIGKILL")
