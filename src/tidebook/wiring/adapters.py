"""Open the log and the store that are configured in the settings; import a driver only if it is used."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any, cast

from msgspec.structs import replace

from tidebook.core.errors import InvalidInput
from tidebook.log.port import Log
from tidebook.runtime.clock import Clock
from tidebook.runtime.metrics import Metrics
from tidebook.store.port import StoreWriter
from tidebook.wiring.settings import Section, Settings, adapter_options, read_settings


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


def server_settings(settings: Settings, part: str, server: str, module: str, type_: str) -> Any:
    """Return the settings of the server of `part`; raise `InvalidInput` if its URL is of another kind of server."""
    section = settings.section(part)
    if section.url is None or scheme(section.url) != server:
        raise InvalidInput(f"[{part}] url: {scheme(section.url or '')}:// is unknown; use {server}://")
    return adapter_options(section, part, getattr(extra(module, server), type_))


def kafka_settings(settings: Settings) -> Any:
    """Return the `KafkaSettings` of the book's log; raise `InvalidInput` if it is not on Kafka."""
    return server_settings(settings, "log", "kafka", "tidebook.kafka.settings", "KafkaSettings")


def cassandra_settings(settings: Settings) -> Any:
    """Return the `CassandraSettings` of the book's store; raise `InvalidInput` if it is not on Cassandra."""
    return server_settings(settings, "store", "cassandra", "tidebook.store.cassandra.settings", "CassandraSettings")


async def open_log(settings: Settings, *, clock: Clock, metrics: Metrics) -> Log:
    """Open the configured log; a missing embedded log is created by the first write."""
    if not settings.section("log").embedded:
        kafka = kafka_settings(settings)
        log: Log = extra("tidebook.log.kafka.log", "kafka").KafkaLog(kafka, metrics=metrics)
        return log
    from tidebook.log.sqlite.log import SqliteLog
    from tidebook.log.sqlite.tables import FILE
    from tidebook.wiring.lazy_adapters import LazyLog

    folder = settings.folder.expanduser().absolute()
    embedded = LazyLog(folder / FILE, lambda: SqliteLog(folder, clock=clock, metrics=metrics))
    embedded.open_existing()  # so that a folder that cannot be opened is reported here, not at its first use
    return embedded


async def open_store(settings: Settings, *, metrics: Metrics) -> StoreWriter:
    """Open the configured store; a missing one is created by the first write."""
    if not settings.section("store").embedded:
        cassandra = cassandra_settings(settings)
        return await _open_keyspace(extra("tidebook.store.cassandra.store", "cassandra"), cassandra, metrics)
    from tidebook.store.sqlite.store import SqliteStore
    from tidebook.store.sqlite.tables import FILE
    from tidebook.wiring.lazy_adapters import LazyStore

    folder = settings.folder.expanduser().absolute()
    embedded = LazyStore(folder / FILE, lambda: SqliteStore(folder, metrics=metrics))
    embedded.open_existing()  # so that a folder that cannot be opened is reported here, not at its first use
    return embedded


async def connect_cassandra(address: str, keyspace: str, *, metrics: Metrics) -> Any:
    """Connect to a Cassandra cluster that is not this book's store, and return its session.

    `address` is `host:port`, a URL `cassandra://user@host:port`, or a `.toml` file with the options in `[store]`.
    """
    if address.endswith(".toml"):
        section = read_settings(address).section("store")
    else:
        section = Section(address if "://" in address else f"cassandra://{address}")
    base = (section.url or "").rstrip("/")
    if scheme(base) == "cassandra" and base.count("/") == 2:  # without a keyspace
        section = replace(section, url=f"{base}/{keyspace}")
    adapter = extra("tidebook.store.cassandra.store", "cassandra")
    settings = adapter_options(
        section, "store", extra("tidebook.store.cassandra.settings", "cassandra").CassandraSettings
    )
    if settings.keyspace != keyspace:
        raise InvalidInput(f"the address names keyspace {settings.keyspace}, but {keyspace} was requested")
    return await adapter.connect(settings, metrics)


async def _open_keyspace(adapter: ModuleType, settings: Any, metrics: Metrics) -> StoreWriter:
    from tidebook.wiring.lazy_adapters import LazyKeyspace

    session = await adapter.connect(settings, metrics)
    try:
        store: StoreWriter | None = await adapter.find_store(session, settings, metrics)
    except BaseException:
        await session.close()
        raise
    if store is not None:
        return store
    lazy: Any = LazyKeyspace(
        partial(adapter.find_store, session, settings, metrics),
        partial(adapter.create_store, session, settings, metrics),
        session.close,
    )
    return cast(StoreWriter, lazy)
