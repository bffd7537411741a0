"""Where a queue's tests run: on PostgreSQL, by the `settings_file` of their folder, and embedded."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(params=["postgres", "embedded"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A book on either backend."""
    if request.param == "embedded":
        return tmp_path / "data"
    file: Path = request.getfixturevalue("settings_file")
    return file
