"""What the driver is told of a statement: how often it may send it, and how many replicas must answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import acsylla
import pytest

from tidebook.core.metrics import Metrics
from tidebook.store.cassandra.session import Session
from tidebook.store.cassandra.settings import CassandraSettings


class Told:
    """In the place of the driver's session, prepared statement and bound one: keeps what it was told."""

    def __init__(self) -> None:
        self.idempotent: bool | None = None
        self.executed = 0
        self.options: dict[str, Any] = {}

    async def create_prepared(self, cql: str, **options: Any) -> Told:
        return self

    def bind(self, values: Any, **options: Any) -> Told:
        self.options = options
        return self

    def set_is_idempotent(self, idempotent: bool) -> None:
        self.idempotent = idempotent

    async def execute(self, statement: Told) -> Told:
        assert statement.idempotent is not None  # told before it is sent
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
    read: Callable[[Session], Awaitable[Any]], level: acsylla.Consistency
) -> None:
    told = Told()
    settings = CassandraSettings.read("cassandra://one/books", environment={})
    await read(Session(None, told, settings, Metrics()))
    assert (told.executed, told.idempotent, told.options["consistency"]) == (1, True, level)
