"""The writer's other operations on `store.db`: snapshots, topic configuration, settings, graves, parked records.

All can be repeated after a rollback.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from tidebook.core.errors import Corrupt, NotFound
from tidebook.core.key import Key
from tidebook.core.position import Position
from tidebook.core.replication_plan import Parked
from tidebook.core.topic_config import TopicConfig
from tidebook.sqlite.writer import WriteTransaction
from tidebook.store.port import StoredSnapshot


class SaveSnapshot(NamedTuple):
    """A snapshot to save."""

    key: Key
    incarnation: Position
    snapshot: StoredSnapshot
    slots: int


class DeleteSnapshots(NamedTuple):
    """Snapshots to delete: those of one incarnation with seq_nr ≤ `to`."""

    key: Key
    incarnation: Position
    to: int


class NewConfig(NamedTuple):
    """A topic's configuration to set if the current one is `expected`."""

    topic: str
    config: TopicConfig
    expected: TopicConfig | None


class NewSetting(NamedTuple):
    """A setting to set if its current value is `expected`."""

    name: str
    value: str
    expected: str | None


encode_config = msgspec.json.Encoder().encode
_decode_config = msgspec.json.Decoder(TopicConfig).decode

_OF_INCARNATION = 'topic = ? AND id = ? AND epoch = ? AND "offset" = ?'


def decode_config(data: bytes) -> TopicConfig:
    """Decode a topic's configuration; raise Corrupt if it is damaged."""
    try:
        return _decode_config(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, TypeError) as error:
        raise Corrupt(f"the configuration of a topic is damaged ({error}): restore a copy of store.db") from error


def save_snapshots(transaction: WriteTransaction, saves: Sequence[SaveSnapshot]) -> list[None]:
    """Save snapshots, and delete all but the latest `slots` of each incarnation."""
    execute = transaction.connection.execute
    for key, incarnation, new, slots in saves:
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
    return [None] * len(saves)


def delete_snapshots(transaction: WriteTransaction, deletes: Sequence[DeleteSnapshots]) -> list[None]:
    """Delete snapshots."""
    for key, incarnation, to in deletes:
        transaction.connection.execute(
            f"DELETE FROM snapshot WHERE {_OF_INCARNATION} AND seq_nr <= ?", (*key, *incarnation, to)
        )
    return [None] * len(deletes)


def set_configs(transaction: WriteTransaction, wanted: Sequence[NewConfig]) -> list[TopicConfig | NotFound]:
    """Compare and set configurations; return the one in force afterwards for each, or NotFound."""
    return [_set_config(transaction, each) for each in wanted]


def _set_config(transaction: WriteTransaction, new: NewConfig) -> TopicConfig | NotFound:
    execute = transaction.connection.execute
    row = execute("SELECT config FROM topic_config WHERE topic = ?", (new.topic,)).fetchone()
    current = None if row is None else decode_config(row[0])
    if current == new.expected:
        execute("INSERT OR REPLACE INTO topic_config VALUES (?, ?)", (new.topic, encode_config(new.config)))
        return new.config
    if current is None:
        return NotFound(f"the store has no configuration of topic {new.topic!r}: set it with expected=None")
    return current


#: All tables with a `topic` column.
_TOPIC_TABLES = (
    "metajournal",
    "journal",
    "tag_views",
    "tag_views_progress",
    "pointer",
    "snapshot",
    "topic_config",
    "parked",
)


def delete_topics(transaction: WriteTransaction, topics: Sequence[str]) -> list[None]:
    """Delete all rows of topics."""
    for topic in topics:
        for table in _TOPIC_TABLES:
            transaction.connection.execute(f"DELETE FROM {table} WHERE topic = ?", (topic,))
    return [None] * len(topics)


def set_settings(transaction: WriteTransaction, wanted: Sequence[NewSetting]) -> list[bool]:
    """Compare and set settings; return for each whether its value was the expected one."""
    results = []
    for name, value, expected in wanted:
        row = transaction.connection.execute("SELECT value FROM setting WHERE name = ?", (name,)).fetchone()
        as_expected = (None if row is None else row[0]) == expected
        if as_expected:
            transaction.connection.execute("INSERT OR REPLACE INTO setting VALUES (?, ?)", (name, value))
        results.append(as_expected)
    return results


def unpark(transaction: WriteTransaction, wanted: Sequence[Sequence[Parked]]) -> list[None]:
    """Delete parked records."""
    for parked in wanted:
        for each in parked:
            transaction.connection.execute(
                'DELETE FROM parked WHERE topic = ? AND partition = ? AND epoch = ? AND "offset" = ?',
                (each.topic, each.partition, *each.position),
            )
    return [None] * len(wanted)


def remove_graves(transaction: WriteTransaction, wanted: Sequence[Sequence[tuple[str, str, bytes]]]) -> list[None]:
    """Delete graves that have not changed since they were read."""
    for graves in wanted:
        transaction.connection.executemany("DELETE FROM metajournal WHERE topic = ? AND id = ? AND head = ?", graves)
    return [None] * len(wanted)
