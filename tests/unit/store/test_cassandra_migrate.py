"""The schema's lock outlasts what it guards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("acsylla")

from tidebook.core.errors import Unavailable
from tidebook.store.cassandra import statements as cql
from tidebook.store.cassandra.migrate import LOCK_S, migrate
from tidebook.store.cassandra.schema import Migration
from tidebook.store.cassandra.session import SCHEMA_TIMEOUT_S


class Keyspace:
    """A session that notes what is done, and may lose its lock."""

    def __init__(self, *, lost_after: int = 10**9) -> None:
        self.done: list[str] = []
        self._renewals_left = lost_after

    async def query(self, _: str) -> list[tuple[str]]:
        return [("setting",), ("locks",)]

    async def read_serial(self, *_: Any) -> Keyspace:
        return self

    def first(self) -> None:
        return None

    async def define(self, ddl: str) -> None:
        self.done.append(ddl)

    async def compare_and_set(self, statement: str, _: Sequence[Any]) -> dict[str, bool]:
        if statement == cql.RENEW_LOCK:
            self.done.append("renew")
            self._renewals_left -= 1
            return {"[applied]": self._renewals_left >= 0}
        return {"[applied]": True}


async def test_the_lock_is_renewed_before_each_statement() -> None:
    keyspace = Keyspace()
    await migrate(keyspace, "k", [Migration("first", ("A", "B", "C"))])  # type: ignore[arg-type]
    assert keyspace.done == ["renew", "A", "renew", "B", "renew", "C", "renew"]
    assert LOCK_S > SCHEMA_TIMEOUT_S


async def test_who_has_lost_the_lock_changes_nothing_more() -> None:
    keyspace = Keyspace(lost_after=1)
    with pytest.raises(Unavailable, match="lost"):
        await migrate(keyspace, "k", [Migration("first", ("A", "B"))])  # type: ignore[arg-type]
    assert keyspace.done == ["renew", "A", "renew"]
