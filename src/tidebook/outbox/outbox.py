"""A book's outbox: publish, relay, report the status, and retry or drop parked messages; blocking and async."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager, closing, contextmanager
from datetime import timedelta
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, Unpack

import msgspec

from tidebook.core.errors import InvalidInput
from tidebook.core.event import Event
from tidebook.core.payload import encode_text
from tidebook.outbox.message import Message, MessageFields, journal_message, message, validate_messages
from tidebook.outbox.port import OutboxTopicStatus, ParkedMessage, RelayTargets
from tidebook.outbox.publish import Backend, KafkaBackend, Sender, backend, block_backend, publish_through, use
from tidebook.outbox.relay import Relay
from tidebook.outbox.settings import BackendName, OutboxSettings
from tidebook.outbox.store import OutboxDatabase, OutboxStore
from tidebook.runtime.clock import Ids, RandomIds
from tidebook.runtime.metrics import Metrics
from tidebook.runtime.process import generation, refuse_fork

P = ParamSpec("P")
R = TypeVar("R")

COUNT_MAX = 100_000
LIST_MAX = 1_000
INT_MAX = 2**31 - 1


class OutboxParts(Protocol):
    """The database and targets of an outbox, made from a book's settings."""

    #: The database's URL in SQLAlchemy's form.
    url: str
    #: Whether that is a file in the book's folder.
    embedded: bool
    settings: OutboxSettings
    database: OutboxDatabase

    @property
    def missing(self) -> bool:
        """Whether the outbox is a file of the book that does not exist: reading must not create it."""

    def targets(self, outbox: bytes) -> RelayTargets:
        """Return the targets of the relay, for the outbox with this uuid."""

    def sender(self) -> Sender:
        """Return the sender that sends to Kafka without the outbox."""

    def close(self) -> None:
        """Close the connections and the sender, if they were opened."""


class Outbox:
    """The outbox of a book, as `book.outbox`."""

    def __init__(self, parts: OutboxParts, *, ids: Ids | None = None, metrics: Metrics | None = None) -> None:
        self._parts = parts
        #: The `[outbox]` section of the book's settings.
        self.settings = parts.settings
        self._ids = ids or RandomIds()
        self.metrics = metrics or Metrics()
        self._ready = False
        self._chosen: Backend | None = None
        self._generation = generation()

    def refuse_fork(self) -> None:
        """Raise InvalidInput in a forked child, which has neither the threads nor the clients of its parent."""
        refuse_fork(self._generation, "the outbox")

    @property
    def url(self) -> str:
        """The URL of the outbox's database in SQLAlchemy's form; a password in it is not hidden."""
        if self._parts.embedded:
            self.ready()
        return self._parts.url

    def publish(self, target: Any, *, ordered: bool = False, **fields: Unpack[MessageFields]) -> Any:
        """Publish like `tidebook.outbox.publish`, through the backend of the `use` block or of the book's settings."""
        return publish_through(self.backend(), target, [message(**fields)], ordered=ordered)

    def publish_list(self, target: Any, messages: Iterable[Message], *, ordered: bool = False) -> Any:
        """Publish like `tidebook.outbox.publish_list`, through the backend of the `use` block or of the settings."""
        return publish_through(self.backend(), target, validate_messages(messages), ordered=ordered)

    def publish_alone(self, messages: Iterable[Message], *, ordered: bool = False) -> None:
        """Publish the messages in a separate transaction, for callers that have none."""
        self.ready()
        with self._store() as store:
            store.publish(validate_messages(messages), ordered=ordered)

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

        Appends to one journal are relayed in order, and each is applied once. It is parked if `expected` is not met.
        """
        new_message = journal_message(topic, id, events, expected=expected, expire_after=expire_after)
        chosen = self.backend()
        if isinstance(chosen, KafkaBackend):
            raise InvalidInput("an append to a journal needs the backend 'db': Kafka itself has no journals")
        return chosen.publish(target, [new_message], ordered=ordered)

    def backend(self, name: BackendName | None = None) -> Backend:
        """Return the book's backend of this name; without one, that of the `use` block or of the settings."""
        self.refuse_fork()
        if name is not None:
            return self._new_backend(name)
        if (chosen := block_backend()) is not None:
            return chosen
        if self._chosen is None:
            self._chosen = self._new_backend(self.settings.backend)
        return self._chosen

    def use(self, name: BackendName) -> AbstractContextManager[Any]:
        """Publish through this book's backend of that name inside a `with` block, in this thread or task only."""
        return use(self._new_backend(name))

    def _new_backend(self, name: BackendName) -> Backend:
        return backend(name, self._parts.sender() if name in {"kafka", "kafka_async"} else None)

    def relay(self, *, threads: int | None = None, once: bool = False) -> int:
        """Relay forever or, with `once`, until nothing is left that can be sent now; return how many were sent."""
        return self.new_relay(threads=threads).run(once=once)

    def new_relay(self, *, threads: int | None = None) -> Relay:
        """Return a relay that is not running: call `run`, and `stop` from another thread or a signal handler."""
        settings = self.settings
        if threads is not None:
            _check_positive(threads, "a relay's threads")
            settings = msgspec.structs.replace(settings, threads=threads)
        self.ready()
        return Relay(self._parts.database, self._parts.targets, settings, ids=self._ids, metrics=self.metrics)

    @contextmanager
    def relaying(self, *, threads: int | None = None) -> Iterator[Relay]:
        """Run a relay in the background of a `with` block; an error that ended it is raised at the block's end."""
        relay = self.new_relay(threads=threads)
        with ThreadPoolExecutor(1, "tidebook-outbox-relay") as pool:
            running = pool.submit(relay.run)
            try:
                yield relay
            finally:
                relay.stop()
                running.result()

    def create_tables(self) -> None:
        """Create the missing tables."""
        with self._store() as store:
            store.create_tables()

    def ready(self) -> None:
        """Create the missing tables on the first call, unless the settings leave that to migrations."""
        self.refuse_fork()
        if not self._ready and self.settings.create_tables:
            self.create_tables()
        self._ready = True

    def status(self, *, count_max: int = COUNT_MAX) -> list[OutboxTopicStatus]:
        """Return the status of every topic: how many messages wait, the age of the oldest, the lock, and errors."""
        _check_positive(count_max, "count_max")
        found: list[OutboxTopicStatus] = self._ask(lambda store: store.status(count_max=count_max), missing=[])
        for each in found:
            self.metrics.gauge("outbox_waiting", each.waiting, topic=each.topic)
            self.metrics.gauge("outbox_oldest_seconds", (each.oldest_age_ms or 0) / 1000, topic=each.topic)
            self.metrics.gauge("outbox_parked", each.parked, topic=each.topic)
        return found

    def parked(self, topic: str | None = None, *, limit: int = LIST_MAX) -> list[ParkedMessage]:
        """Return the messages in `kafka_parked`: parked, retrying, or held by one of those."""
        _check_positive(limit, "limit")
        if topic is not None:
            _check_topic(topic)
        return self._ask(lambda store: store.parked(topic, limit=limit), missing=[])

    def parked_retry(self, topic: str, id: int | None = None) -> int:
        """Retry parked messages, all of the topic or one, in their original order; return how many."""
        _check_topic(topic)
        return self._ask(lambda store: store.parked_retry(topic, id), missing=0)

    def parked_drop(self, topic: str, id: int | None = None) -> int:
        """Delete parked messages, all of the topic or one, and send those held by them; return how many."""
        _check_topic(topic)
        return self._ask(lambda store: store.parked_drop(topic, id), missing=0)

    def _ask(self, question: Callable[[OutboxStore], R], *, missing: R) -> R:
        """Query the database; return `missing` if its file does not exist, because reading must not create it."""
        self.refuse_fork()
        if self._parts.missing:
            return missing
        self.ready()
        with self._store() as store:
            return question(store)

    def close(self) -> None:
        """Close the connections and the sender, if they were opened."""
        self._parts.close()

    def _store(self) -> AbstractContextManager[OutboxStore]:
        return closing(self._parts.database.connect())


def _unchanged(method: Callable[Concatenate[Outbox, P], R]) -> Callable[Concatenate[AsyncOutbox, P], R]:
    """Return a method of the async form that calls the blocking one, which does not block or returns an awaitable."""

    @wraps(method)
    def call(self: AsyncOutbox, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return method(self.blocking, *args, **kwargs)

    return call


def _in_thread(
    method: Callable[Concatenate[Outbox, P], R],
) -> Callable[Concatenate[AsyncOutbox, P], Coroutine[Any, Any, R]]:
    """Return a method of the async form that runs the blocking one in a thread."""

    @wraps(method)
    async def call(self: AsyncOutbox, /, *args: P.args, **kwargs: P.kwargs) -> R:
        self.blocking.refuse_fork()  # here, because the threads that would run it may not exist
        return await asyncio.to_thread(method, self.blocking, *args, **kwargs)

    return call


class AsyncOutbox:
    """The async form of `Outbox`, with the same names; `blocking` is the outbox itself."""

    def __init__(self, outbox: Outbox) -> None:
        self.blocking = outbox
        self.settings = outbox.settings

    @property
    def url(self) -> str:
        """The URL of the outbox's database in SQLAlchemy's form; a password in it is not hidden."""
        return self.blocking.url

    publish = _unchanged(Outbox.publish)
    publish_list = _unchanged(Outbox.publish_list)
    append = _unchanged(Outbox.append)
    use = _unchanged(Outbox.use)
    publish_alone = _in_thread(Outbox.publish_alone)
    create_tables = _in_thread(Outbox.create_tables)
    status = _in_thread(Outbox.status)
    parked = _in_thread(Outbox.parked)
    parked_retry = _in_thread(Outbox.parked_retry)
    parked_drop = _in_thread(Outbox.parked_drop)
    close = _in_thread(Outbox.close)

    async def relay(self, *, threads: int | None = None, once: bool = False) -> int:
        """Relay until cancelled or, with `once`, until nothing is left that can be sent; return how many were sent."""
        self.blocking.refuse_fork()
        relay = await asyncio.to_thread(self.blocking.new_relay, threads=threads)
        running = asyncio.ensure_future(asyncio.to_thread(relay.run, once=once))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            relay.stop()
            await running
            raise

    @asynccontextmanager
    async def relaying(self, *, threads: int | None = None) -> AsyncIterator[Relay]:
        """Run a relay in the background of an `async with` block."""
        self.blocking.refuse_fork()
        relay = await asyncio.to_thread(self.blocking.new_relay, threads=threads)
        running = asyncio.ensure_future(asyncio.to_thread(relay.run))
        try:
            yield relay
        finally:
            relay.stop()
            await running


def _check_positive(value: object, name: str) -> None:
    if type(value) is not int or not 1 <= value <= INT_MAX:
        raise InvalidInput(f"{name} must be a number from 1 to {INT_MAX:,}, not {value!r}")


def _check_topic(topic: object) -> None:
    """Raise InvalidInput unless the topic is text. Whether it exists is not checked: journals' topics have a prefix."""
    if not isinstance(topic, str) or "\x00" in topic:
        raise InvalidInput(f"a topic must be a string, not {topic!r}")
    encode_text(topic, "a topic")
