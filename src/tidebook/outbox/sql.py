"""The outbox's SQL in its three dialects: the statements that publish messages, and those of an `OutboxStore`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Any, Literal, NamedTuple

import msgspec

from tidebook.core.errors import Corrupt, InvalidInput
from tidebook.outbox.message import Message, order_key, pack_headers

Dialect = Literal["postgresql", "mysql", "sqlite"]
#: How a driver writes placeholders: `%s`, `%b` (psycopg, binary), `?`, or `$1`.
Style = Literal["format", "binary", "qmark", "dollar"]

#: MySQL: the number of rows of `kafka_order_lock`, over which `ordered=True` spreads its locks.
ORDER_SLOTS = 256
#: Rows per statement: SQLite before 3.32 takes at most 999 parameters.
ROWS_MAX = {"postgresql": 1000, "mysql": 500, "sqlite": 199}
#: Bytes per statement, well below MySQL's default packet of 16 MB; a single message may exceed it.
STATEMENT_BYTES_MAX = 4_000_000
#: Ids in more runs than this are listed one by one.
RUNS_MAX = 8

_NAMES: dict[str, Dialect] = {
    "postgresql": "postgresql",
    "postgres": "postgresql",
    "mysql": "mysql",
    "mariadb": "mysql",
    "sqlite": "sqlite",
}


def dialect(name: str) -> Dialect:
    """Return the dialect for any of a database's names.

    >>> dialect("mariadb")
    'mysql'
    """
    found = _NAMES.get(name.lower())
    if found is None:
        raise InvalidInput(
            f"{name!r} is not a database that the outbox supports: use postgresql, mysql (or MariaDB) or sqlite"
        )
    return found


# ---- publishing


class SqlStatement(NamedTuple):
    """SQL with its parameters."""

    sql: str
    parameters: tuple[Any, ...]


#: One binary array per column: less than half the cost of a parameter per value.
_UNNEST = (
    "INSERT INTO kafka_messages (topic, key, partition_key, payload, headers) "
    "SELECT * FROM unnest(%b::text[], %b::bytea[], %b::bytea[], %b::bytea[], %b::bytea[])"
)


def publish_statements(
    dialect: Dialect, style: Style, messages: Sequence[Message], *, ordered: bool
) -> Iterator[SqlStatement]:
    """Yield the statements that insert the messages, in order; `ordered` first locks each topic and key."""
    if ordered and messages:
        yield from _order_locks(dialect, style, messages)
    for part in _chunks(messages, ROWS_MAX[dialect]):
        rows = [(m.topic, m.key, m.partition_key, m.payload, pack_headers(m.headers)) for m in part]
        if style == "binary":
            yield SqlStatement(_UNNEST, tuple(map(list, zip(*rows, strict=True))))
            continue
        marks = iter(_placeholders(style, 5 * len(rows)))
        values = ", ".join(f"({', '.join(row)})" for row in zip(*[marks] * 5, strict=True))
        columns = f"topic, {SQL[dialect].key}, partition_key, payload, headers"
        sql = f"INSERT INTO kafka_messages ({columns}) VALUES {values}"
        yield SqlStatement(sql, tuple(value for row in rows for value in row))


def _placeholders(style: Style, count: int) -> list[str]:
    if style == "dollar":
        return [f"${n}" for n in range(1, count + 1)]
    return [{"format": "%s", "binary": "%b", "qmark": "?"}[style]] * count


def _order_locks(dialect: Dialect, style: Style, messages: Sequence[Message]) -> Iterator[SqlStatement]:
    """Yield statements that lock each topic and key, in one global order, so that callers cannot deadlock."""
    numbers = sorted({order_number(m.topic, order_key(m)) for m in messages})
    match dialect:
        case "postgresql":
            for number in numbers:
                yield SqlStatement(f"SELECT pg_advisory_xact_lock({number})", ())
        case "mysql":
            slots = sorted({number % ORDER_SLOTS for number in numbers})
            marks = ", ".join(_placeholders(style, len(slots)))
            sql = f"SELECT slot FROM kafka_order_lock WHERE slot IN ({marks}) ORDER BY slot FOR UPDATE"
            yield SqlStatement(sql, tuple(slots))
        case "sqlite":
            return  # SQLite has one writer at a time, from a transaction's first write to its commit


def order_number(topic: str, key: bytes | None) -> int:
    """Return a topic and key as a signed 64-bit hash."""
    digest = blake2b(topic.encode() + b"\0" + (key or b""), digest_size=8, person=b"tidebook-outbox").digest()
    return int.from_bytes(digest, "big", signed=True)


def _chunks(messages: Iterable[Message], rows_max: int) -> Iterator[list[Message]]:
    part: list[Message] = []
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


# ---- ids


def runs(ids: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first and last id of each run of consecutive ids; `ids` must be increasing.

    >>> runs([1, 2, 3, 7])
    [(1, 3), (7, 7)]
    """
    if ids and ids[-1] - ids[0] == len(ids) - 1:  # one run, as in most batches
        return [(ids[0], ids[-1])]
    found: list[tuple[int, int]] = []
    for id in ids:
        if found and id == found[-1][1] + 1:
            found[-1] = found[-1][0], id
        else:
            found.append((id, id))
    return found


_decode_ids = msgspec.msgpack.Decoder(list[tuple[int, int]]).decode


def pack_ids(ids: Sequence[int]) -> bytes:
    """Return increasing ids as bytes: for each run the gap before it and its length."""
    packed: list[tuple[int, int]] = []
    at = 0
    for first, last in runs(ids):
        packed.append((first - at, last - first))
        at = last + 1
    return msgspec.msgpack.encode(packed)


def unpack_ids(packed: bytes) -> tuple[int, ...]:
    """Return the ids of packed bytes; raise Corrupt if they are damaged. The inverse of `pack_ids`."""
    ids: list[int] = []
    at = 0
    try:
        for gap, length in _decode_ids(packed):
            ids += range(at + gap, at + gap + length + 1)
            at += gap + length + 1
    except msgspec.DecodeError as error:
        raise Corrupt(f"kafka_topic_info.session_ids is damaged: {error}") from error
    return tuple(ids)


def id_condition(ids: Sequence[int]) -> SqlStatement:
    """Return an SQL condition that is true for exactly these increasing ids: each range contains only ids of the list.

    >>> id_condition([1, 2, 3, 9])
    SqlStatement(sql='(id BETWEEN %s AND %s OR id BETWEEN %s AND %s)', parameters=(1, 3, 9, 9))
    """
    spans = runs(ids)
    if len(spans) <= RUNS_MAX:
        sql = f"({' OR '.join(['id BETWEEN %s AND %s'] * len(spans))})"
        return SqlStatement(sql, tuple(id for span in spans for id in span))
    return SqlStatement(f"id IN ({', '.join(map(str, ids))})", ())


# ---- the store's statements

_TOPICS_BY_INDEX = """\
WITH RECURSIVE found(topic) AS (
    SELECT (SELECT topic FROM kafka_messages ORDER BY topic LIMIT 1)
    UNION ALL
    SELECT (SELECT m.topic FROM kafka_messages m WHERE m.topic > found.topic ORDER BY m.topic LIMIT 1)
    FROM found WHERE found.topic IS NOT NULL
)
SELECT topic FROM found WHERE topic IS NOT NULL"""


class SqlDialect(msgspec.Struct, frozen=True, kw_only=True):
    """The fragments in which the databases differ. `{0}` is replaced by a column or a number of milliseconds."""

    #: The database's clock, read when the statement runs.
    now: str
    #: The time `{0}` milliseconds from now.
    later: str
    #: The time `{0}` in milliseconds since 1970.
    epoch: str
    #: Minutes since 1970.
    minute: str
    #: The columns `key` and `partition`, quoted where they must be.
    key: str = "key"
    partition: str = "partition"
    #: The beginning and end of an INSERT that skips existing rows.
    insert_new: tuple[str, str] = ("INSERT", "ON CONFLICT DO NOTHING")
    #: The end of an INSERT of offsets that replaces existing rows.
    upsert_offset: str = "ON CONFLICT (topic, partition) DO UPDATE SET scan_from = excluded.scan_from"
    #: The end of a SELECT that locks its rows.
    for_update: str = "FOR UPDATE"
    #: For the scan floor: the oldest transaction id still running, and the id of this one; 0 where there is no floor.
    transaction_numbers: str = "0, 0"
    #: Selects every topic that has a waiting row, with one index probe per topic.
    topics_in_use: str = _TOPICS_BY_INDEX

    def age(self, column: str) -> str:
        """Return an expression for the milliseconds since the time in a column."""
        return f"({self.epoch.format(self.now)} - {self.epoch.format(column)})"


_SQLITE_NOW = "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)"

SQL: dict[Dialect, SqlDialect] = {
    "postgresql": SqlDialect(
        now="clock_timestamp()",
        later="(clock_timestamp() + {0} * interval '1 millisecond')",
        epoch="(extract(epoch FROM {0}) * 1000)::bigint",
        minute="floor(extract(epoch FROM clock_timestamp()) / 60)::bigint",
        transaction_numbers="pg_snapshot_xmin(pg_current_snapshot())::text::bigint, pg_current_xact_id()::text::bigint",
    ),
    "mysql": SqlDialect(
        now="UTC_TIMESTAMP(6)",
        later="(UTC_TIMESTAMP(6) + INTERVAL {0} * 1000 MICROSECOND)",
        epoch="(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', {0}) DIV 1000)",
        minute="(TIMESTAMPDIFF(SECOND, '1970-01-01', UTC_TIMESTAMP()) DIV 60)",
        key="`key`",
        partition="`partition`",
        insert_new=("INSERT IGNORE", ""),
        upsert_offset="ON DUPLICATE KEY UPDATE scan_from = VALUES(scan_from)",
        topics_in_use="SELECT DISTINCT topic FROM kafka_messages",  # a loose index scan over the primary key
    ),
    "sqlite": SqlDialect(
        now=_SQLITE_NOW,
        later=f"({_SQLITE_NOW} + {{0}})",
        epoch="{0}",
        minute=f"({_SQLITE_NOW} / 60000)",
        for_update="",  # the transaction holds the only write lock
    ),
}


class StoreStatements:
    """The statements of an `OutboxStore` in one dialect. Parameters are written `%s`."""

    def __init__(self, d: SqlDialect) -> None:
        info, held = "UPDATE kafka_topic_info SET", "WHERE topic = %s AND locked_by = %s"
        free = f"(locked_by IS NULL AND (error = 0 OR retry_at <= {d.now}))"
        #: Whether a topic may be locked: it is unlocked and not resting, or the lock is older than the parameter (ms).
        self.lockable = f"({free} OR locked_at < {d.later.format('-%s')})"
        due = f"state = 1 AND retry_at <= {d.now}"
        self.identity = "SELECT uuid, version FROM kafka_outbox"
        self.topics_in_use = d.topics_in_use
        self.topics_with_due = (
            f"SELECT i.topic FROM kafka_topic_info i WHERE {self.lockable} "
            f"AND EXISTS (SELECT 1 FROM kafka_parked p WHERE p.topic = i.topic AND {due})"
        )
        self.topics_waiting = (
            f"SELECT m.topic FROM ({d.topics_in_use}) m LEFT JOIN kafka_topic_info i ON i.topic = m.topic "
            f"WHERE i.topic IS NULL OR {self.lockable} UNION {self.topics_with_due}"
        )
        # ---- the lock
        head, tail = d.insert_new
        self.add_topic = f"{head} INTO kafka_topic_info (topic) VALUES (%s) {tail}"
        self.lock = (
            f"{info} previous_owner = owner, locked_by = %s, owner = %s, locked_at = {d.now}, "
            f"error = 0 WHERE topic = %s AND ({self.lockable} OR locked_by = %s)"
        )
        self.lock_state = (
            f"SELECT previous_owner, session_id, session_ids, {d.age('session_at')}, session_fence, topic_uuid, "
            f"notice_cause, notice FROM kafka_topic_info {held}"
        )
        parked = "CASE WHEN EXISTS (SELECT 1 FROM kafka_parked p WHERE p.topic = i.topic) THEN 1 ELSE 0 END"
        #: One row if the lock is still held; it locks the topic's row until the transaction ends.
        self.guard = f"SELECT rewinds, {d.transaction_numbers}, {parked} FROM kafka_topic_info i {held} {d.for_update}"
        released = "locked_by = NULL, locked_at = NULL, error = 0, retries = 0, retry_at = NULL, reason = NULL"
        self.unlock = f"{info} {released} {held}"
        self.rest = (
            f"{info} locked_by = NULL, locked_at = NULL, error = 1, retries = retries + %s, "
            f"retry_at = {d.later.format('%s')}, reason = %s {held}"
        )
        self.notice = f"{info} notice_cause = %s, notice = %s, notice_at = {d.now} WHERE topic = %s"
        self.rewinds = "SELECT rewinds FROM kafka_topic_info WHERE topic = %s"
        self.lock_topic = f"{self.rewinds} {d.for_update}"
        self.rewind = f"{info} rewinds = rewinds + 1 WHERE topic = %s"
        # ---- sessions. The order matters: MySQL assigns from left to right and uses values that it has just assigned.
        counted = (
            f"minute_before = CASE WHEN minute = {d.minute} THEN minute_before "
            f"WHEN minute = {d.minute} - 1 THEN minute_relayed ELSE 0 END, "
            f"minute_relayed = CASE WHEN minute = {d.minute} THEN minute_relayed ELSE 0 END + %s, "
            f"minute = {d.minute}, relayed = relayed + %s"
        )
        closed = "session_id = NULL, session_ids = NULL, session_at = NULL, session_fence = NULL"
        self.open_session = (
            f"{info} locked_at = {d.now}, session_id = %s, session_ids = %s, session_at = {d.now}, "
            f"session_fence = %s, topic_uuid = %s, {counted} {held}"
        )
        self.opened_at = f"SELECT {d.epoch.format('session_at')} FROM kafka_topic_info WHERE topic = %s"
        self.renew = f"{info} locked_at = {d.now}, {counted} {held}"
        self.close_session = f"{info} locked_at = {d.now}, {closed}, {counted} {held}"
        self.close_and_unlock = f"{info} {released}, {closed}, {counted} {held}"
        self.offsets = f"SELECT {d.partition}, scan_from FROM kafka_topic_offset WHERE topic = %s"
        self.put_offsets = (
            f"INSERT INTO kafka_topic_offset (topic, {d.partition}, scan_from) VALUES {{0}} {d.upsert_offset}"
        )
        # ---- messages
        rows = f"SELECT id, {d.key}, partition_key, payload, headers, tries FROM kafka_messages WHERE topic = %s"
        # The running size bounds the memory of a batch; the first row is always returned.
        self.batch = (
            f"SELECT id, {d.key}, partition_key, payload, headers, tries FROM (SELECT inner_rows.*, "
            "SUM(COALESCE(length(payload), 0)) OVER (ORDER BY id) - COALESCE(length(payload), 0) AS size_before "
            f"FROM ({rows} AND id > %s ORDER BY id LIMIT %s) inner_rows) sized WHERE size_before < %s ORDER BY id"
        )
        self.open_rows = f"{rows} AND {{0}} ORDER BY id"
        self.delete = "DELETE FROM kafka_messages WHERE topic = %s AND {0}"
        self.delete_sent = f"{self.delete} AND EXISTS (SELECT 1 FROM kafka_topic_info {held})"
        # ---- parked messages
        columns = f"topic, id, {d.key}, partition_key, payload, headers, created_at"
        self.parked_heads = "SELECT id, order_key FROM kafka_parked WHERE topic = %s AND state IN ({0})"
        self.due = f"SELECT id, order_key FROM kafka_parked WHERE topic = %s AND {due}"
        self.park = (
            f"INSERT INTO kafka_parked ({columns}, state, order_key, tries, reason, retry_at, parked_at) "
            f"SELECT {columns}, %s, COALESCE(partition_key, {d.key}), %s, %s, {d.later.format('%s')}, {d.now} "
            "FROM kafka_messages WHERE topic = %s AND {0}"
        )
        self.unpark = (
            f"INSERT INTO kafka_messages ({columns}, tries) SELECT {columns}, {{1}} FROM kafka_parked "
            "WHERE topic = %s AND {0}"
        )
        self.delete_parked = "DELETE FROM kafka_parked WHERE topic = %s AND {0}"
        self.held_by = "SELECT id FROM kafka_parked WHERE topic = %s AND state = 0 AND order_key = %s"
        self.parked = (
            "SELECT topic, id, CASE state WHEN 0 THEN 'held' WHEN 1 THEN 'retrying' ELSE 'parked' END, "
            f"{d.key}, COALESCE(length(payload), 0), tries, {d.age('created_at')}, "
            f"{d.age('parked_at')}, reason FROM kafka_parked {{0}} ORDER BY topic, id LIMIT %s"
        )
        # ---- status
        seconds_left = f"(({d.minute} + 1) * 60 - {d.epoch.format(d.now)} / 1000)"
        self.topic_infos = (
            f"SELECT topic, CASE WHEN locked_by IS NULL THEN NULL ELSE owner END, {d.age('locked_at')}, error, "
            f"retries, -{d.age('retry_at')}, reason, notice_cause, notice, {d.age('notice_at')}, "
            "CASE WHEN session_id IS NULL THEN 0 ELSE 1 END, relayed, "
            # The current minute, plus the share of the previous one within the last 60 seconds, rounded up.
            f"CASE WHEN minute = {d.minute} THEN minute_relayed + (minute_before * {seconds_left} + 59) / 60 "
            f"WHEN minute = {d.minute} - 1 THEN (minute_relayed * {seconds_left} + 59) / 60 ELSE 0 END "
            "FROM kafka_topic_info ORDER BY topic"
        )
        self.count = "SELECT count(*) FROM (SELECT 1 FROM kafka_messages WHERE topic = %s LIMIT %s) bounded"
        self.oldest = f"SELECT {d.age('created_at')} FROM kafka_messages WHERE topic = %s ORDER BY id LIMIT 1"
        self.parked_counts = (
            f"SELECT topic, state, count(*), {d.age('MIN(created_at)')} FROM kafka_parked GROUP BY topic, state"
        )
