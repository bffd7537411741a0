"""The SQL statements of queue stores on PostgreSQL, and their parameters.

Lists are passed as array literals: every driver sends a string unchanged, which is far cheaper than converting a list.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Final

from tidebook.queue.port import Failure, LeasedEntry, NewEntry, QueueRef

#: The database's time in milliseconds, at the start of the statement.
NOW: Final = "(extract(epoch FROM statement_timestamp()) * 1000)::bigint"

PUT: Final = """SELECT now_ms, merged FROM {t}_put(%s, %s, %s, %s::text::uuid[], %s::text::smallint[],
    %s::text::smallint[], %s::text::bigint[], %s::text::bigint[], %s::text::smallint[], %s::text::text[],
    %s::text::bytea[], %s::text::text[])"""
CLAIM: Final = "SELECT * FROM {t}_claim(%s, %s, %s::text::bigint[], %s::text::uuid[], %s, %s::smallint, %s, %s)"
_NOTIFY_HELD = """(SELECT count(pg_notify('{s}', %s::text)) FROM
    (SELECT FROM {s}.wake w WHERE w.queue = %s AND w.held LIMIT 1) AS sleeper)"""
# A bundle never changes: a caller that has all its entries has the whole bundle.
FINISH_BUNDLES: Final = """DELETE FROM {t} WHERE queue = %s AND status = 'P' AND keyhash = ANY (%s::text::uuid[])
    AND together IS NOT NULL RETURNING uuid_send(keyhash)"""
FINISH: Final = (
    "SELECT uuid_send(gone), " + _NOTIFY_HELD + " FROM {t}_finish(%s, %s::text::uuid[], %s::text::uuid[],"
    " %s::text::uuid[]) AS gone"
)
EXTEND_BUNDLES: Final = """UPDATE {t} SET lease_until = {now} + %s WHERE queue = %s AND status = 'P'
    AND keyhash = ANY (%s::text::uuid[]) AND together IS NOT NULL RETURNING uuid_send(keyhash), lease_until"""
HEARTBEAT: Final = """SELECT uuid_send(keyhash), lease_until
    FROM {t}_heartbeat(%s, %s, %s::text::uuid[], %s::text::uuid[], %s::text::uuid[])"""
FAIL: Final = """SELECT {t}_fail(%s, %s::smallint, %s::text::uuid[], %s::text::uuid[], %s::text::bigint[],
    %s::text::text[])"""
DUE: Final = """SELECT d.now_ms, d.lease_end, d.ready, d.held, d.upcoming, d.paused
    FROM unnest(%s::text::integer[], %s::text::boolean[]) WITH ORDINALITY AS i (queue, serial, place),
    LATERAL {t}_due(i.queue, i.serial) AS d ORDER BY i.place"""
SWEEP: Final = "SELECT expired, run_out, dead, next_at, now_ms FROM {t}_sweep(%s, %s::smallint)"
ENTRY_COLUMNS: Final = """id, key, status::text, priority, timeouts, inserted_at, process_at, expires_at, started_at,
    lease_until, kind, data"""
#: The same columns of an entry `p` inside a bundle `b`.
PART_COLUMNS: Final = """p.id, p.key, 'P', p.priority, p.timeouts, p.inserted_at, p.process_at, p.expires_at,
    b.started_at, b.lease_until, p.kind, p.data"""
#: The columns of a dead letter `d` and its queue `q`.
LETTER_COLUMNS: Final = """d.id, q.name, d.raised_at, d.reason, d.key, d.priority, d.timeouts, d.inserted_at,
    d.expires_at, d.kind, d.data"""
ENTRIES: Final = (
    "(SELECT * FROM (SELECT "
    + ENTRY_COLUMNS
    + " FROM {t} WHERE queue = %s AND status = 'P' AND lease_until IS NOT NULL"
    " AND together IS NULL UNION ALL SELECT " + PART_COLUMNS + " FROM {t} b, unnest(b.parts) AS p WHERE b.queue = %s"
    " AND b.status = 'P' AND b.lease_until IS NOT NULL AND b.together IS NOT NULL) AS held"
    " ORDER BY priority, process_at, id LIMIT %s) UNION ALL (SELECT " + ENTRY_COLUMNS + " FROM {t}"
    " WHERE queue = %s AND status = 'W' AND priority >= 0 AND expires_at > {now}"
    " ORDER BY priority, process_at, id LIMIT %s)"
)
COUNTS: Final = """SELECT count(*) FILTER (WHERE free AND process_at <= now_ms),
    count(*) FILTER (WHERE free AND process_at > now_ms), count(*) FILTER (WHERE NOT free),
    (SELECT count(*) FROM {s}.dead d WHERE d.queue = %s),
    coalesce(max(now_ms - process_at) FILTER (WHERE free AND process_at <= now_ms), 0),
    coalesce(min(process_at) FILTER (WHERE free), 9223372036854775807),
    (SELECT 1 + cardinality(p.draining) FROM {s}.period p WHERE p.table_name = %s),
    (SELECT q.paused_at FROM {s}.queue q WHERE q.id = %s)
    FROM (SELECT {now} AS now_ms) AS clock, LATERAL (
        SELECT e.process_at, e.expires_at, e.status = 'W' OR e.lease_until <= now_ms AS free
        FROM {t} e WHERE e.queue = %s AND e.together IS NULL
        UNION ALL SELECT p.process_at, p.expires_at, b.lease_until <= now_ms
        FROM {t} b, unnest(b.parts) AS p WHERE b.queue = %s AND b.status = 'P' AND b.lease_until IS NOT NULL) AS e
    WHERE e.expires_at > now_ms"""

Parameters = tuple[object, ...]


@cache
def statement(text: str, schema: str, table: str, now: str) -> str:
    """Return a statement for the queues of one partitioned table."""
    return text.format(t=f"{schema}.{table}", s=schema, now=now)


def number_array(values: Iterable[int | None]) -> str:
    """Return an array of numbers or booleans, such as `{1,NULL,3}`."""
    return "{" + ",".join(["NULL" if value is None else str(value) for value in values]) + "}"


def uuid_array(values: Iterable[bytes]) -> str:
    """Return an array of uuids, each from 16 bytes."""
    return "{" + ",".join([value.hex() for value in values]) + "}"


def text_array(values: Iterable[str | None]) -> str:
    """Return an array of strings."""
    escaped = (None if value is None else value.replace("\\", "\\\\").replace('"', '\\"') for value in values)
    return "{" + ",".join(["NULL" if value is None else f'"{value}"' for value in escaped]) + "}"


def put_parameters(queue: QueueRef, entries: Sequence[NewEntry], inserted_at: int) -> Parameters:
    """Return the parameters of PUT: entries sorted by hash, each with its position in the call."""
    order = sorted(range(len(entries)), key=lambda index: entries[index].keyhash)
    ordered = [entries[index] for index in order]
    return (
        queue.id,
        inserted_at,
        queue.format,
        uuid_array(entry.keyhash for entry in ordered),
        number_array(order),
        number_array(entry.priority for entry in ordered),
        number_array(entry.process_at for entry in ordered),
        number_array(entry.expires_at for entry in ordered),
        number_array(entry.kind for entry in ordered),
        text_array(entry.key for entry in ordered),
        "{" + ",".join(['"\\\\x' + entry.data.hex() + '"' for entry in ordered]) + "}",
        # unnest pads a shorter array with nulls
        text_array(entry.trace for entry in ordered) if any(entry.trace for entry in ordered) else "{}",
    )


def held_parameters(held: Sequence[LeasedEntry]) -> Parameters:
    """Return the tokens of all bundles that contain these entries, then the key hash and the token of each entry."""
    bundles = dict.fromkeys(entry.token for entry in held if entry.together)
    return uuid_array(bundles), uuid_array(entry.keyhash for entry in held), uuid_array(entry.token for entry in held)


def fail_parameters(queue: QueueRef, failures: Sequence[Failure]) -> Parameters:
    """Return the parameters of FAIL."""
    return (
        queue.id,
        queue.settings.max_timeouts,
        uuid_array(failure.held.keyhash for failure in failures),
        uuid_array(failure.held.token for failure in failures),
        number_array(failure.delay_ms for failure in failures),
        text_array(failure.reason for failure in failures),
    )
