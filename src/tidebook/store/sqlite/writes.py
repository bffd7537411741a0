"""The writer's other operations on `store.db`: snapshots, topic configuration, settings, graves, parked records.

All can be repeated after a rollback.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tidebook.core.errors import Corrupt, NotFound
from tidebook.core.key import Key
from tidebook.core.position import Position
from tidebook.core.replication_plan import Parked
from tidebook.core.topic_config import TopicConfig
from tidebook.sqlite.writer import WriteTransaction, one_by_one
from tidebook.store.port import StoredSnapshot

encode_config = msgspec.json.Encoder().encode
_decode_config = msgspec.json.Decoder(TopicConfig).decode

_OF_INCARNATION = 'topic = ? AND id = ? AND epoch = ? AND "offset" = ?'
#: All tables with a `topic` column.
_TOPIC_TABLES = [
    "metajournal",
    "journal",
    "tag_views",
    "tag_views_progress",
    "pointer",
    "snapshot",
    "topic_config",
    "parked",
]


def decode_config(data: bytes) -> TopicConfig:
    """Decode a topic's configuration; raise Corrupt if it is damaged."""
    try:
        return _decode_config(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, TypeError) as error:
        raise Corrupt(f"the configuration of a topic is damaged ({error}): restore a copy of store.db") from error


@one_by_one
def save_snapshot(transaction: WriteTransaction, save: tuple[Key, Position, StoredSnapshot, int]) -> None:
    """Save a snapshot, and delete all but the latest `slots` of its incarnation."""
    key, incarnation, new, slots = save
    execute = transaction.connection.execute
    of_incarnation = (*key, *incarnation)
    execute(
        "INSERT OR REPLACE INTO snapshot VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (*of_incarnation, new.seq_nr, new.payload_type, new.payload, new.timestamp_ms),
    )
    execute(
        f"""DELETE FROM snapshot WHERE {_OF_INCARNATION} AND seq_nr <=
        (SELECT seq_nr FROM snapshot WHERE {_OF_INCARNATION} ORDER BY seq_nr DESC LIMIT 1 OFFSET ?)""",
        (*of_incarnation, *of_incarnation, slots),
    )


@one_by_one
def delete_snapshots(transaction: WriteTransaction, delete: tuple[Key, Position, int]) -> None:
    """Delete the snapshots of an incarnation up to a seq_nr."""
    key, incarnation, to = delete
    sql = f"DELETE FROM snapshot WHERE {_OF_INCARNATION} AND seq_nr <= ?"
    transaction.connection.execute(sql, (*key, *incarnation, to))


@one_by_one
def set_config(
    transaction: WriteTransaction, new: tuple[str, TopicConfig, TopicConfig | None]
) -> TopicConfig | NotFound:
    """Set a topic's configuration if the current one is `expected`; return the one in force afterwards, or NotFound."""
    topic, config, expected = new
    execute = transaction.connection.execute
    row: Any = execute("SELECT config FROM topic_config WHERE topic = ?", (topic,)).fetchone()
    current = None if row is None else decode_config(row[0])
    if current == expected:
        execute("INSERT OR REPLACE INTO topic_config VALUES (?, ?)", (topic, encode_config(config)))
        return config
    return current or NotFound(f"the store has no configuration of topic {topic!r}: set it with expected=None")


@one_by_one
def delete_topic(transaction: WriteTransaction, topic: str) -> None:
    """Delete all rows of a topic."""
    for table in _TOPIC_TABLES:
        transaction.connection.execute(f"DELETE FROM {table} WHERE topic = ?", (topic,))


@one_by_one
def set_setting(transaction: WriteTransaction, new: tuple[str, str, str | None]) -> bool:
    """Set a setting if its value is `expected`; return whether it was."""
    name, value, expected = new
    row: Any = transaction.connection.execute("SELECT value FROM setting WHERE name = ?", (name,)).fetchone()
    as_expected = (None if row is None else row[0]) == expected
    if as_expected:
        transaction.connection.execute("INSERT OR REPLACE INTO setting VALUES (?, ?)", (name, value))
    return as_expected


@one_by_one
def unpark(transaction: WriteTransaction, parked: Sequence[Parked]) -> None:
    """Delete parked records."""
    sql = 'DELETE FROM parked WHERE topic = ? AND partition = ? AND epoch = ? AND "offset" = ?'
    transaction.connection.executemany(sql, [(each.topic, each.partition, *each.position) for each in parked])


@one_by_one
def remove_graves(transaction: WriteTransaction, graves: Sequence[tuple[str, str, bytes]]) -> None:
    """Delete graves that have not changed since they were read."""
    transaction.connection.executemany("DELETE FROM metajournal WHERE topic = ? AND id = ? AND head = ?", graves)
