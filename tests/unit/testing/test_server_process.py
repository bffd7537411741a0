"""A server's process is known by number and birth, and its port is free."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tidebook.testing.servers.ivy import Artifact
from tidebook.testing.servers.process import Process, birth_of
from tidebook.testing.servers.server import HOST, PORTS, free_port

READY = "print('ready', flush=True); import time; time.sleep(600)"
PARENT = f"import subprocess, sys; c = subprocess.Popen([sys.executable, '-c', {READY!r}]); c.wait()"


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[bytes]]:
    """A process with a child of its own, which has told that it runs."""
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process
        Process.of(process).signal_all(signal.SIGKILL)


def test_a_process_with_another_birth_is_not_ours(parent: subprocess.Popen[bytes]) -> None:
    birth = birth_of(parent.pid)
    assert birth is not None
    assert Process(parent.pid, birth).alive()
    assert not Process(parent.pid, birth + "0").alive()


def test_a_process_of_another_birth_gets_no_signal(parent: subprocess.Popen[bytes]) -> None:
    stranger = Process(parent.pid, "0")
    stranger.signal(signal.SIGKILL)
    stranger.signal_all(signal.SIGKILL)
    assert parent.poll() is None


def test_killing_ends_the_children_too(parent: subprocess.Popen[bytes]) -> None:
    process = Process.of(parent)
    process.signal_all(signal.SIGKILL)
    assert process.wait(10)
    assert parent.stdout is not None
    assert parent.stdout.read() == b""  # the end of the pipe: nobody holds it any more


def test_a_free_port_is_given_once_and_can_be_bound() -> None:
    ports = [free_port() for _ in range(20)]
    assert len(set(ports)) == len(ports)
    for port in ports:
        assert port in PORTS
        with socket.socket() as taken:
            taken.bind((HOST, port))


def test_an_artifact_that_stands_alone_brings_nothing_along() -> None:
    assert 'transitive="false"' in Artifact("org.example", "tide", "1.0", transitive=False).as_ivy()
