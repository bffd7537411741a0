"""`LazyKeyspace`, the stand-in for a store whose keyspace is missing, has all methods and attributes of a store."""

from __future__ import annotations

import pytest

from tidebook.store.cassandra.store import CassandraStore
from tidebook.store.port import StoreWriter
from tidebook.wiring.lazy_adapters import LazyKeyspace

NAMES = sorted(
    {name for name in dir(StoreWriter) if not name.startswith("_")}
    | {name for base in StoreWriter.__mro__ for name in getattr(base, "__annotations__", {})}
)


async def nothing() -> None:
    return None


@pytest.mark.parametrize("name", NAMES)
def test_the_stand_in_has_every_attribute_of_a_store(name: str) -> None:
    assert hasattr(LazyKeyspace(nothing, nothing, nothing), name)


@pytest.mark.parametrize("name", ["deletes_topics", "orders_topics"])
def test_the_stand_in_has_the_capabilities_of_cassandra(name: str) -> None:
    assert getattr(LazyKeyspace, name) == getattr(CassandraStore, name)
