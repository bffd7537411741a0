"""The statements that publish messages, for any driver's connection."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import islice
from typing import Any, NamedTuple

from tidebook.outbox.dialect import Dialect, Style
from tidebook.outbox.port import ORDER_SLOTS, Publishable, pack_headers

#: Rows per statement: SQLite before 3.32 takes at most 999 parameters.
ROWS_MAX = {"postgresql": 1000, "mysql": 500, "sqlite": 199}
#: Bytes per statement, well below MySQL's default packet of 16 MB; a single message may exceed it.
STATEMENT_BYTES_MAX = 4_000_000
COLUMNS = 5


class SqlStatement(NamedTuple):
    """SQL with its parameters."""

    sql: str
    parameters: tuple[Any, ...]


def publish_statements(
    dialect: Dialect, style: Style, messages: Sequence[Publishable], *, ordered: bool
) -> Iterator[SqlStatement]:
    """Yield the statements that insert the messages, in order; `ordered` first locks each topic and key."""
    if ordered and messages:
        yield from _order_locks(dialect, style, messages)
    for part in _parts(messages, ROWS_MAX[dialect]):
        if style == "binary":
            yield _unnest(part)
        else:
            yield _values(dialect, style, part)


def _unnest(part: Sequence[Publishable]) -> SqlStatement:
    """Return an INSERT with one binary array per column: less than half the cost of a parameter per value."""
    columns = zip(
        *((m.topic, m.key, m.partition_key, m.payload, pack_headers(m.headers)) for m in part),
        strict=True,
    )
    return SqlStatement(_UNNEST, tuple(map(list, columns)))


_UNNEST = (
    "INSERT INTO kafka_messages (topic, key, partition_key, payload, headers) "
    "SELECT * FROM unnest(%b::text[], %b::bytea[], %b::bytea[], %b::bytea[], %b::bytea[])"
)
_KEY = {"postgresql": "key", "mysql": "`key`", "sqlite": '"key"'}


def _values(dialect: Dialect, style: Style, part: Sequence[Publishable]) -> SqlStatement:
    rows = ", ".join(f"({', '.join(marks)})" for marks in _by(placeholders(style, COLUMNS * len(part)), COLUMNS))
    sql = f"INSERT INTO kafka_messages (topic, {_KEY[dialect]}, partition_key, payload, headers) VALUES {rows}"
    values = [v for m in part for v in (m.topic, m.key, m.partition_key, m.payload, pack_headers(m.headers))]
    return SqlStatement(sql, tuple(values))


def placeholders(style: Style, count: int) -> list[str]:
    """Return `count` parameter placeholders in the driver's style."""
    match style:
        case "format":
            return ["%s"] * count
        case "binary":
            return ["%b"] * count
        case "qmark":
            return ["?"] * count
        case "dollar":
            return [f"${n}" for n in range(1, count + 1)]


def _order_locks(dialect: Dialect, style: Style, messages: Sequence[Publishable]) -> Iterator[SqlStatement]:
    """Yield statements that lock each topic and key, in one global order, so that callers cannot deadlock."""
    numbers = sorted({order_number(m.topic, order_key(m)) for m in messages})
    match dialect:
        case "postgresql":
            for number in numbers:
                yield SqlStatement(f"SELECT pg_advisory_xact_lock({number})", ())
        case "mysql":
            slots = sorted({number % ORDER_SLOTS for number in numbers})
            marks = ", ".join(placeholders(style, len(slots)))
            sql = f"SELECT slot FROM kafka_order_lock WHERE slot IN ({marks}) ORDER BY slot FOR UPDATE"
            yield SqlStatement(sql, tuple(slots))
        case "sqlite":
            return  # SQLite has one writer at a time, from a transaction's first write to its commit


def order_key(message: Publishable) -> bytes | None:
    """Return the key by which order is kept: messages that share it share a partition."""
    return message.key if message.partition_key is None else message.partition_key


def order_number(topic: str, key: bytes | None) -> int:
    """Return a topic and key as a signed 64-bit hash."""
    digest = blake2b(topic.encode() + b"\0" + (key or b""), digest_size=8, person=b"tidebook-outbox").digest()
    return int.from_bytes(digest, "big", signed=True)


def _parts(messages: Iterable[Publishable], rows_max: int) -> Iterator[list[Publishable]]:
    part: list[Publishable] = []
    size = 0
    for message in messages:
        bytes_ = len(message.payload or b"") + len(message.key or b"") + 100
        if part and (len(part) >= rows_max or size + bytes_ > STATEMENT_BYTES_MAX):
            yield part
            part, size = [], 0
        part.append(message)
        size += bytes_
    if part:
        yield part


def _by(items: Iterable[str], count: int) -> Iterator[list[str]]:
    rest = iter(items)
    while some := list(islice(rest, count)):
        yield some
