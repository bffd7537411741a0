"""A connection to PostgreSQL that does not wait for ever."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any

import psycopg
from psycopg.rows import TupleRow

#: How long a statement may take, or a server say nothing: longer than any that the outbox runs.
ANSWER_S_MAX = 60.0


class _TooLong(Exception):
    """The answer did not come in time."""


class BoundedConnection(psycopg.Connection[TupleRow]):
    """Gives up a statement that is not answered.

    PostgreSQL's own limits are kept by the server, and the network's by its machine: a server that is stopped, or
    whose commit waits for a replica that is gone, keeps neither, and is waited for without an end.
    """

    def wait(self, gen: Generator[Any, Any, Any], *args: Any, **kwargs: Any) -> Any:
        """As psycopg waits, which looks up several times a second."""
        try:
            return super().wait(_within(gen, time.monotonic() + ANSWER_S_MAX), *args, **kwargs)
        except _TooLong:
            self.close()  # what is still under way has no end that could be waited for
            raise psycopg.OperationalError(f"no answer for {ANSWER_S_MAX:g} s") from None


def _within(gen: Generator[Any, Any, Any], deadline: float) -> Generator[Any, Any, Any]:
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
