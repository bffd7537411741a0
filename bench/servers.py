"""The servers that a benchmark runs on: those of `./dev servers start`."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit


def status_file() -> Path:
    """Return the file in which the running servers are recorded."""
    return Path(os.environ.get("TIDEBOOK_SERVERS") or ".servers/status.json")


def running() -> dict[str, Any]:
    """Return the recorded status of each running server, by name."""
    servers: dict[str, Any] = json.loads(status_file().read_text())["servers"]
    return servers


@asynccontextmanager
async def driver_session(address: str, keyspace: str | None = None) -> AsyncIterator[Any]:
    """Open a session of the bare Cassandra driver that Tidebook uses; the address is host:port."""
    import acsylla  # most benchmarks need none

    host, port = address.split(":")
    cluster = acsylla.create_cluster([host], port=int(port), consistency="LOCAL_QUORUM", log_level="disabled")
    session = await cluster.create_session(keyspace=keyspace)
    try:
        yield session
    finally:
        await session.close()
        cluster.destroy()


@contextmanager
def database(server: str, what: str) -> Iterator[str]:
    """Create a database for the run; drop it afterwards."""
    import psycopg  # most benchmarks need none

    name = f"bench_{what}_{uuid.uuid4().hex[:8]}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
        try:
            yield urlsplit(server)._replace(path=f"/{name}").geturl()
        finally:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
