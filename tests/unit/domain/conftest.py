"""Fixtures of the tests of the domain layer."""

from __future__ import annotations

import pytest

from tidebook.domain import projection_runner


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the members of a projection rebalance and retry soon."""
    monkeypatch.setattr(projection_runner, "REBALANCE_S", 0.05)
    monkeypatch.setattr(projection_runner, "RETRY_FIRST_S", 0.001)
