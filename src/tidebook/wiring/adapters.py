"""From a section of the settings to an open adapter; a driver is imported only where it is named."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from tidebook.core.clock import Clock
from tidebook.core.errors import InvalidInput
from tidebook.core.metrics import Metrics
from tidebook.log.port import Log
from tidebook.store.port import StoreWriter
from tidebook.wiring.settings import Settings


def scheme(url: str) -> str:
    """The scheme of a URL, `postgresql` of `postgresql+psycopg://…` too."""
    return url.split("://", 1)[0].split("+", 1)[0].lower()


def extra(module: str, name: str) -> ModuleType:
    """An adapter that needs an extra of the package; a missing one says how to install it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("tidebook"):
            raise
        raise InvalidInput(f"{error.name} is not installed: pip install 'tidebook[{name}]'") from error


async def open_log(settings: Settings, *, clock: Clock, metrics: Metrics) -> Log:
    """The log that the settings name."""
    section = settings.section("log")
    if section.url is None:
        from tidebook.log.embedded.log import EmbeddedLog

        return EmbeddedLog(settings.folder, clock=clock, metrics=metrics)
    if scheme(section.url) == "kafka":
        adapter = extra("tidebook.log.kafka.log", "kafka")
        kafka = extra("tidebook.log.kafka.settings", "kafka")
        log: Log = await adapter.open_kafka_log(kafka.KafkaSettings.read(section.url, section.options), metrics=metrics)
        return log
    raise InvalidInput(f"[log] url: {scheme(section.url)}:// is unknown; there is kafka://")


async def open_store(settings: Settings, *, metrics: Metrics) -> StoreWriter:
    """The store that the settings name."""
    section = settings.section("store")
    if section.url is None:
        from tidebook.store.embedded.store import EmbeddedStore

        return EmbeddedStore(settings.folder, metrics=metrics)
    if scheme(section.url) == "cassandra":
        adapter = extra("tidebook.store.cassandra.store", "cassandra")
        cassandra = extra("tidebook.store.cassandra.settings", "cassandra")
        store: StoreWriter = await adapter.open_cassandra_store(
            cassandra.CassandraSettings.read(section.url, section.options), metrics=metrics
        )
        return store
    raise InvalidInput(f"[store] url: {scheme(section.url)}:// is unknown; there is cassandra://")
