"""Fixtures: journals on embedded ports whose calls a test can hold or fail, over both kinds of log."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tests.unit.journal.rig import Kind, Rig


@pytest.fixture(params=["indexed", "like kafka"])
def kind(request: pytest.FixtureRequest) -> Kind:
    kind: Kind = request.param
    return kind


@pytest.fixture
async def open_rig(tmp_path: Path, kind: Kind) -> AsyncIterator[Callable[..., Rig]]:
    """Opens another rig on the same folder, as a second process would."""
    opened: list[Rig] = []

    def open_rig(**settings: int) -> Rig:
        opened.append(Rig(tmp_path, kind, **settings))
        return opened[-1]

    yield open_rig
    for rig in opened:
        await rig.close()


@pytest.fixture
def rig(open_rig: Callable[..., Rig]) -> Rig:
    return open_rig()


@pytest.fixture(autouse=True)
def _outdated_ends_are_retried_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """No broker is replaced here, so an end of the log below the pointer need not be read again for seconds."""
    monkeypatch.setattr("tidebook.journal.topic.OUTDATED_END_S_MAX", 0.05)
