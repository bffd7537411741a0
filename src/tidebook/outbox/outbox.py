"""A book's outbox: publish, relay, look, decide over what is parked. It blocks; `AsyncOutbox` has the same names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, Protocol

import msgspec

from tidebook.core.clock import Ids, RandomIds
from tidebook.core.errors import InvalidInput
from tidebook.core.event import Event
from tidebook.core.metrics import Metrics
from tidebook.log.relay_port import RelayTarget
from tidebook.outbox.backend import Backend, BackendName, KafkaBackend, Sender, backend, of_block, use
from tidebook.outbox.journal_message import journal_message
from tidebook.outbox.message import Message, all_checked, message
from tidebook.outbox.publish import Pairs, Payload, Value
from tidebook.outbox.relay import Relay
from tidebook.outbox.settings import OutboxSettings
from tidebook.sql.port.outbox import OutboxDatabase, OutboxStore, ParkedMessage, TopicStatus

COUNT_MAX = 100_000
LIST_MAX = 1_000
NUMBER_MAX = 2**31 - 1


class Parts(Protocol):
    """What a book's settings say the outbox is made of."""

    #: The database, as SQLAlchemy takes it.
    url: str
    #: Whether that is a file of the book's own.
    embedded: bool
    settings: OutboxSettings
    database: OutboxDatabase

    def target(self, outbox: bytes) -> RelayTarget:
        """Where the relay sends to, for the outbox of this uuid."""
        ...

    def sender(self) -> Sender:
        """What sends at once."""
        ...

    def close(self) -> None:
        """Let go of what was opened."""
        ...


class Outbox:
    """Use it as `book.outbox`."""

    def __init__(self, parts: Parts, *, ids: Ids | None = None, metrics: Metrics | None = None) -> None:
        self._parts = parts
        self._ids = ids or RandomIds()
        self.metrics = metrics or Metrics()
        self._ready = False
        self._chosen: Backend | None = None

    @property
    def settings(self) -> OutboxSettings:
        """The `[outbox]` section."""
        return self._parts.settings

    @property
    def url(self) -> str:
        """The database that holds the outbox, as SQLAlchemy takes it; a password in it is not hidden."""
        if self._parts.embedded:
            self.ready()
        return self._parts.url

    # ---- publishing

    def publish(
        self,
        target: Any,
        *,
        topic: str,
        payload: Payload,
        key: Value = None,
        partition_key: Value = None,
        headers: Pairs | None = None,
        ordered: bool = False,
    ) -> Any:
        """`outbox.publish`, through the backend of a `with` block, or the one that the book's settings choose."""
        made = message(topic=topic, payload=payload, key=key, partition_key=partition_key, headers=headers)
        return self.backend().publish(target, [made], ordered=ordered)

    def publish_list(self, target: Any, messages: Iterable[Message], *, ordered: bool = False) -> Any:
        """`outbox.publish_list`, through the backend of a `with` block, or the one that the book's settings choose."""
        return self.backend().publish(target, all_checked(messages), ordered=ordered)

    def publish_alone(self, messages: Iterable[Message], *, ordered: bool = False) -> None:
        """Publish in a transaction of their own, where there is nothing else to commit with them."""
        self.ready()
        with self._store() as store:
            store.publish(all_checked(messages), ordered=ordered)

    def append(
        self,
        target: Any,
        topic: str,
        id: str,
        events: Sequence[Event],
        *,
        expected: int | None = None,
        expire_after: timedelta | int | None = None,
        ordered: bool = False,
    ) -> Any:
        """Append to a journal when the transaction of `target` commits; see `Journal.append`.

        It is relayed in the order of its journal and counts once. An append whose `expected` is not met is parked.
        """
        made = journal_message(topic, id, events, expected=expected, expire_after=expire_after)
        chosen = self.backend()
        if isinstance(chosen, KafkaBackend):
            raise InvalidInput("an append to a journal goes through the backend 'db': Kafka itself keeps no journals")
        return chosen.publish(target, [made], ordered=ordered)

    def backend(self, name: BackendName | None = None) -> Backend:
        """A backend of this book by name; else that of the `with` block, or the one that its settings choose."""
        if name is not None:
            return self._make(name)
        if (chosen := of_block()) is not None:
            return chosen
        if self._chosen is None:
            self._chosen = self._make(self.settings.backend)
        return self._chosen

    def use(self, name: BackendName) -> AbstractContextManager[Any]:
        """Publish through this book's backend of that name inside a `with` block, in this thread or task only."""
        return use(self._make(name))

    def _make(self, name: BackendName) -> Backend:
        return backend(name, self._parts.sender() if name in {"kafka", "kafka_async"} else None)

    # ---- relaying

    def relay(self, *, threads: int | None = None, once: bool = False) -> int:
        """Relay until `once` all that can be sent was sent, or for ever; how many messages went."""
        return self.new_relay(threads=threads).run(once=once)

    def new_relay(self, *, threads: int | None = None) -> Relay:
        """A relay that is not running yet: `run` it, and `stop` it from another thread or a signal handler."""
        settings = self.settings
        if threads is not None:
            _at_least_one(threads, "a relay's threads")
            settings = msgspec.structs.replace(settings, threads=threads)
        self.ready()
        return Relay(self._parts.database, self._parts.target, settings, ids=self._ids, metrics=self.metrics)

    @contextmanager
    def relaying(self, *, threads: int | None = None) -> Iterator[Relay]:
        """A relay in the background of a `with` block; what ended it early is raised at the block's end."""
        relay = self.new_relay(threads=threads)
        with ThreadPoolExecutor(1, "tidebook-outbox-relay") as pool:
            running = pool.submit(relay.run)
            try:
                yield relay
            finally:
                relay.stop()
                running.result()

    # ---- operating

    def create_tables(self) -> None:
        """Make the tables where they are missing."""
        with self._store() as store:
            store.create_tables()

    def ready(self) -> None:
        """Make the tables once, unless the settings leave that to migrations."""
        if not self._ready and self.settings.create_tables:
            self.create_tables()
        self._ready = True

    def status(self, *, count_max: int = COUNT_MAX) -> list[TopicStatus]:
        """Every topic: how many messages wait, the age of the oldest, who holds it, what went wrong."""
        _at_least_one(count_max, "count_max")
        self.ready()
        with self._store() as store:
            found = store.status(count_max=count_max)
        for each in found:
            self.metrics.gauge("outbox_waiting", each.waiting, topic=each.topic)
            self.metrics.gauge("outbox_oldest_seconds", (each.oldest_age_ms or 0) / 1000, topic=each.topic)
            self.metrics.gauge("outbox_parked", each.parked, topic=each.topic)
        return found

    def parked(self, topic: str | None = None, *, limit: int = LIST_MAX) -> list[ParkedMessage]:
        """Messages that lie aside: parked, to be tried again, or held behind one of those."""
        _at_least_one(limit, "limit")
        if topic is not None:
            _named(topic)
        self.ready()
        with self._store() as store:
            return store.parked(topic, limit=limit)

    def parked_retry(self, topic: str, id: int | None = None) -> int:
        """Send parked messages again (all of the topic's, or one), each in its place; how many."""
        _named(topic)
        with self._store() as store:
            return store.parked_retry(topic, id)

    def parked_drop(self, topic: str, id: int | None = None) -> int:
        """Delete parked messages and let go on what they held; how many were deleted."""
        _named(topic)
        with self._store() as store:
            return store.parked_drop(topic, id)

    def close(self) -> None:
        """Let go of what was opened."""
        self._parts.close()

    @contextmanager
    def _store(self) -> Iterator[OutboxStore]:
        store = self._parts.database.connect()
        try:
            yield store
        finally:
            store.close()


def _at_least_one(value: object, name: str) -> None:
    if type(value) is not int or not 1 <= value <= NUMBER_MAX:
        raise InvalidInput(f"{name} must be a number from 1 to {NUMBER_MAX:,}, not {value!r}")


def _named(topic: object) -> None:
    """Not whether there is such a topic: those of journals have names of their own."""
    if not isinstance(topic, str) or "\x00" in topic:
        raise InvalidInput(f"a topic is text, not {topic!r}")
