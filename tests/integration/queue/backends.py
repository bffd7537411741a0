"""The backends of the queue tests: PostgreSQL, by the `settings_file` of the folder, and SQLite."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(params=["postgres", "embedded"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return the location of a book on a backend."""
    if request.param == "embedded":
        return tmp_path / "data"
    file: Path = request.getfixturevalue("settings_file")
    return file
