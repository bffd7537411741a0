"""The relay's statements on PostgreSQL, in as few round trips as possible: one for a lock, two for a batch."""

from __future__ import annotations

from tidebook.outbox.sql_dialect import POSTGRES
from tidebook.outbox.sql_relay import RelayStatements

STATEMENTS = RelayStatements(POSTGRES)

#: This commit need not wait for the disk: if a crash loses it, a scan restores it.
_NOT_DURABLE = "set_config('synchronous_commit', 'off', true)"

LOCK = (
    f"{STATEMENTS.lock} RETURNING previous_owner, session_id, session_ids, {POSTGRES.age.format('session_at')}, "
    f"session_fence, topic_uuid, notice_cause, notice, {_NOT_DURABLE}"
)
HEARTBEAT = f"{STATEMENTS.heartbeat} RETURNING {_NOT_DURABLE}"

#: Conditions for one run of consecutive ids, and for any other ids.
ID_RANGE = "id BETWEEN %(first)s AND %(last)s"
ID_LIST = "id = ANY(%(ids)s)"

_DELETE_SENT = """\
deleted AS (DELETE FROM kafka_messages WHERE topic = %(topic)s AND {ids} AND EXISTS (SELECT 1 FROM held)),
moved AS (
    INSERT INTO kafka_topic_offset (topic, partition, scan_from)
    SELECT %(topic)s, o.partition, o.scan_from FROM unnest(%(partitions)s::int[], %(offsets)s::bigint[])
    AS o(partition, scan_from) WHERE EXISTS (SELECT 1 FROM held)
    ON CONFLICT (topic, partition) DO UPDATE SET scan_from = excluded.scan_from
)"""

# The guard locks the topic's row if this relay still holds the lock; all other parts depend on it.
_GUARD = f"""\
WITH held AS (
    SELECT rewinds FROM kafka_topic_info WHERE topic = %(topic)s AND locked_by = %(lock_id)s FOR UPDATE
), {_DELETE_SENT}
SELECT rewinds, pg_snapshot_xmin(pg_current_snapshot())::text::bigint, pg_current_xact_id()::text::bigint,
EXISTS (SELECT 1 FROM kafka_parked WHERE topic = %(topic)s) FROM held"""

_COUNTED = STATEMENTS.counted.replace("%s", "%(sent_count)s")
_RENEWED = "locked_at = clock_timestamp()"

_FINISH = f"""\
WITH held AS (
    UPDATE kafka_topic_info SET {{lock}}, {STATEMENTS.closed}, {_COUNTED}
    WHERE topic = %(topic)s AND locked_by = %(lock_id)s RETURNING topic
), {_DELETE_SENT}
SELECT {_NOT_DURABLE} FROM held"""

OPEN = f"{STATEMENTS.open_session} RETURNING {POSTGRES.epoch.format('session_at')}"

# Two index probes per topic, however many rows wait: is there a row above its floor, and is there a topic between it
# and the next one? DISTINCT would read every row.
TOPICS = f"""\
WITH known AS (
    SELECT topic, lead(topic, 1, '~') OVER (ORDER BY topic) AS next
    FROM (SELECT topic FROM kafka_topic_info UNION ALL SELECT '') names
)
SELECT i.topic FROM kafka_topic_info i LEFT JOIN
    unnest(%s::text[], %s::bigint[], %s::bigint[]) AS f(topic, floor, rewinds) USING (topic, rewinds)
WHERE {STATEMENTS.lockable}
AND EXISTS (SELECT 1 FROM kafka_messages m WHERE m.topic = i.topic AND m.id > coalesce(f.floor, 0))
UNION ALL
SELECT fresh.topic FROM known k CROSS JOIN LATERAL (
    SELECT m.topic FROM kafka_messages m WHERE m.topic > k.topic AND m.topic < k.next ORDER BY m.topic LIMIT 1
) fresh
UNION
SELECT i.topic FROM kafka_topic_info i WHERE {STATEMENTS.lockable}
AND EXISTS (SELECT 1 FROM kafka_parked p WHERE p.topic = i.topic AND p.state = 1 AND p.retry_at <= clock_timestamp())"""

#: The incarnation of the table: differs after a restart of the server, or when the table was created or rewritten.
INCARNATION = """\
SELECT pg_postmaster_start_time(), current_database(), current_schema(),
to_regclass('kafka_messages')::oid, pg_relation_filenode(to_regclass('kafka_messages'))"""

TOPICS_IN_USE = """\
WITH RECURSIVE found(topic) AS (
    (SELECT topic FROM kafka_messages ORDER BY topic LIMIT 1)
    UNION ALL
    SELECT (SELECT m.topic FROM kafka_messages m WHERE m.topic > found.topic ORDER BY m.topic LIMIT 1)
    FROM found WHERE found.topic IS NOT NULL
)
SELECT topic FROM found WHERE topic IS NOT NULL"""


def guard(*, one_run: bool) -> str:
    """Return the statement that checks and locks the topic's row, and deletes the sent messages."""
    return _GUARD.format(ids=ID_RANGE if one_run else ID_LIST)


def finish(*, one_run: bool, unlock: bool) -> str:
    """Return the statement that closes the session and deletes the sent messages; no row if the lock is lost."""
    return _FINISH.format(ids=ID_RANGE if one_run else ID_LIST, lock=STATEMENTS.released if unlock else _RENEWED)
