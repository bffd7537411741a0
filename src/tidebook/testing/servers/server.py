"""What every server has in common: a folder, ports, one process, and the ways to end, freeze and revive it."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal, Self

from tidebook.testing.servers.errors import ServerError
from tidebook.testing.servers.process import Process

HOST = "127.0.0.1"
# Below the range that systems give to outgoing connections, so that a port is still free at a restart.
PORTS = range(15_000, 32_000)
READY_S_MAX = 180
STOP_S_MAX = 60
PROBE_S = 0.05
LOG_LINES_SHOWN = 30

Profile = Literal["test", "bench"]
_taken: set[int] = set()


class Server(ABC):
    """A server over a folder. A second object over the same folder finds the same data and ports.

    Used as a context manager it starts, and at the end stops and leaves the data behind.
    """

    name: ClassVar[str]
    port_names: ClassVar[tuple[str, ...]] = ("client",)
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM

    def __init__(self, folder: Path, *, profile: Profile = "test") -> None:
        self.folder = folder.resolve()
        self.profile: Profile = profile
        self._process: Process | None = None
        self._log_at = 0

    @property
    def address(self) -> str:
        """Where clients connect, as host:port."""
        return f"{HOST}:{self.ports['client']}"

    @property
    @abstractmethod
    def url(self) -> str:
        """The address as Tidebook's settings take it."""

    @property
    def ports(self) -> dict[str, int]:
        """The ports of this folder's server: chosen once, then kept."""
        file = self.folder / "ports.json"
        if not file.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps({name: free_port() for name in self.port_names}))
        ports: dict[str, int] = json.loads(file.read_text())
        return ports

    @property
    def log_file(self) -> Path:
        """Where the server's own output goes."""
        return self.folder / "server.log"

    @property
    def _process_file(self) -> Path:
        return self.folder / "process.json"

    @property
    def pid(self) -> int:
        """The number of the running process."""
        return self._running().pid

    def describe(self) -> dict[str, Any]:
        """What another process needs to use or stop this server."""
        process = self._running()
        return {
            "address": self.address,
            "url": self.url,
            "pid": process.pid,
            "birth": process.birth,
            "folder": str(self.folder),
            "log": str(self.log_file),
        }

    def adopt(self) -> bool:
        """Take over the process that an earlier run started in this folder; False if there is none, or no longer."""
        if self._process is None and self._process_file.exists():
            process = Process(**json.loads(self._process_file.read_text()))
            self._process = process if process.alive() else None
        return self.alive()

    def alive(self) -> bool:
        """Whether the process runs (a paused one does)."""
        return self._process is not None and self._process.alive()

    def start(self) -> Self:
        """Start the server and return when it answers."""
        if self.adopt():
            raise ServerError(f"{self.name} runs already in {self.folder}, as process {self.pid}")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.prepare()
        self.spawn()
        try:
            self.wait_ready()
            self.after_ready()
        except BaseException:
            self.kill9()
            raise
        return self

    def stop(self) -> None:
        """End the server as its operators would; it may flush. Harmless if it has ended."""
        if self._process is None:
            return
        self._process.signal_all(signal.SIGCONT)  # a paused process would never see the request
        self._process.signal(self.stop_signal)
        if not self._process.wait(STOP_S_MAX):
            self.kill9()
        self._process = None

    def kill9(self) -> None:
        """End the server and its children at once, with no chance to flush or say goodbye. Harmless if it has ended."""
        if self._process is None:
            return
        process = self._process
        process.signal_all(signal.SIGKILL)
        if not process.wait(STOP_S_MAX):
            raise ServerError(f"{self.name} outlived SIGKILL for {STOP_S_MAX} s, as process {process.pid}")
        self._process = None

    def restart(self) -> Self:
        """Start again with the same data and ports; a server that still runs is stopped first."""
        self.stop()
        return self.start()

    def pause(self) -> None:
        """Freeze the server, and return when none of its threads runs: connections stay open, nothing answers."""
        if not self._running().freeze(STOP_S_MAX):
            raise ServerError(f"{self.name} still ran {STOP_S_MAX} s after SIGSTOP, as process {self.pid}")

    def resume(self) -> None:
        """Let a frozen server go on."""
        self._running().signal_all(signal.SIGCONT)

    def remove(self) -> None:
        """Stop the server and delete all it kept."""
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    @contextmanager
    def for_now(self) -> Iterator[Self]:
        """It runs for a `with` block, and nothing of it is left behind that."""
        try:
            yield self.start()
        finally:
            self.remove()

    def wait_ready(self) -> None:
        """Wait until the server answers in its own protocol; fail at once if its process ends."""
        deadline = time.monotonic() + READY_S_MAX
        problem: Exception | None = None
        while time.monotonic() < deadline:
            if not self.alive():
                raise ServerError(f"{self.name} ended while starting:\n{self.log_tail()}")
            try:
                self.probe()
                return
            except (OSError, EOFError, NotReady) as error:
                problem = error
                time.sleep(PROBE_S)
        raise ServerError(f"{self.name} was not ready after {READY_S_MAX} s ({problem}):\n{self.log_tail()}")

    def log_tail(self) -> str:
        """The last lines that the server wrote in this run."""
        if not self.log_file.exists():
            return f"(no log at {self.log_file})"
        with self.log_file.open("rb") as log:
            log.seek(self._log_at)
            lines = log.read().decode(errors="replace").splitlines()
        return "\n".join([*lines[-LOG_LINES_SHOWN:], f"(log: {self.log_file})"])

    @abstractmethod
    def prepare(self) -> None:
        """Write the configuration, and on the first start make the data folder."""

    @abstractmethod
    def command(self) -> list[str]:
        """The server's command line."""

    @abstractmethod
    def probe(self) -> None:
        """Return if the server serves; raise OSError, EOFError or NotReady if it does not yet."""

    def after_ready(self) -> None:  # noqa: B027 - most servers need nothing here
        """Make what tests take for granted, such as a database."""

    def identity(self) -> dict[str, int]:
        """The user and group to run as, where it is not our own."""
        return {}

    def spawn(self) -> None:
        """Start the process, in a session of its own: an interrupt at the terminal does not reach it."""
        self._log_at = self.log_file.stat().st_size if self.log_file.exists() else 0
        with self.log_file.open("ab") as log:
            child = subprocess.Popen(
                self.command(),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                **self.identity(),  # type: ignore[call-overload]
            )
        self._process = Process.of(child)
        self._process_file.write_text(json.dumps({"pid": self._process.pid, "birth": self._process.birth}))

    def run_tool(self, command: list[str], **options: Any) -> None:
        """Run a tool of the server to its end; its failure is a ServerError with all that it wrote."""
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, **options
        )
        if done.returncode != 0:
            raise ServerError(f"{self.name}: {os.path.basename(command[0])} failed:\n{done.stdout}")

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.stop()

    def _running(self) -> Process:
        if self._process is None:
            raise ServerError(f"{self.name} does not run")
        return self._process


class NotReady(Exception):
    """The server answers, but not yet as it should."""


def free_port() -> int:
    """A loopback port that nothing listens on, given once a process."""
    while True:
        port = random.choice(PORTS)
        if port in _taken:
            continue
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
        _taken.add(port)
        return port


def exactly(connection: socket.socket, count: int) -> bytes:
    """Read so many bytes, or raise EOFError."""
    received = bytearray()
    while len(received) < count:
        part = connection.recv(count - len(received))
        if not part:
            raise EOFError("the server closed the connection")
        received += part
    return bytes(received)
