"""A server's process, which is identified by its pid and start time, and its free port."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tidebook.testing.servers.ivy import Artifact
from tidebook.testing.servers.process import Process, _descendants, birth_of
from tidebook.testing.servers.server import HOST, PORTS, free_port

READY = "print('ready', flush=True); import time; time.sleep(600)"
PARENT = f"import subprocess, sys; c = subprocess.Popen([sys.executable, '-c', {READY!r}]); c.wait()"


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[bytes]]:
    """Start a process with a child, and wait until the child reports that it is running."""
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process
        Process.of(process).signal_all(signal.SIGKILL)


def test_a_process_with_another_start_time_is_not_ours(parent: subprocess.Popen[bytes]) -> None:
    birth = birth_of(parent.pid)
    assert birth is not None
    assert Process(parent.pid, birth).alive()
    assert not Process(parent.pid, birth + "0").alive()


def test_a_process_with_another_start_time_gets_no_signal(parent: subprocess.Popen[bytes]) -> None:
    stranger = Process(parent.pid, "0")
    stranger.signal(signal.SIGKILL)
    stranger.signal_all(signal.SIGKILL)
    assert parent.poll() is None


def test_killing_ends_the_children_too(parent: subprocess.Popen[bytes]) -> None:
    process = Process.of(parent)
    process.signal_all(signal.SIGKILL)
    assert process.wait(10)
    assert parent.stdout is not None
    assert parent.stdout.read() == b""  # end of file: no process has the pipe open


def test_a_kill_ends_when_a_child_that_ends_late_has_ended(
    parent: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    kill, [child] = os.kill, _descendants(parent.pid)

    def kill_late(pid: int, number: int) -> None:
        if pid == child:
            threading.Timer(0.2, kill, (pid, number)).start()
        else:
            kill(pid, number)

    monkeypatch.setattr(os, "kill", kill_late)
    assert Process.of(parent).kill_all(10)
    assert birth_of(child) is None


def states(pid: int) -> set[str]:
    """Return the states of all threads of a process and its children."""
    tasks = [task for each in (pid, *_descendants(pid)) for task in Path(f"/proc/{each}/task").iterdir()]
    return {(task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks}


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="only Linux shows the state of threads")
def test_freezing_returns_when_no_thread_is_running(
    parent: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine a signal may take effect late."""
    process, kill, timers = Process.of(parent), os.kill, dict[int, threading.Timer]()

    def kill_late(pid: int, number: int) -> None:
        if pid not in timers:  # the signal is sent again until it has taken effect
            timers[pid] = threading.Timer(0.1 * len(timers) + 0.1, kill, (pid, number))
            timers[pid].start()

    with monkeypatch.context() as patched:
        patched.setattr(os, "kill", kill_late)
        assert process.freeze(10)
    assert states(parent.pid) == {"T"}
    assert len(timers) == 2
    process.signal_all(signal.SIGCONT)
    assert process.alive()


def test_a_process_that_does_not_freeze_is_reported(
    parent: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Process, "signal_all", lambda *_: None)
    frozen = Process.of(parent).freeze(0.05)
    monkeypatch.undo()
    assert not frozen


def test_a_free_port_is_given_once_and_can_be_bound() -> None:
    ports = [free_port() for _ in range(20)]
    assert len(set(ports)) == len(ports)
    for port in ports:
        assert port in PORTS
        with socket.socket() as taken:
            taken.bind((HOST, port))


def test_an_artifact_without_dependencies_is_resolved_alone() -> None:
    assert 'transitive="false"' in Artifact("org.example", "tide", "1.0", transitive=False).as_ivy()
