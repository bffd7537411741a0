"""The store on Apache Cassandra. Write timestamps come from log positions, so the last write of the log wins."""

from __future__ import annotations

from tidebook.store.cassandra.settings import CassandraSettings
from tidebook.store.cassandra.store import CassandraStore, open_cassandra_store

__all__ = ["CassandraSettings", "CassandraStore", "open_cassandra_store"]
