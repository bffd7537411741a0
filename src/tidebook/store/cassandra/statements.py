"""Every CQL statement that is not DDL, by name. Tables are those of the session's keyspace."""

from __future__ import annotations

from typing import Final

# Heads. Rows are written whole and without nulls, so that no old value survives and no tombstone is written.
PUT_HEAD: Final = (
    "INSERT INTO metajournal (topic, segment, id, head, live, seq_nr, delete_to, epoch, log_offset, expires_at_ms) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) USING TIMESTAMP ?"
)
HEAD: Final = "SELECT head FROM metajournal WHERE topic = ? AND segment = ? AND id = ?"
HEADS: Final = "SELECT id, head FROM metajournal WHERE topic = ? AND segment = ? AND id IN ?"
#: Only for few ids, because each segment is searched for all of them.
HEADS_OF_SEGMENTS: Final = "SELECT id, head FROM metajournal WHERE topic = ? AND segment IN ? AND id IN ?"
IDS: Final = "SELECT id, live FROM metajournal WHERE topic = ? AND segment = ?"
CLEAR_HEAD: Final = "DELETE FROM metajournal USING TIMESTAMP ? WHERE topic = ? AND segment = ? AND id = ?"
EXPIRIES: Final = "SELECT id, expires_at_ms FROM metajournal WHERE topic = ? AND segment = ?"

# Events.
PUT_EVENT: Final = "INSERT INTO journal (id, topic, segment, seq_nr, event) VALUES (?, ?, ?, ?, ?) USING TIMESTAMP ?"
EVENTS: Final = (
    "SELECT event FROM journal WHERE id = ? AND topic = ? AND segment = ? AND seq_nr > ? AND seq_nr <= ? LIMIT ?"
)
CLEAR_EVENTS: Final = "DELETE FROM journal USING TIMESTAMP ? WHERE id = ? AND topic = ? AND segment = ? AND seq_nr <= ?"
CLEAR_EVENT: Final = "DELETE FROM journal USING TIMESTAMP ? WHERE id = ? AND topic = ? AND segment = ? AND seq_nr = ?"
CLEAR_SEGMENT: Final = "DELETE FROM journal USING TIMESTAMP ? WHERE id = ? AND topic = ? AND segment = ?"

# Lists of the segments that hold events before the journal's last run of consecutive segments.
PUT_SEGMENT: Final = (
    "INSERT INTO journal_segments (id, topic, epoch, log_offset, segment) VALUES (?, ?, ?, ?, ?) USING TIMESTAMP ?"
)
_LIST: Final = "WHERE id = ? AND topic = ? AND epoch = ? AND log_offset = ?"
SEGMENTS: Final = f"SELECT segment FROM journal_segments {_LIST} AND segment >= ? AND segment < ? LIMIT ?"
CLEAR_SEGMENTS: Final = f"DELETE FROM journal_segments USING TIMESTAMP ? {_LIST} AND segment < ?"
CLEAR_ALL_SEGMENTS: Final = f"DELETE FROM journal_segments USING TIMESTAMP ? {_LIST}"

# Tag rows.
PUT_TAG: Final = (
    "INSERT INTO tag_views (tag, bucket, log_ms, topic, partition, log_offset, idx, epoch, event) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) USING TIMESTAMP ?"
)
_TAG_ROW: Final = "tag = ? AND bucket = ? AND log_ms = ? AND topic = ? AND partition = ? AND log_offset = ? AND idx = ?"
CLEAR_TAG: Final = f"DELETE FROM tag_views USING TIMESTAMP ? WHERE {_TAG_ROW} AND epoch = ?"
_TAG_POSITION: Final = "log_ms, topic, partition, log_offset, idx, epoch"
TAG_ROWS: Final = (
    f"SELECT {_TAG_POSITION}, event FROM tag_views WHERE tag = ? AND bucket = ? "
    f"AND ({_TAG_POSITION}) > (?, ?, ?, ?, ?, ?) AND (log_ms) < (?) LIMIT ?"
)
PUT_TAG_BUCKET: Final = "INSERT INTO tag_buckets (tag, bucket) VALUES (?, ?) USING TIMESTAMP ?"
TAG_BUCKETS: Final = "SELECT bucket FROM tag_buckets WHERE tag = ? AND bucket > ? LIMIT ?"
TAG_BUCKET_AT: Final = "SELECT bucket FROM tag_buckets WHERE tag = ? AND bucket <= ? ORDER BY bucket DESC LIMIT 1"
TAGS: Final = "SELECT DISTINCT tag FROM tag_buckets"
PUT_TAG_PROGRESS: Final = (
    "INSERT INTO tag_views_progress (topic, segment, id, tag, tag_seq_nr, seq_nr, epoch, log_offset) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?) USING TIMESTAMP ?"
)
CLEAR_TAG_PROGRESS: Final = (
    "DELETE FROM tag_views_progress USING TIMESTAMP ? WHERE topic = ? AND segment = ? AND id = ?"
)

# Token ranges, for jobs that scan everything. The topic is part of the partition key, so a node filters whole
# partitions.
HEADS_IN: Final = (
    "SELECT id, head FROM metajournal "
    "WHERE token(topic, segment) > ? AND token(topic, segment) <= ? AND topic = ? ALLOW FILTERING"
)
INSPECTED_EVENTS_IN: Final = (
    "SELECT id, seq_nr, event FROM journal "
    "WHERE token(id, topic, segment) > ? AND token(id, topic, segment) <= ? AND topic = ? ALLOW FILTERING"
)
EVENTS_IN: Final = (
    "SELECT id, event FROM journal "
    "WHERE token(id, topic, segment) > ? AND token(id, topic, segment) <= ? AND topic = ? ALLOW FILTERING"
)

# Pointers.
PUT_POINTER: Final = (
    "INSERT INTO pointer (topic, partition, epoch, log_offset, time_ms) VALUES (?, ?, ?, ?, ?) USING TIMESTAMP ?"
)
POINTERS: Final = "SELECT partition, epoch, log_offset, time_ms FROM pointer WHERE topic = ?"
POINTER: Final = "SELECT epoch, log_offset, time_ms FROM pointer WHERE topic = ? AND partition = ?"

# Snapshots. Saved and deleted with clock timestamps, cleared with a stamp from the log, which is above every clock.
PUT_SNAPSHOT: Final = (
    "INSERT INTO snapshot (topic, id, epoch, log_offset, seq_nr, payload_type, payload, timestamp_ms) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
)
_INCARNATION: Final = "FROM snapshot WHERE topic = ? AND id = ? AND epoch = ? AND log_offset = ?"
SNAPSHOTS: Final = f"SELECT seq_nr, payload_type, payload, timestamp_ms {_INCARNATION}"
SNAPSHOT_NUMBERS: Final = f"SELECT seq_nr {_INCARNATION}"
DELETE_SNAPSHOTS: Final = f"DELETE {_INCARNATION} AND seq_nr <= ?"
CLEAR_SNAPSHOTS: Final = _INCARNATION.replace("FROM snapshot", "DELETE FROM snapshot USING TIMESTAMP ?")

# Parked records.
PUT_PARKED: Final = (
    "INSERT INTO parked (topic, partition, epoch, log_offset, timestamp_ms, id, reason, value, size_bytes) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) USING TIMESTAMP ?"
)
_PARKED: Final = "SELECT topic, partition, epoch, log_offset, timestamp_ms, id, reason, value, size_bytes FROM parked"
PARKED: Final = f"{_PARKED} WHERE topic = ? AND partition = ?"
ALL_PARKED: Final = _PARKED
UNPARK: Final = (
    "DELETE FROM parked USING TIMESTAMP ? WHERE topic = ? AND partition = ? AND epoch = ? AND log_offset = ?"
)

# Settings and locks: only compare-and-set, never a stamp from the log.
SETTING: Final = "SELECT value FROM setting WHERE section = ? AND name = ?"
SETTING_NAMES: Final = "SELECT section, name FROM setting"
NEW_SETTING: Final = "INSERT INTO setting (section, name, value) VALUES (?, ?, ?) IF NOT EXISTS"
CHANGE_SETTING: Final = "UPDATE setting SET value = ? WHERE section = ? AND name = ? IF value = ?"
LOCK: Final = "INSERT INTO locks (name, holder) VALUES (?, ?) IF NOT EXISTS USING TTL ?"
RENEW_LOCK: Final = "UPDATE locks USING TTL ? SET holder = ? WHERE name = ? IF holder = ?"
UNLOCK: Final = "DELETE FROM locks WHERE name = ? IF holder = ?"
