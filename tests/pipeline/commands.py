"""`tidebook` as a separate process, read line by line."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
END_S = 90


class Command:
    """A running command; its lines are JSON."""

    def __init__(self, *arguments: str, code: str = "from tidebook.cli.app import main; main()", **env: str) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYSPARK_GATEWAY")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            cwd=ROOT,
            env={**environment, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
        )

    def until(self, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Return the next line that satisfies a condition; the test's time limit ends a wait that fails."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            row: dict[str, Any] = json.loads(line)
            if holds(row):
                return row
        raise AssertionError(f"it ended with {self.process.wait()}: {self._errors()}")

    def end(self) -> tuple[int, list[dict[str, Any]]]:
        """Send SIGTERM; return the exit code and the last lines."""
        self.process.terminate()
        out, _ = self.process.communicate(timeout=END_S)
        return self.process.returncode, [json.loads(line) for line in out.splitlines()]

    def interrupt(self) -> tuple[int, str]:
        """Press Ctrl-C, which reaches all processes of the command; return its exit code and errors."""
        os.killpg(self.process.pid, signal.SIGINT)
        _, err = self.process.communicate(timeout=END_S)
        return self.process.returncode, err.decode()

    def _errors(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read().decode()[-3000:]


@contextmanager
def running(*arguments: str, **more: str) -> Iterator[Command]:
    """A command that does not outlive its test."""
    command = Command(*arguments, **more)
    try:
        yield command
    finally:
        if command.process.poll() is None:
            os.killpg(command.process.pid, signal.SIGKILL)
        command.process.communicate(timeout=END_S)


class Forwarder:
    """A port that forwards to a server from `begin` on, and where nothing listens before."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._target = (host, int(port))
        self._bound = socket.socket()
        self._bound.bind(("127.0.0.1", 0))  # taken, so that no other process listens here meanwhile
        self.address = f"127.0.0.1:{self._bound.getsockname()[1]}"
        self._open: list[socket.socket] = [self._bound]

    def begin(self) -> None:
        self._bound.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for each in self._open:
            with suppress(OSError):  # its peer has left already
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client, _ = self._bound.accept()
                server = socket.create_connection(self._target)
                self._open += [client, server]
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=_copy, args=(source, sink), daemon=True).start()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):  # either side may leave at any time
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def processes_with(text: str) -> list[int]:
    """Return the processes that have this among their arguments."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if text in (folder / "cmdline").read_bytes().decode(errors="replace"):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def descendants(pid: int) -> dict[int, int]:
    """Return the descendants of a process, each with its parent."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    found: dict[int, int] = {}
    for each in parents:
        at = each
        while at in parents and at != pid:
            at = parents[at]
        if at == pid:
            found[each] = parents[each]
    return found
