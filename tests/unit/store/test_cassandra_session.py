"""The options of a statement: whether the driver may resend it, and how many replicas must answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import acsylla
import pytest

from tidebook.runtime.metrics import Metrics
from tidebook.store.cassandra.session import CassandraSession
from tidebook.store.cassandra.settings import CassandraSettings


class Recorder:
    """A fake of the driver's session, prepared and bound statement, which records the options set."""

    def __init__(self) -> None:
        self.idempotent: bool | None = None
        self.executed = 0
        self.options: dict[str, Any] = {}

    async def create_prepared(self, cql: str, **options: Any) -> Recorder:
        return self

    def bind(self, values: Any, **options: Any) -> Recorder:
        self.options = options
        return self

    def set_is_idempotent(self, idempotent: bool) -> None:
        self.idempotent = idempotent

    async def execute(self, statement: Recorder) -> Recorder:
        assert statement.idempotent is not None  # set before it is sent
        self.executed += 1
        return self


@pytest.mark.parametrize(
    ("read", "level"),
    [
        (lambda session: session.read("SELECT", []), acsylla.Consistency.LOCAL_QUORUM),
        (lambda session: session.read_serial("SELECT", []), acsylla.Consistency.SERIAL),
    ],
    ids=["read", "read_serial"],
)
async def test_a_read_may_be_sent_to_the_next_node(
    read: Callable[[CassandraSession], Awaitable[Any]], level: acsylla.Consistency
) -> None:
    reported = Recorder()
    settings = CassandraSettings.read("cassandra://one/books", environment={})
    await read(CassandraSession(None, reported, settings, Metrics()))
    assert (reported.executed, reported.idempotent, reported.options["consistency"]) == (1, True, level)
