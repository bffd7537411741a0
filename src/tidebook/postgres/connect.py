"""Connections to PostgreSQL: single ones and pools, in autocommit, so that each statement is a transaction."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Generator
from contextvars import ContextVar
from typing import Any, Self

import psycopg
from psycopg import AsyncConnection, errors
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import TupleRow
from psycopg_pool import AsyncConnectionPool

from tidebook.core.errors import InvalidInput

Connection = AsyncConnection[TupleRow]
Pool = AsyncConnectionPool[Connection]

#: The timeout per server address.
CONNECT_S_MAX = 3
#: The total timeout of the first connection: long enough for a server that restarts, short enough for a command to
#: report a dead one within 5 s, including its own start.
OPEN_S_MAX = 3.5
_RETRY_S = 0.2
#: How long a statement may wait for a lock that another transaction holds.
LOCK_MS_MAX = 30_000
POOL_WAIT_S_MAX = 30.0
#: How long a statement of a `BoundedConnection` may take: longer than any that the outbox runs.
ANSWER_S_MAX = 60.0


def plain_url(url: str) -> str:
    """Return a URL such as `postgresql+psycopg://…` in the form that libpq takes."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme.split("+")[0] not in {"postgresql", "postgres"}:
        raise InvalidInput(f"{scheme[:20]!r} is not a PostgreSQL scheme: the URL begins with postgresql://")
    return f"postgresql://{rest}"


def session_settings(url: str, settings: str) -> str:
    """Return the `options` of a connection: those of its URL or of `PGOPTIONS`, then Tidebook's, which take precedence.

    An argument of `connect` would replace those of the URL, and with them a `search_path`.
    """
    try:
        of_url = conninfo_to_dict(plain_url(url))
    except psycopg.ProgrammingError as error:  # its text repeats the URL, with the password
        reason = str(error).partition(': "')[0]
        raise InvalidInput(
            f"the PostgreSQL URL cannot be read: {reason} (in a user or password, write /, ?, #, [ and @ as %2F, %3F, "
            "%23, %5B and %40)"
        ) from None
    given = of_url.get("options") or os.environ.get("PGOPTIONS", "")
    return f"{given} {settings}".strip()


def connect_options(url: str, application: str, settings: str = "") -> dict[str, Any]:
    """Return the options of every connection; `settings` adds server settings as `-c name=value`."""
    return {
        "autocommit": True,
        "connect_timeout": CONNECT_S_MAX,
        "application_name": application,
        "options": session_settings(url, f"-c lock_timeout={LOCK_MS_MAX} {settings}"),
        "keepalives_idle": 15,
        "keepalives_interval": 5,
        "keepalives_count": 3,
        "prepare_threshold": 1,
    }


async def connect_first(url: str, *, application: str, settings: str) -> Connection:
    """Open one connection, retrying for `OPEN_S_MAX`; a pool would write a log line for each failure."""
    deadline = time.monotonic() + OPEN_S_MAX
    while True:
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                return await AsyncConnection.connect(plain_url(url), **connect_options(url, application, settings))
        except TimeoutError as error:
            raise psycopg.OperationalError(f"no connection within {OPEN_S_MAX:g} s") from error
        except psycopg.OperationalError as error:
            # A server that answers and refuses reports a SQLSTATE; so does one that is starting up.
            refused = error.sqlstate is not None and not isinstance(error, errors.CannotConnectNow)
            if refused or time.monotonic() + _RETRY_S >= deadline:
                raise
        await asyncio.sleep(_RETRY_S)


def make_pool(url: str, *, size_max: int, application: str, settings: str) -> Pool:
    """Return a pool that is not open yet."""
    return AsyncConnectionPool(
        plain_url(url),
        min_size=1,
        max_size=size_max,
        timeout=POOL_WAIT_S_MAX,
        kwargs=connect_options(url, application, settings),
        open=False,
        name=application,
    )


class _TooLong(Exception):
    """The server did not answer in time."""


#: The deadline of a connection attempt in progress.
_open_until: ContextVar[float] = ContextVar("open_until")


class BoundedConnection(psycopg.Connection[TupleRow]):
    """Opens within `OPEN_S_MAX`, and closes itself when a statement is not answered in time.

    psycopg's `connect_timeout` is that of one address, and a name such as `localhost` may have several. The server
    enforces PostgreSQL's timeouts, and its kernel answers TCP keepalives: a server process that is stopped, or whose
    commit waits for a lost replica, triggers no timeout, and psycopg would wait forever.
    """

    @classmethod
    def connect(cls, *args: Any, **kwargs: Any) -> Self:
        """Connect as psycopg does, with one deadline for all addresses."""
        before = _open_until.set(time.monotonic() + OPEN_S_MAX)
        try:
            return super().connect(*args, **kwargs)
        except _TooLong:
            raise psycopg.OperationalError(f"no connection within {OPEN_S_MAX:g} s") from None
        finally:
            _open_until.reset(before)

    @classmethod
    def _connect_gen(cls, *args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        return _within(super()._connect_gen(*args, **kwargs), _open_until.get())

    def wait(self, gen: Generator[Any, Any, Any], *args: Any, **kwargs: Any) -> Any:
        """Wait as psycopg does, with a deadline, which is checked whenever psycopg wakes up, several times a second."""
        try:
            return super().wait(_within(gen, time.monotonic() + ANSWER_S_MAX), *args, **kwargs)
        except _TooLong:
            self.close()  # the statement is still in flight, and may never end
            raise psycopg.OperationalError(f"no answer for {ANSWER_S_MAX:g} s") from None


def _within(gen: Generator[Any, Any, Any], deadline: float) -> Generator[Any, Any, Any]:
    """Run one of psycopg's generators; raise `_TooLong` if it still waits for the server after the deadline."""
    try:
        wanted = next(gen)
        while True:
            ready = yield wanted
            if not ready and time.monotonic() > deadline:
                raise _TooLong
            wanted = gen.send(ready)
    except StopIteration as end:
        return end.value
    finally:
        gen.close()
