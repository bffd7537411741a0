"""The relay's SQL statements, built once per dialect."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tidebook.outbox.packed_ids import runs
from tidebook.outbox.sql_dialect import SqlDialect

#: Ids in more runs than this are listed one by one.
RUNS_MAX = 8

MESSAGE_COLUMNS = "id, topic, {key}, partition_key, payload, headers, tries, created_at"


def id_condition(ids: Sequence[int]) -> str:
    """Return an SQL condition that is true for exactly these increasing ids: each range contains only ids of the list.

    >>> id_condition([1, 2, 3, 9])
    '(id BETWEEN 1 AND 3 OR id BETWEEN 9 AND 9)'
    """
    spans = list(runs(ids))
    if len(spans) <= RUNS_MAX:
        return f"({' OR '.join(f'id BETWEEN {first} AND {last}' for first, last in spans)})"
    return f"id IN ({id_list(ids)})"


def id_list(ids: Iterable[int]) -> str:
    """Return ids as an SQL list; they are integers, so nothing needs quoting."""
    return ", ".join(map(str, map(int, ids)))


class RelayStatements:
    """The statements of an `OutboxStore` in one dialect. Parameters are written `%s`."""

    def __init__(self, dialect: SqlDialect) -> None:
        d = dialect
        head, tail = d.insert_new
        free = f"(locked_by IS NULL AND (error = 0 OR retry_at <= {d.now}))"
        stale = f"locked_at < {d.ago.format('%s')}"
        #: Whether a topic may be locked: rule 32. Parameter: the lock limit in milliseconds.
        self.lockable = f"({free} OR {stale})"
        self.add_topic = f"{head} INTO kafka_topic_info (topic) VALUES (%s) {tail}"
        self.lock = (
            f"UPDATE kafka_topic_info SET previous_owner = owner, locked_by = %s, owner = %s, locked_at = {d.now}, "
            f"error = 0 WHERE topic = %s AND ({self.lockable} OR locked_by = %s)"
        )
        self.lock_state = (
            f"SELECT previous_owner, session_id, session_ids, {d.age.format('session_at')}, session_fence, topic_uuid, "
            "notice_cause, notice FROM kafka_topic_info WHERE topic = %s AND locked_by = %s"
        )
        self.offsets = f"SELECT {d.partition}, scan_from FROM kafka_topic_offset WHERE topic = %s"
        self.put_offsets = f"INSERT INTO kafka_topic_offset (topic, {d.partition}, scan_from) VALUES {{0}} " + (
            d.upsert_offset
        )
        self.guard = f"SELECT rewinds FROM kafka_topic_info WHERE topic = %s AND locked_by = %s {d.for_update}"
        self.heartbeat = f"UPDATE kafka_topic_info SET locked_at = {d.now} WHERE topic = %s AND locked_by = %s"
        # The order matters: MySQL assigns from left to right and uses values that it has just assigned.
        self.counted = counted = (
            f"minute_before = CASE WHEN minute = {d.minute} THEN minute_before "
            f"WHEN minute = {d.minute} - 1 THEN minute_relayed ELSE 0 END, "
            f"minute_relayed = CASE WHEN minute = {d.minute} THEN minute_relayed ELSE 0 END + %s, "
            f"minute = {d.minute}, relayed = relayed + %s"
        )
        self.open_session = (
            f"UPDATE kafka_topic_info SET locked_at = {d.now}, session_id = %s, session_ids = %s, "
            f"session_at = {d.now}, session_fence = %s, topic_uuid = %s, {counted} WHERE topic = %s"
        )
        self.opened_at = f"SELECT {d.epoch.format('session_at')} FROM kafka_topic_info WHERE topic = %s"
        self.closed = closed = "session_id = NULL, session_ids = NULL, session_at = NULL, session_fence = NULL"
        self.close_session = (
            f"UPDATE kafka_topic_info SET locked_at = {d.now}, {closed}, {counted} WHERE topic = %s AND locked_by = %s"
        )
        self.released = released = (
            "locked_by = NULL, locked_at = NULL, error = 0, retries = 0, retry_at = NULL, reason = NULL"
        )
        self.close_and_unlock = (
            f"UPDATE kafka_topic_info SET {released}, {closed}, {counted} WHERE topic = %s AND locked_by = %s"
        )
        self.unlock = f"UPDATE kafka_topic_info SET {released} WHERE topic = %s AND locked_by = %s"
        self.rest = (
            "UPDATE kafka_topic_info SET locked_by = NULL, locked_at = NULL, error = 1, retries = retries + %s, "
            f"retry_at = {d.later.format('%s')}, reason = %s WHERE topic = %s AND locked_by = %s"
        )
        self.notice = (
            f"UPDATE kafka_topic_info SET notice_cause = %s, notice = %s, notice_at = {d.now} WHERE topic = %s"
        )
        self.rewind = "UPDATE kafka_topic_info SET rewinds = rewinds + 1 WHERE topic = %s"
        self.lock_topic = f"SELECT rewinds FROM kafka_topic_info WHERE topic = %s {d.for_update}"
        inner = f"SELECT id, {d.key}, partition_key, payload, headers, tries FROM kafka_messages"
        size = f"COALESCE({d.size.format('payload')}, 0)"
        # The running size bounds the memory of a batch; the first row is always returned.
        self.batch = (
            f"SELECT id, {d.key}, partition_key, payload, headers, tries FROM (SELECT inner_rows.*, "
            f"SUM({size}) OVER (ORDER BY id) - {size} AS size_before FROM "
            f"({inner} WHERE topic = %s AND id > %s ORDER BY id LIMIT %s) inner_rows) sized "
            "WHERE size_before < %s ORDER BY id"
        )
        self.open_rows = f"{inner} WHERE topic = %s AND {{0}} ORDER BY id"
        self.count_sent = f"UPDATE kafka_topic_info SET locked_at = {d.now}, {counted} WHERE topic = %s"
        self.delete = "DELETE FROM kafka_messages WHERE topic = %s AND {0}"
        self._parked_statements(d)
        self._status_statements(d)

    def _parked_statements(self, d: SqlDialect) -> None:
        columns = f"topic, id, {d.key}, partition_key, payload, headers, created_at"
        self.parked_heads = "SELECT id, order_key FROM kafka_parked WHERE topic = %s AND state IN ({0})"
        self.due = f"SELECT id, order_key FROM kafka_parked WHERE topic = %s AND state = 1 AND retry_at <= {d.now}"
        self.park = (
            f"INSERT INTO kafka_parked ({columns}, state, order_key, tries, reason, retry_at, parked_at) "
            f"SELECT {columns}, %s, COALESCE(partition_key, {d.key}), %s, %s, "
            f"{d.later.format('%s')}, {d.now} FROM kafka_messages WHERE topic = %s AND {{0}}"
        )
        self.unpark = (
            f"INSERT INTO kafka_messages ({columns}, tries) SELECT {columns}, {{1}} FROM kafka_parked "
            "WHERE topic = %s AND {0}"
        )
        self.delete_parked = "DELETE FROM kafka_parked WHERE topic = %s AND {0}"
        self.held_by = "SELECT id FROM kafka_parked WHERE topic = %s AND state = 0 AND order_key = %s"
        self.parked = (
            f"SELECT topic, id, state, {d.key}, COALESCE({d.size.format('payload')}, 0), tries, "
            f"{d.age.format('created_at')}, {d.age.format('parked_at')}, reason FROM kafka_parked "
        )

    def _status_statements(self, d: SqlDialect) -> None:
        self.topic_infos = (
            f"SELECT topic, CASE WHEN locked_by IS NULL THEN NULL ELSE owner END, {d.age.format('locked_at')}, error, "
            f"retries, -{d.age.format('retry_at')}, reason, notice_cause, notice, {d.age.format('notice_at')}, "
            "CASE WHEN session_id IS NULL THEN 0 ELSE 1 END, relayed, "
            # The current minute, plus the share of the previous one within the last 60 seconds, rounded up.
            f"CASE WHEN minute = {d.minute} THEN minute_relayed + (minute_before * {d.seconds_left} + 59) / 60 "
            f"WHEN minute = {d.minute} - 1 THEN (minute_relayed * {d.seconds_left} + 59) / 60 ELSE 0 END "
            "FROM kafka_topic_info ORDER BY topic"
        )
        self.count = "SELECT count(*) FROM (SELECT 1 FROM kafka_messages WHERE topic = %s LIMIT %s) bounded"
        self.oldest = f"SELECT {d.age.format('created_at')} FROM kafka_messages WHERE topic = %s ORDER BY id LIMIT 1"
        self.parked_counts = (
            f"SELECT topic, state, count(*), {d.age.format('MIN(created_at)')} FROM kafka_parked GROUP BY topic, state"
        )
        self.identity = "SELECT uuid, version FROM kafka_outbox"
