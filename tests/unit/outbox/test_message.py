"""Which messages `publish` accepts, and through which backend it publishes them."""

from __future__ import annotations

from typing import Any

import pytest

from tidebook import outbox
from tidebook.core.errors import InvalidInput
from tidebook.outbox import Message, transaction_adapter
from tidebook.outbox.sql import publish_statements
from tidebook.runtime.autocommit import DRIVERS


@pytest.mark.parametrize(
    "given",
    [
        {"payload": "text"},
        {"payload": 3},
        {"topic": ""},
        {"topic": "a:b"},
        {"topic": b"orders"},
        {"key": 7},
        {"headers": {"tidebook-id": b"x"}},
        {"headers": {"": b"x"}},
        {"headers": {"a": 1}},
        {"headers": [1, 2]},
        {"headers": {"\ud800": b"x"}},
        {"key": "\ud800"},
    ],
)
def test_a_message_that_kafka_could_not_store_is_refused(given: dict[str, Any]) -> None:
    with outbox.use("test") as sent, pytest.raises(InvalidInput):
        outbox.publish(None, **{"topic": "orders", "payload": b"x", **given})
    assert sent.messages == []


def test_the_test_backend_collects_messages_only_within_its_block() -> None:
    with outbox.use("test") as sent:
        outbox.publish(None, topic="orders", key="k", payload=bytearray(b"x"), headers={"a": None})
        outbox.publish_list(None, [Message("orders", b"y")])
    assert sent.messages == [Message("orders", b"x", b"k", None, (("a", None),)), Message("orders", b"y")]
    with pytest.raises(InvalidInput, match="is not a session or connection"):
        outbox.publish(None, topic="orders", payload=b"x")


def test_publishing_without_the_database_needs_a_book() -> None:
    with pytest.raises(InvalidInput, match="book"), outbox.use("kafka"):
        pass


def test_every_recognised_driver_has_a_dialect() -> None:
    assert set(transaction_adapter._DRIVERS) == DRIVERS


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(InvalidInput, match="is not a backend"):
        outbox.configure("fax")  # type: ignore[arg-type]


@pytest.mark.parametrize("style", ["format", "qmark", "dollar"])
def test_a_statement_has_a_placeholder_for_each_parameter(style: Any) -> None:
    messages = [Message("orders", b"x" * 2000, key=b"k")] * 3000
    dialect: Any = {"format": "mysql", "qmark": "sqlite", "dollar": "postgresql"}[style]
    rows = 0
    for sql, parameters in publish_statements(dialect, style, messages, ordered=False):
        marks = sql.count({"format": "%s", "qmark": "?", "dollar": "$"}[style])
        assert marks == len(parameters)
        rows += len(parameters) // 5
    assert rows == 3000


def test_locks_are_taken_in_one_order_whatever_the_order_of_messages() -> None:
    messages = [Message("orders", b"", key=str(n).encode()) for n in range(50)]
    forward = list(publish_statements("postgresql", "format", messages, ordered=True))
    backward = list(publish_statements("postgresql", "format", messages[::-1], ordered=True))
    assert forward[:-1] == backward[:-1]
    assert len(forward) == 51
