"""The relay's statements on PostgreSQL, each as few round trips as it can be: one for a lock, two for a batch."""

from __future__ import annotations

from tidebook.sql.queries.outbox_relay import RelayStatements
from tidebook.sql.queries.outbox_words import POSTGRES

STATEMENTS = RelayStatements(POSTGRES)

#: What may be lost in a crash need not wait for the disk: a scan finds it again. For this statement's commit alone.
_NOT_DURABLE = "set_config('synchronous_commit', 'off', true)"

LOCK = (
    f"{STATEMENTS.lock} RETURNING previous_owner, session_id, session_ids, {POSTGRES.age.format('session_at')}, "
    f"session_fence, topic_uuid, notice, {_NOT_DURABLE}"
)
HEARTBEAT = f"{STATEMENTS.heartbeat} RETURNING {_NOT_DURABLE}"

#: Ids that are neighbours, and any others.
RUN = "id BETWEEN %(first)s AND %(last)s"
LIST = "id = ANY(%(ids)s)"

_DONE = """\
gone AS (DELETE FROM kafka_messages WHERE topic = %(topic)s AND {ids} AND EXISTS (SELECT 1 FROM held)),
moved AS (
    INSERT INTO kafka_topic_offset (topic, partition, scan_from)
    SELECT %(topic)s, o.partition, o.scan_from FROM unnest(%(partitions)s::int[], %(offsets)s::bigint[])
    AS o(partition, scan_from) WHERE EXISTS (SELECT 1 FROM held)
    ON CONFLICT (topic, partition) DO UPDATE SET scan_from = excluded.scan_from
)"""

# The guard comes first: it locks the row if the lock is still ours, and everything else hangs on it.
_GUARD = f"""\
WITH held AS (
    SELECT rewinds FROM kafka_topic_info WHERE topic = %(topic)s AND locked_by = %(hold)s FOR UPDATE
), {_DONE}
SELECT rewinds, pg_snapshot_xmin(pg_current_snapshot())::text::bigint, pg_current_xact_id()::text::bigint,
EXISTS (SELECT 1 FROM kafka_parked WHERE topic = %(topic)s) FROM held"""

_COUNTED = STATEMENTS.counted.replace("%s", "%(done)s")
_KEPT = "locked_at = clock_timestamp()"

_FINISH = f"""\
WITH held AS (
    UPDATE kafka_topic_info SET {{lock}}, {STATEMENTS.closed}, {_COUNTED}
    WHERE topic = %(topic)s AND locked_by = %(hold)s RETURNING topic
), {_DONE}
SELECT {_NOT_DURABLE} FROM held"""

OPEN = f"{STATEMENTS.open_session} RETURNING {POSTGRES.epoch.format('session_at')}"

# Two probes of the index a topic, however many rows wait: is there a row behind its floor, and is there a topic
# between it and the next one? DISTINCT would read every row.
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

#: Differs where the server was started anew, or the table was made or filled anew: its rows may be others then.
LIFE = """\
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


def guard(*, neighbours: bool) -> str:
    """Checks and takes the guard, and deletes what is finished."""
    return _GUARD.format(ids=RUN if neighbours else LIST)


def finish(*, neighbours: bool, unlock: bool) -> str:
    """Closes the session and deletes what is finished, if the lock is still ours: one row comes back then."""
    return _FINISH.format(ids=RUN if neighbours else LIST, lock=STATEMENTS.free_now if unlock else _KEPT)
