"""The operations of the writer thread on `store.db`: slices, repairs, snapshots, topics, settings, parked records.

A slice or a repair is one transaction; it is fenced if the pointer has moved since it was planned.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, assert_never

import apsw
import msgspec
from msgspec.structs import astuple

from tidebook.core.errors import Corrupt, Fenced, NotFound
from tidebook.core.event import event_tags
from tidebook.core.head import encode_head
from tidebook.core.key import Key
from tidebook.core.position import Position
from tidebook.core.repair import Repair
from tidebook.core.replication_plan import (
    ClearEvents,
    ClearJournal,
    ForgetSegments,
    Parked,
    Pointer,
    PutEvents,
    PutHead,
    PutSegments,
    PutTags,
    SliceWrites,
    TagRow,
    Write,
)
from tidebook.core.seq_nr import LAST
from tidebook.core.topic_config import TopicConfig
from tidebook.sqlite.multi_insert import insert_rows
from tidebook.sqlite.writer import WriteTransaction, one_by_one
from tidebook.store.port import StoredSnapshot

_EVENTS = """SELECT seq_nr, log_ms, epoch, "offset", "index", encoded FROM journal
    WHERE topic = ? AND id = ? AND seq_nr > ? AND seq_nr <= ? ORDER BY seq_nr LIMIT ?"""
_CLEAR_TAG = """DELETE FROM tag_views
    WHERE tag = ? AND log_ms = ? AND topic = ? AND "offset" = ? AND "index" = ? AND epoch = ? AND id = ?"""
_EXTRA_EVENT = "DELETE FROM journal WHERE topic = ? AND id = ? AND seq_nr = ?"
_EXTRA_TAG = """DELETE FROM tag_views WHERE tag = ? AND log_ms = ? AND topic = ? AND partition = ? AND "offset" = ?
    AND "index" = ? AND epoch = ?"""
_CLEAR_SNAPSHOTS = 'DELETE FROM snapshot WHERE topic = ? AND id = ? AND (epoch, "offset") <= (?, ?)'
#: How many events are read per query to find the tag rows to delete.
CLEAR_PAGE = 1000
_encode_config = msgspec.json.Encoder().encode
_decode_config = msgspec.json.Decoder(TopicConfig).decode
_OF_INCARNATION = 'topic = ? AND id = ? AND epoch = ? AND "offset" = ?'
#: All tables with a `topic` column.
_TABLES = "metajournal, journal, tag_views, tag_views_progress, pointer, snapshot, topic_config, parked"
#: The wake-up channel of all pointers.
ANY_POINTER = "store"


def channel_of(topic: str, partition: int) -> str:
    """Return the wake-up channel of a partition's pointer."""
    return f"store/{topic}/{partition}"


def read_pointer(connection: apsw.Connection, topic: str, partition: int) -> Pointer | None:
    """Return the pointer of a partition, or None."""
    sql = 'SELECT epoch, "offset", time_ms FROM pointer WHERE topic = ? AND partition = ?'
    row: Any = connection.execute(sql, (topic, partition)).fetchone()
    return None if row is None else Pointer(Position(row[0], row[1]), row[2])


@one_by_one
def apply_slice(transaction: WriteTransaction, writes: SliceWrites) -> Fenced | None:
    """Apply a slice, unless all of it was applied already; return Fenced if the pointer or the topic has changed."""
    partition = (writes.topic, writes.partition)
    current = read_pointer(transaction.connection, *partition)
    if current != writes.began:
        if current is not None and current.position >= writes.pointer.position:
            return None  # another replicator has applied all of it
        return Fenced(
            f"{writes.topic}/{writes.partition}: the slice up to {writes.pointer.position} was planned from "
            f"{_format(writes.began)}, but the pointer is at {_format(current)}: read it and plan the slice again"
        )
    if current is not None and current.position > writes.pointer.position:
        return None
    config = None if writes.topic_id is None else _config_of(transaction.connection, writes.topic)
    if writes.topic_id is not None and (config is None or config.topic_id != writes.topic_id):
        return Fenced(
            f"topic {writes.topic} was deleted, created again or adopted after this slice was planned: "
            "read its configuration again"
        )
    _put_keys(transaction, writes.keys)
    parked: list[Any] = []
    for each in writes.parked:
        parked += (each.topic, each.partition, *each.position, each.timestamp_ms, each.id, each.reason, each.value)
    insert_rows(transaction.connection, "INSERT OR REPLACE INTO parked VALUES {}", 8, parked)
    position = writes.pointer.position
    transaction.connection.execute(
        "INSERT OR REPLACE INTO pointer VALUES (?, ?, ?, ?, ?)", (*partition, *position, writes.pointer.time_ms)
    )
    transaction.channels.update((channel_of(*partition), ANY_POINTER))
    return None


@one_by_one
def repair_journal(transaction: WriteTransaction, planned: Repair) -> Fenced | None:
    """Apply a repair; return Fenced if it is outdated, and otherwise None."""
    if read_pointer(transaction.connection, planned.key.topic, planned.partition) != planned.pointer:
        return Fenced(
            f"{planned.key}: more of its partition was replicated while the journal was compared: compare it again"
        )
    key, head = planned.key, planned.head
    transaction.connection.executemany(_EXTRA_EVENT, [(*key, seq_nr) for seq_nr in planned.extra_rows])
    tag_keys = [
        (at.tag, at.time_ms, at.topic, at.partition, at.offset, at.index, at.epoch) for at in planned.extra_tags
    ]
    transaction.connection.executemany(_EXTRA_TAG, tag_keys)
    _put_keys(transaction, [(PutEvents(key, head, planned.rows), PutTags(key, head, planned.tags), PutHead(key, head))])
    transaction.channels.add(ANY_POINTER)
    return None


def _put_keys(transaction: WriteTransaction, keys: Sequence[Sequence[Write]]) -> None:
    # A transaction becomes visible as a whole, so only the final state of each key is written, after all of its clears:
    # ClearJournal discards the rows that were put before it, and ClearEvents only covers numbers below all rows that
    # are still to be put.
    # Keys and tag rows are sorted as in their tables, so that each page of a table is visited and split once.
    execute = transaction.connection.execute
    events: list[Any] = []
    tags: list[TagRow] = []
    progress: list[Any] = []
    heads: list[Any] = []
    for writes in sorted(filter(None, keys), key=lambda of_key: of_key[0].key):
        rows: list[PutEvents] = []
        tag_writes: list[PutTags] = []
        last: PutHead | None = None
        for write in writes:
            match write:
                case PutEvents():
                    rows.append(write)
                case PutHead():
                    last = write
                case PutTags():
                    tag_writes.append(write)
                case ClearEvents():
                    _clear_events(transaction, write, write.above, write.head.delete_to)
                case ClearJournal():
                    rows.clear()
                    _clear_events(transaction, write, 0, LAST)
                    execute(_CLEAR_SNAPSHOTS, (*write.key, *write.head.incarnation))
                    if write.clear_tags:
                        tag_writes.clear()
                        execute("DELETE FROM tag_views_progress WHERE topic = ? AND id = ?", write.key)
                case PutSegments() | ForgetSegments():
                    pass  # not needed: the table's primary key finds events across any gap in the numbers
                case _:
                    assert_never(write)
        for put in rows:
            topic, id = put.key
            for row in put.rows:
                events += (topic, id, row.seq_nr, row.timestamp_ms, *row.position, row.index, row.time_ms, row.encoded)
        for put_tags in tag_writes:
            tags += put_tags.rows
            for tag, last_row in {row.tag: row for row in put_tags.rows}.items():
                at = (last_row.tag_seq_nr, last_row.seq_nr, last_row.epoch, last_row.offset)
                progress += (*put_tags.key, tag, *at)
        if last is not None:
            heads += (*last.key, last.head.live, last.head.expires_at_ms, encode_head(last.head))
    insert_rows(transaction.connection, "INSERT OR REPLACE INTO journal VALUES {}", 9, events)
    # This is the table's order within one log partition, because log time and offsets ascend together.
    tags.sort(key=attrgetter("tag", "offset", "index"))
    tag_values = list(chain.from_iterable(map(astuple, tags)))
    insert_rows(transaction.connection, "INSERT OR REPLACE INTO tag_views VALUES {}", 14, tag_values)
    insert_rows(transaction.connection, "INSERT OR REPLACE INTO tag_views_progress VALUES {}", 7, progress)
    insert_rows(transaction.connection, "INSERT OR REPLACE INTO metajournal VALUES {}", 5, heads)


def _clear_events(transaction: WriteTransaction, write: ClearEvents | ClearJournal, above: int, to: int) -> None:
    # Tag rows are found through the event rows: a separate index would slow down every write.
    key, last = write.key, above
    while write.clear_tags:
        rows: list[Any] = transaction.connection.execute(_EVENTS, (*key, last, to, CLEAR_PAGE)).fetchall()
        if not rows:
            break
        keys = [
            (tag, log_ms, key.topic, offset, index, epoch, key.id)
            for _, log_ms, epoch, offset, index, encoded in rows
            for tag in event_tags(encoded)
        ]
        transaction.connection.executemany(_CLEAR_TAG, keys)
        last = rows[-1][0]
    sql = "DELETE FROM journal WHERE topic = ? AND id = ? AND seq_nr > ? AND seq_nr <= ?"
    transaction.connection.execute(sql, (*key, above, to))


def _format(pointer: Pointer | None) -> str:
    return "nothing" if pointer is None else f"{pointer.position}, {pointer.time_ms} ms"


def decode_config(data: bytes) -> TopicConfig:
    """Decode a topic's configuration; raise Corrupt if it is damaged."""
    try:
        return _decode_config(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, TypeError) as error:
        raise Corrupt(f"the configuration of a topic is damaged ({error}): restore a copy of store.db") from error


@one_by_one
def save_snapshot(transaction: WriteTransaction, save: tuple[Key, Position, StoredSnapshot, int]) -> None:
    """Save a snapshot, and delete all of its incarnation but the `slots` with the greatest seq_nr."""
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
    current = _config_of(transaction.connection, topic)
    if current == expected:
        execute("INSERT OR REPLACE INTO topic_config VALUES (?, ?)", (topic, _encode_config(config)))
        transaction.channels.add(ANY_POINTER)  # a new topic has no pointers yet, and a replicator waits for it
        return config
    return current or NotFound(f"the store has no configuration of topic {topic!r}: set it with expected=None")


def _config_of(connection: apsw.Connection, topic: str) -> TopicConfig | None:
    row: Any = connection.execute("SELECT config FROM topic_config WHERE topic = ?", (topic,)).fetchone()
    return None if row is None else decode_config(row[0])


@one_by_one
def delete_topic(transaction: WriteTransaction, topic: str) -> None:
    """Delete all rows of a topic."""
    for table in _TABLES.split(", "):
        transaction.connection.execute(f"DELETE FROM {table} WHERE topic = ?", (topic,))


@one_by_one
def set_setting(transaction: WriteTransaction, new: tuple[str, str, str | None]) -> bool:
    """Set a setting if its value is `expected`; return True if it was set."""
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
