"""The event loop that simulated clusters run on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.simulation.virtual_time import VirtualTimeLoop


@pytest.fixture
def loop() -> Iterator[VirtualTimeLoop]:
    loop = VirtualTimeLoop()
    yield loop
    loop.close()
