"""The SQL statements for the queues of one partitioned table."""

from __future__ import annotations

from typing import Final

import msgspec

_PUT = """SELECT now_ms, merged FROM {t}_put(%s, %s, %s, %s::text::uuid[], %s::text::smallint[],
    %s::text::smallint[], %s::text::bigint[], %s::text::bigint[], %s::text::smallint[], %s::text::text[],
    %s::text::bytea[])"""
_CLAIM = """SELECT * FROM {t}_claim(%s, %s::text::integer[], %s, %s::text::uuid[], %s, %s, %s, %s::text::smallint[],
    %s::text::bigint[])"""
_WATERMARKS = "SELECT began_ms, ended, begun, priorities, firsts FROM {t}_watermarks(%s)"
_NOTIFY_HELD = """(SELECT count(pg_notify('{s}', %s::text)) FROM
    (SELECT FROM {s}.wake w WHERE w.queue = %s AND w.held LIMIT 1) AS sleeper)"""
_FINISH_IN_SLOT = (
    "WITH gone AS (DELETE FROM {t} WHERE slot = %s AND queue = %s AND status = 'P' AND keyhash = ANY (%s::text::uuid[])"
    " AND token = %s RETURNING keyhash) SELECT uuid_send(keyhash), " + _NOTIFY_HELD + " FROM gone"
)
# A bundle never changes: a caller that has all its entries has the whole bundle.
_FINISH_BUNDLES = (
    "DELETE FROM {t} WHERE queue = %s AND status = 'P' AND keyhash = ANY (%s::text::uuid[]) AND together IS NOT NULL"
    " RETURNING uuid_send(keyhash)"
)
_FINISH = "SELECT uuid_send(gone), " + _NOTIFY_HELD + " FROM {t}_finish(%s, %s::text::uuid[], %s::text::uuid[]) AS gone"
_EXTEND_BUNDLES = (
    "UPDATE {t} SET lease_until = {now} + %s WHERE queue = %s AND status = 'P' AND keyhash = ANY (%s::text::uuid[])"
    " AND together IS NOT NULL RETURNING uuid_send(keyhash), lease_until"
)
_HEARTBEAT = (
    "SELECT uuid_send(keyhash), uuid_send(token), lease_until"
    " FROM {t}_heartbeat(%s, %s, %s::text::uuid[], %s::text::uuid[])"
)
_FAIL = """SELECT {t}_fail(%s, %s::smallint, %s::text::uuid[], %s::text::uuid[], %s::text::bigint[],
    %s::text::text[])"""
_DUE = """SELECT d.now_ms, d.lease_end, d.ready, d.held, d.upcoming
    FROM unnest(%s::text::integer[], %s::text::boolean[]) WITH ORDINALITY AS i (queue, serial, place),
    LATERAL {t}_due(i.queue, i.serial) AS d ORDER BY i.place"""
_SWEEP = "SELECT expired, run_out, dead, next_at, now_ms FROM {t}_sweep(%s, %s::smallint)"
_COLUMNS = """id, key, status::text, priority, timeouts, inserted_at, process_at, expires_at, started_at, lease_until,
    kind, data"""
_PART_COLUMNS = """p.id, p.key, 'P', p.priority, p.timeouts, p.inserted_at, p.process_at, p.expires_at, b.started_at,
    b.lease_until, p.kind, p.data"""
_ENTRIES = (
    "(SELECT * FROM (SELECT " + _COLUMNS + " FROM {t} WHERE queue = %s AND status = 'P' AND lease_until IS NOT NULL"
    " AND together IS NULL UNION ALL SELECT " + _PART_COLUMNS + " FROM {t} b, unnest(b.parts) AS p WHERE b.queue = %s"
    " AND b.status = 'P' AND b.lease_until IS NOT NULL AND b.together IS NOT NULL) AS held"
    " ORDER BY priority, process_at, id LIMIT %s) UNION ALL (SELECT " + _COLUMNS + " FROM {t}"
    " WHERE queue = %s AND status = 'W' AND priority >= 0 AND expires_at > {now}"
    " ORDER BY priority, process_at, id LIMIT %s)"
)
_COUNTS = """SELECT count(*) FILTER (WHERE free AND process_at <= now_ms),
    count(*) FILTER (WHERE free AND process_at > now_ms), count(*) FILTER (WHERE NOT free),
    coalesce(max(now_ms - process_at) FILTER (WHERE free AND process_at <= now_ms), 0),
    coalesce(min(process_at) FILTER (WHERE free), 9223372036854775807)
    FROM (SELECT {now} AS now_ms) AS clock, LATERAL (
        SELECT e.process_at, e.expires_at, e.status = 'W' OR e.lease_until <= now_ms AS free
        FROM {t} e WHERE e.queue = %s AND e.together IS NULL
        UNION ALL SELECT p.process_at, p.expires_at, b.lease_until <= now_ms
        FROM {t} b, unnest(b.parts) AS p WHERE b.queue = %s AND b.status = 'P' AND b.lease_until IS NOT NULL) AS e
    WHERE e.expires_at > now_ms"""


class TableStatements(msgspec.Struct, frozen=True):
    """The statements of one partitioned table."""

    put: str
    claim: str
    watermarks: str
    finish_in_slot: str
    finish_bundles: str
    finish: str
    extend_bundles: str
    heartbeat: str
    fail: str
    due: str
    sweep: str
    entries: str
    counts: str


def statements(schema: str, table: str, now: str) -> TableStatements:
    """Return the statements of a partitioned table."""

    def fill(text: str) -> str:
        return text.format(t=f"{schema}.{table}", s=schema, now=now)

    return TableStatements(
        *map(
            fill,
            (
                _PUT,
                _CLAIM,
                _WATERMARKS,
                _FINISH_IN_SLOT,
                _FINISH_BUNDLES,
                _FINISH,
                _EXTEND_BUNDLES,
                _HEARTBEAT,
                _FAIL,
                _DUE,
                _SWEEP,
                _ENTRIES,
                _COUNTS,
            ),
        )
    )


DEAD_LETTER_COLUMNS: Final = """d.id, q.name, d.raised_at, d.reason, d.key, d.priority, d.timeouts, d.inserted_at,
    d.expires_at, d.kind, d.data"""
