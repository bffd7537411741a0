"""Fixtures of books on either backend, with a PostgreSQL that these tests may kill."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.queue.backends import where as where
from tidebook.testing.servers import Postgres


@pytest.fixture(scope="session")
def own_postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Postgres]:
    """Start a PostgreSQL that no other test uses."""
    postgres = Postgres(tmp_path_factory.mktemp("postgres"))
    postgres.start()
    try:
        yield postgres
    finally:
        postgres.remove()


@pytest.fixture
def settings_file(tmp_path: Path, own_postgres: Postgres) -> Path:
    file = tmp_path / "tidebook.toml"
    schema = f"q_{tmp_path.name.lower().replace('-', '_')}"[:40].rstrip("_")
    file.write_text(f'folder = "data"\n[sql]\nurl = "{own_postgres.url}"\n[queue]\nschema = "{schema}"\n')
    return file
