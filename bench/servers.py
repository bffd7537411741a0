"""The servers that a benchmark runs on: those of `./dev servers start`."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit


def status_file() -> Path:
    """Return the file in which the running servers are recorded."""
    return Path(os.environ.get("TIDEBOOK_SERVERS") or ".servers/status.json")


def running() -> dict[str, Any]:
    """What is written down of each running server, by its name."""
    servers: dict[str, Any] = json.loads(status_file().read_text())["servers"]
    return servers


@contextmanager
def database(server: str, what: str) -> Iterator[str]:
    """A database of the run's own."""
    import psycopg  # most benchmarks need none

    name = f"bench_{what}_{uuid.uuid4().hex[:8]}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
        try:
            yield urlsplit(server)._replace(path=f"/{name}").geturl()
        finally:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
