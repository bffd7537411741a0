"""Publish messages in the caller's transaction: they exist if and only if it commits.

Other backends send to Kafka itself, or collect the messages in a list for tests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, Unpack, overload

from tidebook.core.errors import InvalidInput
from tidebook.outbox.message import Message, MessageFields, message, validate_messages, with_header
from tidebook.outbox.migrations.tables import create_statements
from tidebook.outbox.relay import nudge
from tidebook.outbox.settings import BackendName
from tidebook.outbox.sql import SqlStatement, publish_statements
from tidebook.outbox.transaction_adapter import adapt_transaction, is_async_driver, is_async_sqlalchemy, session_of
from tidebook.runtime import tracing


class Backend(Protocol):
    """A destination of published messages."""

    def publish(self, target: Any, messages: Sequence[Message], *, ordered: bool) -> Any:
        """Accept the messages for delivery; return an awaitable if `target` is async."""


class DatabaseBackend:
    """Inserts the messages into `kafka_messages` in the caller's transaction."""

    def publish(self, target: Any, messages: Sequence[Message], *, ordered: bool) -> Any:
        target = session_of(target)
        if is_async_sqlalchemy(target):
            return target.run_sync(lambda inner: self.publish(inner, messages, ordered=ordered))
        adapter = adapt_transaction(target)
        statements = publish_statements(adapter.dialect, adapter.style, messages, ordered=ordered)
        if is_async_driver(target):
            return adapter.run_async(statements)
        adapter.run(statements)
        nudge()
        return None


class TestBackend:
    """Collects the messages in a list and ignores the caller's transaction."""

    __test__ = False

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def publish(self, target: Any, messages: Sequence[Message], *, ordered: bool) -> Any:
        self.messages += messages
        return asyncio.sleep(0) if _is_async(target) else None


class Sender(Protocol):
    """Sends messages to Kafka immediately."""

    def send(self, messages: Sequence[Message], *, wait: bool) -> None:
        """Send the messages in order; with `wait`, return once all are acknowledged, otherwise once all are queued."""


class KafkaBackend:
    """Sends to Kafka without the outbox: the messages are sent even if the caller's transaction rolls back."""

    def __init__(self, sender: Sender, *, wait: bool) -> None:
        self._sender = sender
        self._wait = wait

    def publish(self, target: Any, messages: Sequence[Message], *, ordered: bool) -> Any:
        if _is_async(target):
            return asyncio.to_thread(self._sender.send, messages, wait=self._wait)
        self._sender.send(messages, wait=self._wait)
        return None


def _is_async(target: Any) -> bool:
    target = session_of(target)
    return is_async_sqlalchemy(target) or is_async_driver(target)


_default: Backend = DatabaseBackend()
_chosen: ContextVar[Backend | None] = ContextVar("tidebook_outbox_backend", default=None)


def block_backend() -> Backend | None:
    """Return the backend of the enclosing `use` block, if any."""
    return _chosen.get()


def backend(name: BackendName, sender: Sender | None = None) -> Backend:
    """Return a new backend by name; the two that send to Kafka need a sender, which a book provides."""
    match name:
        case "db":
            return DatabaseBackend()
        case "test":
            return TestBackend()
        case "kafka" | "kafka_async":
            if sender is None:
                raise InvalidInput(f"backend {name!r} needs a book with a Kafka log: use book.outbox.use({name!r})")
            return KafkaBackend(sender, wait=name == "kafka")
        case _:
            raise InvalidInput(f"{name!r} is not a backend: use db, kafka, kafka_async or test")


@contextmanager
def use(choice: BackendName | Backend) -> Iterator[Any]:
    """Publish through another backend inside a `with` block, in this thread or task only.

    >>> with use("test") as sent:
    ...     len(sent.messages)
    0
    """
    selected = _as_backend(choice)
    token = _chosen.set(selected)
    try:
        yield selected
    finally:
        _chosen.reset(token)


def configure(choice: BackendName | Backend) -> None:
    """Set the backend of the whole process; call it once at startup."""
    global _default
    _default = _as_backend(choice)


def _as_backend(choice: BackendName | Backend) -> Backend:
    if isinstance(choice, str):
        return backend(choice)
    if not callable(getattr(choice, "publish", None)):
        raise InvalidInput(f"{choice!r} is not a backend: pass a name, or a backend of a book")
    return choice


# ---- publishing


class AsyncSession(Protocol):
    """The method by which SQLAlchemy's AsyncSession and AsyncConnection are recognized."""

    def run_sync(self, fn: Any, *args: Any, **kwargs: Any) -> Awaitable[Any]: ...


@overload
def publish(target: AsyncSession, *, ordered: bool = ..., **fields: Unpack[MessageFields]) -> Awaitable[None]: ...
@overload
def publish(target: Any, *, ordered: bool = ..., **fields: Unpack[MessageFields]) -> Any: ...
def publish(target: Any, *, ordered: bool = False, **fields: Unpack[MessageFields]) -> Any:
    """Publish one message in the transaction of `target`; await the result if `target` is async.

    >>> with use("test") as sent:
    ...     publish(None, topic="orders", key=b"1", payload=b"...", headers={"kind": b"paid"})
    >>> sent.messages[0].headers
    (('kind', b'paid'),)
    """
    return publish_through(block_backend() or _default, target, [message(**fields)], ordered=ordered)


def publish_list(target: Any, messages: Iterable[Message], *, ordered: bool = False) -> Any:
    """Publish many messages, in order, in as few statements as possible; see `publish`.

    With `ordered=True`, messages of the same topic and key are relayed in the order of their commits: a second
    transaction that publishes for the same key waits until the first one ends.
    """
    return publish_through(block_backend() or _default, target, validate_messages(messages), ordered=ordered)


def publish_through(backend: Backend, target: Any, messages: list[Message], *, ordered: bool) -> Any:
    """Publish validated messages; if tracing is on, they carry the trace context as a header."""
    if not tracing.is_on():
        return backend.publish(target, messages, ordered=ordered)
    with tracing.span("outbox.publish", messages=len(messages)) as span:
        if span is not None and span.carried is not None:
            messages = [with_header(each, tracing.KEY, span.carried.encode()) for each in messages]
        return backend.publish(target, messages, ordered=ordered)


def create_tables(target: Any) -> Any:
    """Create the missing outbox tables in the transaction of `target`; await the result if `target` is async."""
    target = session_of(target)
    if is_async_sqlalchemy(target):
        return target.run_sync(create_tables)
    adapter = adapt_transaction(target, transaction=False)
    statements = [SqlStatement(sql, ()) for sql in create_statements(adapter.dialect)]
    return adapter.run_async(statements) if is_async_driver(target) else adapter.run(statements)
