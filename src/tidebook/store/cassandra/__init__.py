"""The store on Apache Cassandra, last write wins by stamps that come from the log."""

from __future__ import annotations

from tidebook.store.cassandra.settings import CassandraSettings
from tidebook.store.cassandra.store import CassandraStore, open_cassandra_store

__all__ = ["CassandraSettings", "CassandraStore", "open_cassandra_store"]
