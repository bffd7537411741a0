"""A fixture that runs tests of replication in virtual time."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from tests.simulation.virtual_time import VirtualTimeLoop
from tests.unit.replication.memory import Run
from tidebook.replication import inline, partition, tail


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Run a program in virtual time, which is also the time of the modules under test."""
    loop = VirtualTimeLoop()
    for module in (partition, inline):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=loop.time))
    for module in (partition, tail, inline):
        monkeypatch.setattr(module, "RETRY_FIRST_S", 0.125)
    yield loop.run
    loop.close()
