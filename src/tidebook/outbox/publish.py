"""Publishing inside the caller's transaction: the messages exist when, and only when, it commits."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Mapping
from typing import Any, Protocol, overload

from tidebook.outbox.backend import current
from tidebook.outbox.caller import caller, is_async_driver, is_async_sqlalchemy, session_of
from tidebook.outbox.message import Message, all_checked, message
from tidebook.sql.migrate.outbox import create_statements
from tidebook.sql.queries.outbox_publish import Statement

Value = bytes | str | None
Payload = bytes | bytearray | memoryview | None
Pairs = Mapping[str, Value] | Iterable[tuple[str, Value]]


class AsyncSession(Protocol):
    """SQLAlchemy's AsyncSession and AsyncConnection, by their shape."""

    def run_sync(self, fn: Any, *args: Any, **kwargs: Any) -> Awaitable[Any]: ...


@overload
def publish(
    target: AsyncSession,
    *,
    topic: str,
    payload: Payload,
    key: Value = ...,
    partition_key: Value = ...,
    headers: Pairs | None = ...,
    ordered: bool = ...,
) -> Awaitable[None]: ...
@overload
def publish(
    target: Any,
    *,
    topic: str,
    payload: Payload,
    key: Value = ...,
    partition_key: Value = ...,
    headers: Pairs | None = ...,
    ordered: bool = ...,
) -> Any: ...
def publish(
    target: Any,
    *,
    topic: str,
    payload: Payload,
    key: Value = None,
    partition_key: Value = None,
    headers: Pairs | None = None,
    ordered: bool = False,
) -> Any:
    """Publish one message in the transaction of `target`; with an async session or connection, await the result.

    >>> with use("test") as sent:
    ...     publish(None, topic="orders", key=b"1", payload=b"...", headers={"kind": b"paid"})
    >>> sent.messages[0].headers
    (('kind', b'paid'),)
    """
    made = message(topic=topic, payload=payload, key=key, partition_key=partition_key, headers=headers)
    return current().publish(target, [made], ordered=ordered)


def publish_list(target: Any, messages: Iterable[Message], *, ordered: bool = False) -> Any:
    """Publish many messages in one or few statements, in their order; see `publish`.

    `ordered=True` makes the order of ids the order of commits for each topic and key: a second transaction that
    publishes for the same key waits until the first one has ended.
    """
    return current().publish(target, all_checked(messages), ordered=ordered)


def create_tables(target: Any) -> Any:
    """Make the outbox's tables where they are missing, in the transaction of `target`; await it when that is async."""
    target = session_of(target)
    if is_async_sqlalchemy(target):
        return target.run_sync(create_tables)
    to = caller(target, transaction=False)
    statements = [Statement(sql, ()) for sql in create_statements(to.dialect)]
    return to.run_async(statements) if is_async_driver(target) else to.run(statements)
