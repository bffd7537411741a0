"""The relay's statements: text by dialect, made once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tidebook.sql.port.outbox_ids import runs
from tidebook.sql.queries.outbox_words import Words

#: From so many runs on, ids are listed one by one.
RUNS_MAX = 8

MESSAGE_COLUMNS = "id, topic, {key}, partition_key, payload, headers, tries, created_at"


def id_condition(ids: Sequence[int]) -> str:
    """A condition that is true for exactly these ids, which must grow. A run names every id in it: no id comes twice.

    >>> id_condition([1, 2, 3, 9])
    '(id BETWEEN 1 AND 3 OR id BETWEEN 9 AND 9)'
    """
    spans = list(runs(ids))
    if len(spans) <= RUNS_MAX:
        return f"({' OR '.join(f'id BETWEEN {first} AND {last}' for first, last in spans)})"
    return f"id IN ({id_list(ids)})"


def id_list(ids: Iterable[int]) -> str:
    """Ids as a list; they are numbers, so nothing needs quoting."""
    return ", ".join(map(str, map(int, ids)))


class RelayStatements:
    """What an `OutboxStore` runs, for one dialect. Parameters are written `%s`."""

    def __init__(self, words: Words) -> None:
        w = words
        head, tail = w.insert_new
        free = f"(locked_by IS NULL AND (error = 0 OR retry_at <= {w.now}))"
        stale = f"locked_at < {w.ago.format('%s')}"
        #: Who may take a topic: rule 32. Parameter: the lock limit in milliseconds.
        self.lockable = f"({free} OR {stale})"
        self.add_topic = f"{head} INTO kafka_topic_info (topic) VALUES (%s) {tail}"
        self.lock = (
            f"UPDATE kafka_topic_info SET previous_owner = owner, locked_by = %s, owner = %s, locked_at = {w.now}, "
            f"error = 0 WHERE topic = %s AND ({self.lockable} OR locked_by = %s)"
        )
        self.held = (
            f"SELECT previous_owner, session_id, session_ids, {w.age.format('session_at')}, session_fence, topic_uuid, "
            "notice FROM kafka_topic_info WHERE topic = %s AND locked_by = %s"
        )
        self.offsets = f"SELECT {w.partition}, scan_from FROM kafka_topic_offset WHERE topic = %s"
        self.put_offsets = f"INSERT INTO kafka_topic_offset (topic, {w.partition}, scan_from) VALUES {{0}} " + (
            w.upsert_offset
        )
        self.guard = f"SELECT rewinds FROM kafka_topic_info WHERE topic = %s AND locked_by = %s {w.for_update}"
        self.heartbeat = f"UPDATE kafka_topic_info SET locked_at = {w.now} WHERE topic = %s AND locked_by = %s"
        # `relayed` and its minutes stand last: MySQL assigns from left to right and sees what it has assigned.
        self.counted = counted = (
            f"minute_before = CASE WHEN minute = {w.minute} THEN minute_before "
            f"WHEN minute = {w.minute} - 1 THEN minute_relayed ELSE 0 END, "
            f"minute_relayed = CASE WHEN minute = {w.minute} THEN minute_relayed ELSE 0 END + %s, "
            f"minute = {w.minute}, relayed = relayed + %s"
        )
        self.open_session = (
            f"UPDATE kafka_topic_info SET locked_at = {w.now}, session_id = %s, session_ids = %s, "
            f"session_at = {w.now}, session_fence = %s, topic_uuid = %s, {counted} WHERE topic = %s"
        )
        self.opened_at = f"SELECT {w.epoch.format('session_at')} FROM kafka_topic_info WHERE topic = %s"
        self.closed = closed = "session_id = NULL, session_ids = NULL, session_at = NULL, session_fence = NULL"
        self.close_session = (
            f"UPDATE kafka_topic_info SET locked_at = {w.now}, {closed}, {counted} WHERE topic = %s AND locked_by = %s"
        )
        self.free_now = free_now = (
            "locked_by = NULL, locked_at = NULL, error = 0, retries = 0, retry_at = NULL, reason = NULL"
        )
        self.close_and_unlock = (
            f"UPDATE kafka_topic_info SET {free_now}, {closed}, {counted} WHERE topic = %s AND locked_by = %s"
        )
        self.unlock = f"UPDATE kafka_topic_info SET {free_now} WHERE topic = %s AND locked_by = %s"
        self.rest = (
            "UPDATE kafka_topic_info SET locked_by = NULL, locked_at = NULL, error = 1, retries = retries + %s, "
            f"retry_at = {w.later.format('%s')}, reason = %s WHERE topic = %s AND locked_by = %s"
        )
        self.notice = f"UPDATE kafka_topic_info SET notice = %s, notice_at = {w.now} WHERE topic = %s"
        self.rewind = "UPDATE kafka_topic_info SET rewinds = rewinds + 1 WHERE topic = %s"
        self.lock_topic = f"SELECT rewinds FROM kafka_topic_info WHERE topic = %s {w.for_update}"
        inner = f"SELECT id, {w.key}, partition_key, payload, headers, tries FROM kafka_messages"
        size = f"COALESCE({w.size.format('payload')}, 0)"
        # The running size bounds what a batch takes into memory; the first row always comes.
        self.batch = (
            f"SELECT id, {w.key}, partition_key, payload, headers, tries FROM (SELECT inner_rows.*, "
            f"SUM({size}) OVER (ORDER BY id) - {size} AS size_before FROM "
            f"({inner} WHERE topic = %s AND id > %s ORDER BY id LIMIT %s) inner_rows) sized "
            "WHERE size_before < %s ORDER BY id"
        )
        self.open_rows = f"{inner} WHERE topic = %s AND {{0}} ORDER BY id"
        self.count_more = f"UPDATE kafka_topic_info SET locked_at = {w.now}, {counted} WHERE topic = %s"
        self.delete = "DELETE FROM kafka_messages WHERE topic = %s AND {0}"
        self._aside(w)
        self._status(w)

    def _aside(self, w: Words) -> None:
        columns = f"topic, id, {w.key}, partition_key, payload, headers, created_at"
        self.heads = "SELECT id, order_key FROM kafka_parked WHERE topic = %s AND state IN ({0})"
        self.due = f"SELECT id, order_key FROM kafka_parked WHERE topic = %s AND state = 1 AND retry_at <= {w.now}"
        self.move_aside = (
            f"INSERT INTO kafka_parked ({columns}, state, order_key, tries, reason, retry_at, parked_at) "
            f"SELECT {columns}, %s, COALESCE(partition_key, {w.key}), %s, %s, "
            f"{w.later.format('%s')}, {w.now} FROM kafka_messages WHERE topic = %s AND {{0}}"
        )
        self.move_back = (
            f"INSERT INTO kafka_messages ({columns}, tries) SELECT {columns}, {{1}} FROM kafka_parked "
            "WHERE topic = %s AND {0}"
        )
        self.delete_aside = "DELETE FROM kafka_parked WHERE topic = %s AND {0}"
        self.held_by = "SELECT id FROM kafka_parked WHERE topic = %s AND state = 0 AND order_key = %s"
        self.parked = (
            f"SELECT topic, id, state, {w.key}, COALESCE({w.size.format('payload')}, 0), tries, "
            f"{w.age.format('created_at')}, {w.age.format('parked_at')}, reason FROM kafka_parked "
        )

    def _status(self, w: Words) -> None:
        self.infos = (
            f"SELECT topic, CASE WHEN locked_by IS NULL THEN NULL ELSE owner END, {w.age.format('locked_at')}, error, "
            f"retries, -{w.age.format('retry_at')}, reason, notice, {w.age.format('notice_at')}, "
            "CASE WHEN session_id IS NULL THEN 0 ELSE 1 END, relayed, "
            # This minute's, and of the one before it as much as is within the last sixty seconds: one at least.
            f"CASE WHEN minute = {w.minute} THEN minute_relayed + (minute_before * {w.seconds_left} + 59) / 60 "
            f"WHEN minute = {w.minute} - 1 THEN (minute_relayed * {w.seconds_left} + 59) / 60 ELSE 0 END "
            "FROM kafka_topic_info ORDER BY topic"
        )
        self.count = "SELECT count(*) FROM (SELECT 1 FROM kafka_messages WHERE topic = %s LIMIT %s) bounded"
        self.oldest = f"SELECT {w.age.format('created_at')} FROM kafka_messages WHERE topic = %s ORDER BY id LIMIT 1"
        self.aside_counts = (
            f"SELECT topic, state, count(*), {w.age.format('MIN(created_at)')} FROM kafka_parked GROUP BY topic, state"
        )
        self.identity = "SELECT uuid, version FROM kafka_outbox"
