"""The ingest service as a process: requests, kill -9, recovery, and a second service that takes over."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).resolve().parents[2]


class Service:
    def __init__(self, book: Path) -> None:
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "uvicorn", "examples.ingest.service:app", "--port", "0"]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path, "INGEST_BOOK": str(book)},
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if found := re.search(r"running on (http://\S+)", line):
                self.client = httpx.Client(base_url=found[1], timeout=30)
                return
        raise AssertionError("the service did not start")

    def post(self, text: str) -> int:
        return self.client.post("/measurements", content=text).status_code

    def last(self, name: str) -> float | None:
        value: float | None = self.client.get(f"/series/{name}").json()["value"]
        return value


@contextmanager
def service(book: Path) -> Iterator[Service]:
    started = Service(book)
    try:
        yield started
    finally:
        started.client.close()
        started.process.kill()
        started.process.wait()
        assert started.process.stderr is not None
        started.process.stderr.close()


@pytest.fixture
def book(tmp_path: Path) -> Path:
    return tmp_path / "book"


def test_measurements_survive_kill_9_and_a_second_service_takes_over(book: Path) -> None:
    with service(book) as first:
        assert first.post('{"series": "cpu", "value": 0.7}\n{"series": "io", "value": 5}\n') == 204
        assert first.post('{"series": "cpu", "value": 0.9}\n') == 204
        assert first.post('{"series": "cpu"}\n') == 400
        assert first.last("cpu") == 0.9
    with ExitStack() as stack:  # the first service was killed
        second = stack.enter_context(service(book))
        assert (second.last("cpu"), second.last("io"), second.last("none")) == (0.9, 5.0, None)
        third = stack.enter_context(service(book))
        assert third.post('{"series": "cpu", "value": 1}\n') == 204
        assert second.post('{"series": "cpu", "value": 2}\n') == 503
        assert third.last("cpu") == 1.0
