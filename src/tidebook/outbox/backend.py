"""Where `publish` puts messages: the database (the outbox), Kafka itself, or a list for a test."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, Protocol

from tidebook.core.errors import InvalidInput
from tidebook.outbox.caller import caller, is_async_driver, is_async_sqlalchemy, session_of
from tidebook.outbox.message import Message
from tidebook.outbox.wake import nudge
from tidebook.sql.queries.outbox_publish import publish_statements

BackendName = Literal["db", "kafka", "kafka_async", "test"]


class Backend(Protocol):
    """What takes published messages."""

    def publish(self, target: Any, messages: Sequence[Message], *, ordered: bool) -> Any:
        """Take them; the result is awaitable where `target` is async."""
        ...


class DatabaseBackend:
    """Writes the messages into `kafka_messages` in the caller's transaction."""

    def publish(self, target: Any, messages: Sequence[Message], *, ordered: bool) -> Any:
        target = session_of(target)
        if is_async_sqlalchemy(target):
            return target.run_sync(lambda inner: self.publish(inner, messages, ordered=ordered))
        to = caller(target)
        statements = publish_statements(to.dialect, to.style, messages, ordered=ordered)
        if is_async_driver(target):
            return to.run_async(statements)
        to.run(statements)
        nudge()
        return None


class TestBackend:
    """Collects the messages; the caller's transaction is neither asked for nor touched."""

    __test__ = False

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def publish(self, target: Any, messages: Sequence[Message], *, ordered: bool) -> Any:
        self.messages += messages
        return _done() if _is_async(target) else None


class Sender(Protocol):
    """Sends to Kafka at once."""

    def send(self, messages: Sequence[Message], *, wait: bool) -> None:
        """Send them in order; `wait` for every acknowledgement, else only for room in the queue."""
        ...


class KafkaBackend:
    """Sends past the database: when the caller's transaction rolls back, the messages are out all the same."""

    def __init__(self, sender: Sender, *, wait: bool) -> None:
        self._sender = sender
        self._wait = wait

    def publish(self, target: Any, messages: Sequence[Message], *, ordered: bool) -> Any:
        if _is_async(target):
            return _in_thread(self._sender, messages, wait=self._wait)
        self._sender.send(messages, wait=self._wait)
        return None


def _is_async(target: Any) -> bool:
    target = session_of(target)
    return is_async_sqlalchemy(target) or is_async_driver(target)


async def _done() -> None:
    return None


async def _in_thread(sender: Sender, messages: Sequence[Message], *, wait: bool) -> None:
    await asyncio.to_thread(sender.send, messages, wait=wait)


_default: Backend = DatabaseBackend()
_chosen: ContextVar[Backend | None] = ContextVar("tidebook_outbox_backend", default=None)


def current() -> Backend:
    """The backend of this `with` block, or the process's."""
    return of_block() or _default


def of_block() -> Backend | None:
    """The backend of this `with` block, if there is one."""
    return _chosen.get()


def backend(name: BackendName, sender: Sender | None = None) -> Backend:
    """A backend by its name; the two that send to Kafka need a sender, which a book has."""
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
            raise InvalidInput(f"{name!r} is no backend: there are db, kafka, kafka_async and test")


@contextmanager
def use(choice: BackendName | Backend) -> Iterator[Any]:
    """Publish through another backend inside a `with` block, in this thread or task only.

    >>> with use("test") as sent:
    ...     len(sent.messages)
    0
    """
    made = _made(choice)
    token = _chosen.set(made)
    try:
        yield made
    finally:
        _chosen.reset(token)


def configure(choice: BackendName | Backend) -> None:
    """Choose the backend of the whole process, as settings do at its start."""
    global _default
    _default = _made(choice)


def _made(choice: BackendName | Backend) -> Backend:
    if isinstance(choice, str):
        return backend(choice)
    if not callable(getattr(choice, "publish", None)):
        raise InvalidInput(f"{choice!r} is no backend: give its name, or one that a book made")
    return choice
