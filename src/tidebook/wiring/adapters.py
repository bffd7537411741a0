"""Open the log and the store that the settings name; import a driver only if it is used."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import cast

from tidebook.core.errors import InvalidInput
from tidebook.log.port import Log
from tidebook.runtime.clock import Clock
from tidebook.runtime.metrics import Metrics
from tidebook.store.port import StoreWriter
from tidebook.wiring.settings import Settings, adapter_options


def scheme(url: str) -> str:
    """Return the scheme of a URL without a driver suffix: `postgresql` for `postgresql+psycopg://…`."""
    return url.split("://", 1)[0].split("+", 1)[0].lower()


def extra(module: str, name: str) -> ModuleType:
    """Import an adapter that needs a package extra; raise `InvalidInput` with the pip command if it is missing."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("tidebook"):
            raise
        raise InvalidInput(f"{error.name} is not installed: pip install 'tidebook[{name}]'") from error


async def open_log(settings: Settings, *, clock: Clock, metrics: Metrics) -> Log:
    """Open the log that the settings name; a missing embedded log is created by the first write."""
    section = settings.section("log")
    if section.url is None:
        from tidebook.log.sqlite.log import SqliteLog
        from tidebook.log.sqlite.tables import FILE
        from tidebook.wiring.lazy_folder import LazyLog

        folder = settings.folder.expanduser().absolute()
        embedded = LazyLog(folder / FILE, lambda: SqliteLog(folder, clock=clock, metrics=metrics))
        embedded.open_existing()  # report a folder that cannot be opened now, not at the first use
        return cast(Log, embedded)
    if scheme(section.url) == "kafka":
        adapter = extra("tidebook.log.kafka.log", "kafka")
        kafka = extra("tidebook.kafka.settings", "kafka")
        log: Log = await adapter.open_kafka_log(adapter_options(section, "log", kafka.KafkaSettings), metrics=metrics)
        return log
    raise InvalidInput(f"[log] url: {scheme(section.url)}:// is unknown; there is kafka://")


async def open_store(settings: Settings, *, metrics: Metrics) -> StoreWriter:
    """Open the store that the settings name; a missing embedded store is created by the first write."""
    section = settings.section("store")
    if section.url is None:
        from tidebook.store.sqlite.store import SqliteStore
        from tidebook.store.sqlite.tables import FILE
        from tidebook.wiring.lazy_folder import LazyStore

        folder = settings.folder.expanduser().absolute()
        embedded = LazyStore(folder / FILE, lambda: SqliteStore(folder, metrics=metrics))
        embedded.open_existing()  # report a folder that cannot be opened now, not at the first use
        return cast(StoreWriter, embedded)
    if scheme(section.url) == "cassandra":
        adapter = extra("tidebook.store.cassandra.store", "cassandra")
        cassandra = extra("tidebook.store.cassandra.settings", "cassandra")
        store: StoreWriter = await adapter.open_cassandra_store(
            adapter_options(section, "store", cassandra.CassandraSettings), metrics=metrics
        )
        return store
    raise InvalidInput(f"[store] url: {scheme(section.url)}:// is unknown; there is cassandra://")
