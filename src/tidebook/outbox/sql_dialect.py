"""The SQL fragments in which the outbox's databases differ."""

from __future__ import annotations

import msgspec


class SqlDialect(msgspec.Struct, frozen=True, kw_only=True):
    """Fragments of one dialect. `{0}` is replaced by a column or a number of milliseconds."""

    #: The database's clock, read when the statement runs.
    now: str
    #: The time that many milliseconds after now.
    later: str
    #: The time that many milliseconds before now.
    ago: str
    #: Milliseconds since the time in a column.
    age: str
    #: The time in a column, in milliseconds since 1970.
    epoch: str
    #: Minutes since 1970.
    minute: str
    #: Seconds left of the current minute.
    seconds_left: str
    #: The column `key`, quoted.
    key: str
    #: The column `partition`, quoted.
    partition: str
    #: The beginning and end of an INSERT that skips existing rows.
    insert_new: tuple[str, str]
    #: The end of an INSERT of offsets that replaces existing rows.
    upsert_offset: str
    #: The end of a SELECT that locks its rows.
    for_update: str
    #: The length of a column of bytes.
    size: str


POSTGRES = SqlDialect(
    now="clock_timestamp()",
    later="(clock_timestamp() + {0} * interval '1 millisecond')",
    ago="(clock_timestamp() - {0} * interval '1 millisecond')",
    age="(extract(epoch FROM clock_timestamp() - {0}) * 1000)::bigint",
    epoch="(extract(epoch FROM {0}) * 1000)::bigint",
    minute="floor(extract(epoch FROM clock_timestamp()) / 60)::bigint",
    seconds_left="(60 - floor(extract(epoch FROM clock_timestamp()))::bigint % 60)",
    key="key",
    partition="partition",
    insert_new=("INSERT", "ON CONFLICT DO NOTHING"),
    upsert_offset="ON CONFLICT (topic, partition) DO UPDATE SET scan_from = excluded.scan_from",
    for_update="FOR UPDATE",
    size="octet_length({0})",
)

MYSQL = SqlDialect(
    now="UTC_TIMESTAMP(6)",
    later="(UTC_TIMESTAMP(6) + INTERVAL {0} * 1000 MICROSECOND)",
    ago="(UTC_TIMESTAMP(6) - INTERVAL {0} * 1000 MICROSECOND)",
    age="(TIMESTAMPDIFF(MICROSECOND, {0}, UTC_TIMESTAMP(6)) DIV 1000)",
    epoch="(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', {0}) DIV 1000)",
    minute="(TIMESTAMPDIFF(SECOND, '1970-01-01', UTC_TIMESTAMP()) DIV 60)",
    seconds_left="(60 - MOD(TIMESTAMPDIFF(SECOND, '1970-01-01', UTC_TIMESTAMP()), 60))",
    key="`key`",
    partition="`partition`",
    insert_new=("INSERT IGNORE", ""),
    upsert_offset="ON DUPLICATE KEY UPDATE scan_from = VALUES(scan_from)",
    for_update="FOR UPDATE",
    size="OCTET_LENGTH({0})",
)

_SQLITE_NOW = "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)"

SQLITE = SqlDialect(
    now=_SQLITE_NOW,
    later=f"({_SQLITE_NOW} + {{0}})",
    ago=f"({_SQLITE_NOW} - {{0}})",
    age=f"({_SQLITE_NOW} - {{0}})",
    epoch="{0}",
    minute=f"({_SQLITE_NOW} / 60000)",
    seconds_left=f"(60 - {_SQLITE_NOW} / 1000 % 60)",
    key='"key"',
    partition="partition",
    insert_new=("INSERT OR IGNORE", ""),
    upsert_offset="ON CONFLICT (topic, partition) DO UPDATE SET scan_from = excluded.scan_from",
    for_update="",  # the transaction holds the only write lock
    size="length({0})",
)
