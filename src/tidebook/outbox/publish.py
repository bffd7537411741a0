"""Publish in the caller's transaction: the messages exist if and only if it commits."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Mapping
from typing import Any, Protocol, overload

from tidebook.outbox.backend import current
from tidebook.outbox.message import Message, message, validate_messages
from tidebook.outbox.migrations.tables import create_statements
from tidebook.outbox.sql_publish import SqlStatement
from tidebook.outbox.transaction_adapter import adapt_transaction, is_async_driver, is_async_sqlalchemy, session_of

Value = bytes | str | None
Payload = bytes | bytearray | memoryview | None
Pairs = Mapping[str, Value] | Iterable[tuple[str, Value]]


class AsyncSession(Protocol):
    """The method by which SQLAlchemy's AsyncSession and AsyncConnection are recognised."""

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
    """Publish one message in the transaction of `target`; await the result if `target` is async.

    >>> with use("test") as sent:
    ...     publish(None, topic="orders", key=b"1", payload=b"...", headers={"kind": b"paid"})
    >>> sent.messages[0].headers
    (('kind', b'paid'),)
    """
    new_message = message(topic=topic, payload=payload, key=key, partition_key=partition_key, headers=headers)
    return current().publish(target, [new_message], ordered=ordered)


def publish_list(target: Any, messages: Iterable[Message], *, ordered: bool = False) -> Any:
    """Publish many messages, in order, in as few statements as possible; see `publish`.

    With `ordered=True`, messages of the same topic and key are relayed in the order of their commits: a second
    transaction that publishes for the same key waits until the first one ends.
    """
    return current().publish(target, validate_messages(messages), ordered=ordered)


def create_tables(target: Any) -> Any:
    """Create the missing outbox tables in the transaction of `target`; await the result if `target` is async."""
    target = session_of(target)
    if is_async_sqlalchemy(target):
        return target.run_sync(create_tables)
    adapter = adapt_transaction(target, transaction=False)
    statements = [SqlStatement(sql, ()) for sql in create_statements(adapter.dialect)]
    return adapter.run_async(statements) if is_async_driver(target) else adapter.run(statements)
