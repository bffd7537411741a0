"""Connections to PostgreSQL: a pool of autocommit connections, each statement a transaction of its own."""

from __future__ import annotations

from typing import Any

from psycopg import AsyncConnection
from psycopg.rows import TupleRow
from psycopg_pool import AsyncConnectionPool

from tidebook.core.errors import InvalidInput

Connection = AsyncConnection[TupleRow]
Pool = AsyncConnectionPool[Connection]

CONNECT_S_MAX = 10
#: How long a statement may wait for a lock that somebody else's transaction holds.
LOCK_MS_MAX = 30_000
POOL_WAIT_S_MAX = 30.0


def plain_url(url: str) -> str:
    """`postgresql+psycopg://…` as libpq takes it."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme.split("+")[0] not in {"postgresql", "postgres"}:
        raise InvalidInput(f"{scheme[:20]!r} is no scheme of PostgreSQL: the URL begins with postgresql://")
    return f"postgresql://{rest}"


def connect_options(application: str, settings: str = "") -> dict[str, Any]:
    """What every connection is opened with; `settings` are more of PostgreSQL's own, as -c name=value."""
    return {
        "autocommit": True,
        "connect_timeout": CONNECT_S_MAX,
        "application_name": application,
        "options": f"-c lock_timeout={LOCK_MS_MAX} {settings}",
        "keepalives_idle": 15,
        "keepalives_interval": 5,
        "keepalives_count": 3,
        "prepare_threshold": 1,
    }


def make_pool(url: str, *, size_max: int, application: str = "tidebook", settings: str = "") -> Pool:
    """A pool, not yet open."""
    return AsyncConnectionPool(
        plain_url(url),
        min_size=1,
        max_size=size_max,
        timeout=POOL_WAIT_S_MAX,
        kwargs=connect_options(application, settings),
        open=False,
        name=application,
    )
