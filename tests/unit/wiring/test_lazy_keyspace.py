"""A book whose keyspace is missing: everything that a store has can be asked for."""

from __future__ import annotations

import pytest

from tidebook.store.cassandra.store import CassandraStore
from tidebook.store.port import StoreWriter
from tidebook.wiring.lazy_keyspace import LazyKeyspace

NAMES = sorted(
    {name for name in dir(StoreWriter) if not name.startswith("_")}
    | {name for base in StoreWriter.__mro__ for name in getattr(base, "__annotations__", {})}
)


async def nothing() -> None:
    return None


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_keyspace_has_what_a_store_has(name: str) -> None:
    assert hasattr(LazyKeyspace(nothing, nothing, nothing), name)


@pytest.mark.parametrize("name", ["deletes_topics", "orders_topics"])
def test_a_missing_keyspace_can_what_cassandra_can(name: str) -> None:
    assert getattr(LazyKeyspace, name) == getattr(CassandraStore, name)
