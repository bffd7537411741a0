"""The base class of servers: a folder, ports, one process, and calls to start, stop, kill and pause it."""

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
# Below the range of ephemeral ports, so that a port is still free after a restart.
PORTS = range(15_000, 32_000)
READY_S_MAX = 180
STOP_S_MAX = 60
PROBE_S = 0.05
LOG_LINES_SHOWN = 30

Profile = Literal["test", "bench"]
_taken: set[int] = set()


class Server(ABC):
    """A server with its data in a folder. A second object on the same folder uses the same data and ports.

    As a context manager it starts the server, and at the end stops it and keeps the data.
    """

    name: ClassVar[str]
    port_names: ClassVar[tuple[str, ...]] = ("client",)
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM
    #: The loopback address that the server listens on.
    host: str = HOST

    def __init__(self, folder: Path, *, profile: Profile = "test") -> None:
        self.folder = folder.resolve()
        self.profile: Profile = profile
        self._process: Process | None = None
        self._log_at = 0

    @property
    def address(self) -> str:
        """Return the address for clients, as host:port."""
        return f"{self.host}:{self.ports['client']}"

    @property
    @abstractmethod
    def url(self) -> str:
        """Return the URL for Tidebook's settings."""

    @property
    def ports(self) -> dict[str, int]:
        """Return the ports of this folder's server; they are chosen once and stored in the folder."""
        file = self.folder / "ports.json"
        if not file.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps({name: free_port() for name in self.port_names}))
        ports: dict[str, int] = json.loads(file.read_text())
        return ports

    @property
    def log_file(self) -> Path:
        """Return the file that receives the server's output."""
        return self.folder / "server.log"

    @property
    def _process_file(self) -> Path:
        return self.folder / "process.json"

    @property
    def pid(self) -> int:
        """Return the id of the running process."""
        return self._running().pid

    def describe(self) -> dict[str, Any]:
        """Return the values that another process needs to use or stop this server."""
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
        """Use the process that an earlier run started in this folder; return False if none is running."""
        if self._process is None and self._process_file.exists():
            process = Process(**json.loads(self._process_file.read_text()))
            self._process = process if process.alive() else None
        return self.alive()

    def alive(self) -> bool:
        """Return True if the process exists, even if it is paused."""
        return self._process is not None and self._process.alive()

    def start(self) -> Self:
        """Start the server, and return when it is ready."""
        if self.adopt():
            raise ServerError(f"{self.name} is already running in {self.folder}, as process {self.pid}")
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
        """Stop the server gracefully; do nothing if it has ended."""
        if self._process is None:
            return
        self._process.signal_all(signal.SIGCONT)  # a paused process would not receive the stop signal
        self._process.signal(self.stop_signal)
        if not self._process.wait(STOP_S_MAX):
            self.kill9()
        self._process = None

    def kill9(self) -> None:
        """Kill the server and its children with SIGKILL; do nothing if it has ended."""
        if self._process is None:
            return
        process = self._process
        if not process.kill_all(STOP_S_MAX):
            raise ServerError(f"{self.name} did not end within {STOP_S_MAX} s after SIGKILL, as process {process.pid}")
        self._process = None

    def restart(self) -> Self:
        """Stop the server if it is running, and start it with the same data and ports."""
        self.stop()
        return self.start()

    def pause(self) -> None:
        """Freeze the server, and return when all its threads are stopped; connections stay open, but get no answers."""
        if not self._running().freeze(STOP_S_MAX):
            raise ServerError(f"{self.name} was still running {STOP_S_MAX} s after SIGSTOP, as process {self.pid}")

    def resume(self) -> None:
        """Resume a frozen server."""
        self._running().signal_all(signal.SIGCONT)

    def remove(self) -> None:
        """Stop the server and delete its data."""
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    @contextmanager
    def temporarily(self) -> Iterator[Self]:
        """Run the server for a `with` block, and then remove it with its data."""
        try:
            yield self.start()
        finally:
            self.remove()

    def wait_ready(self) -> None:
        """Wait until the server answers in its own protocol; raise `ServerError` if its process ends."""
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
        """Return the last lines of the server's output in this run."""
        if not self.log_file.exists():
            return f"(no log at {self.log_file})"
        with self.log_file.open("rb") as log:
            log.seek(self._log_at)
            lines = log.read().decode(errors="replace").splitlines()
        return "\n".join([*lines[-LOG_LINES_SHOWN:], f"(log: {self.log_file})"])

    @abstractmethod
    def prepare(self) -> None:
        """Write the configuration, and on the first start create the data folder."""

    @abstractmethod
    def command(self) -> list[str]:
        """Return the server's command line."""

    @abstractmethod
    def probe(self) -> None:
        """Return if the server is ready; raise OSError, EOFError or NotReady if it is not."""

    def after_ready(self) -> None:  # noqa: B027 - most servers need nothing here
        """Create the objects that tests expect, such as a database."""

    def identity(self) -> dict[str, int]:
        """Return the user and group to run as, if they differ from the current ones."""
        return {}

    def spawn(self) -> None:
        """Start the process in a new session, so that Ctrl-C in the terminal does not reach it."""
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
        """Run a tool of the server; raise `ServerError` with its output if it fails."""
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
            raise ServerError(f"{self.name} is not running")
        return self._process


class NotReady(Exception):
    """The server answers, but is not ready yet."""


def free_port() -> int:
    """Return a free loopback port that this process has not returned before."""
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
    """Read `count` bytes; raise EOFError if the connection ends before."""
    received = bytearray()
    while len(received) < count:
        part = connection.recv(count - len(received))
        if not part:
            raise EOFError("the server closed the connection")
        received += part
    return bytes(received)
