"""Apply slices and repairs, each in one transaction. They are fenced if the pointer has moved since the planning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, assert_never

from msgspec.structs import astuple

from tidebook.core.errors import Fenced
from tidebook.core.event import event_tags
from tidebook.core.head import Head, encode_head
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
from tidebook.sqlite.multi_insert import insert_rows
from tidebook.sqlite.writer import WriteTransaction, one_by_one

POINTER = 'SELECT epoch, "offset", time_ms FROM pointer WHERE topic = ? AND partition = ?'

_EVENTS = """SELECT seq_nr, log_ms, epoch, "offset", "index", kept FROM journal
    WHERE topic = ? AND id = ? AND seq_nr > ? AND seq_nr <= ? ORDER BY seq_nr LIMIT ?"""
_CLEAR_TAG = """DELETE FROM tag_views
    WHERE tag = ? AND log_ms = ? AND topic = ? AND "offset" = ? AND "index" = ? AND epoch = ? AND id = ?"""
_EXTRA_TAG = """DELETE FROM tag_views WHERE tag = ? AND log_ms = ? AND topic = ? AND partition = ? AND "offset" = ?
    AND "index" = ? AND epoch = ?"""
#: Number of events that are read at once to find the tag rows to delete.
CLEAR_PAGE = 1000

#: The wake-up channel of all pointers.
ANY_POINTER = "store"


def channel_of(topic: str, partition: int) -> str:
    """Return the wake-up channel of a partition's pointer."""
    return f"store/{topic}/{partition}"


def pointer_of(row: tuple[int, int, int] | None) -> Pointer | None:
    """Return the pointer of a row of its table, or None."""
    return None if row is None else Pointer(Position(row[0], row[1]), row[2])


@one_by_one
def apply_slice(transaction: WriteTransaction, writes: SliceWrites) -> Fenced | None:
    """Apply a slice; return Fenced if it is outdated, and otherwise None."""
    partition = (writes.topic, writes.partition)
    current = pointer_of(transaction.connection.execute(POINTER, partition).fetchone())
    if current != writes.began:
        if current is not None and current.position >= writes.pointer.position:
            return None  # another replicator has applied all of it
        return Fenced(
            f"{writes.topic}/{writes.partition}: the slice up to {writes.pointer.position} was planned from "
            f"{_format(writes.began)}, but the pointer is at {_format(current)}: read it and plan the slice again"
        )
    if current is not None and current.position > writes.pointer.position:
        return None
    _put_keys(transaction, writes.keys)
    if writes.parked:
        insert_rows(transaction.connection, "INSERT OR REPLACE INTO parked VALUES {}", 8, _parked_values(writes.parked))
    position = writes.pointer.position
    transaction.connection.execute(
        "INSERT OR REPLACE INTO pointer VALUES (?, ?, ?, ?, ?)", (*partition, *position, writes.pointer.time_ms)
    )
    transaction.channels.update((channel_of(*partition), ANY_POINTER))
    return None


@one_by_one
def repair_journal(transaction: WriteTransaction, planned: Repair) -> Fenced | None:
    """Apply a repair; return Fenced if it is outdated, and otherwise None."""
    partition = (planned.key.topic, planned.partition)
    current = pointer_of(transaction.connection.execute(POINTER, partition).fetchone())
    if current != planned.pointer:
        return Fenced(
            f"{planned.key}: the store was replicated further while the journal was compared: compare it again"
        )
    for seq_nr in planned.extra_rows:
        transaction.connection.execute(
            "DELETE FROM journal WHERE topic = ? AND id = ? AND seq_nr = ?", (*planned.key, seq_nr)
        )
    for place in planned.extra_tags:
        transaction.connection.execute(
            _EXTRA_TAG,
            (place.tag, place.time_ms, place.topic, place.partition, place.offset, place.index, place.epoch),
        )
    key, head = planned.key, planned.head
    _put_keys(transaction, [(PutEvents(key, head, planned.rows), PutTags(key, head, planned.tags), PutHead(key, head))])
    transaction.channels.add(ANY_POINTER)
    return None


def _put_keys(transaction: WriteTransaction, keys: Sequence[Sequence[Write]]) -> None:
    # The transaction becomes visible at once, so only the final state of each key is written, after all of its clears:
    # ClearJournal discards the rows that were put before it, and ClearEvents only covers numbers below all rows that
    # are still to be put.
    # Keys and tag rows are sorted as in their tables, so that each page of a table is visited and split once.
    events: list[Any] = []
    tags: list[TagRow] = []
    progress: list[Any] = []
    heads: list[Any] = []
    for writes in sorted(filter(None, keys), key=_first_key):
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
                    _clear_events(transaction, write)
                case ClearJournal():
                    rows.clear()
                    if write.clear_tags:
                        tag_writes.clear()
                    _clear_journal(transaction, write)
                case PutSegments() | ForgetSegments():
                    pass  # not needed: the table's primary key finds events across any gap in the numbers
                case _:
                    assert_never(write)
        for put in rows:
            topic, id = put.key
            for row in put.rows:
                at = row.position
                events += (
                    topic, id, row.seq_nr, row.timestamp_ms, at.epoch, at.offset, row.index, row.time_ms, row.kept,
                )  # fmt: skip
        for put_tags in tag_writes:
            tags += put_tags.rows
            progress += _progress_values(put_tags)
        if last is not None:
            heads += _head_values(last.key, last.head)
    insert_rows(transaction.connection, "INSERT OR REPLACE INTO journal VALUES {}", 9, events)
    tags.sort(key=_tag_order)
    tag_values = list(chain.from_iterable(map(astuple, tags)))
    insert_rows(transaction.connection, "INSERT OR REPLACE INTO tag_views VALUES {}", 14, tag_values)
    insert_rows(transaction.connection, "INSERT OR REPLACE INTO tag_views_progress VALUES {}", 7, progress)
    insert_rows(transaction.connection, "INSERT OR REPLACE INTO metajournal VALUES {}", 5, heads)


def _first_key(writes: Sequence[Write]) -> Key:
    return writes[0].key


#: Sorts the tag rows of one log partition as their table does: offsets are in the order of the log's time.
_tag_order = attrgetter("tag", "offset", "index")


def _clear_events(transaction: WriteTransaction, write: ClearEvents) -> None:
    if write.clear_tags:
        _clear_tags(transaction, write.key, write.above, write.head.delete_to)
    transaction.connection.execute(
        "DELETE FROM journal WHERE topic = ? AND id = ? AND seq_nr > ? AND seq_nr <= ?",
        (*write.key, write.above, write.head.delete_to),
    )


def _clear_journal(transaction: WriteTransaction, write: ClearJournal) -> None:
    if write.clear_tags:
        _clear_tags(transaction, write.key, 0, LAST)
    transaction.connection.execute("DELETE FROM journal WHERE topic = ? AND id = ?", write.key)
    if write.clear_tags:
        transaction.connection.execute("DELETE FROM tag_views_progress WHERE topic = ? AND id = ?", write.key)
    transaction.connection.execute(
        'DELETE FROM snapshot WHERE topic = ? AND id = ? AND (epoch, "offset") <= (?, ?)',
        (*write.key, *write.head.incarnation),
    )


def _clear_tags(transaction: WriteTransaction, key: Key, above: int, to: int) -> None:
    # Tag rows are found through the event rows: an index of their own would slow down every write.
    last = above
    while True:
        rows: list[Any] = transaction.connection.execute(_EVENTS, (*key, last, to, CLEAR_PAGE)).fetchall()
        if not rows:
            return
        keys = [
            (tag, log_ms, key.topic, offset, index, epoch, key.id)
            for _, log_ms, epoch, offset, index, kept in rows
            for tag in event_tags(kept)
        ]
        transaction.connection.executemany(_CLEAR_TAG, keys)
        last = rows[-1][0]


def _progress_values(put: PutTags) -> Iterator[Any]:
    last = {row.tag: row for row in put.rows}
    for tag, row in last.items():
        yield from (*put.key, tag, row.tag_seq_nr, row.seq_nr, row.epoch, row.offset)


def _head_values(key: Key, head: Head) -> tuple[Any, ...]:
    return (*key, head.live, head.expires_at_ms, encode_head(head))


def _parked_values(parked: Sequence[Parked]) -> list[Any]:
    values: list[Any] = []
    for each in parked:
        values += (each.topic, each.partition, *each.position, each.timestamp_ms, each.id, each.reason, each.value)
    return values


def _format(pointer: Pointer | None) -> str:
    return "nothing" if pointer is None else f"{pointer.position}, {pointer.time_ms} ms"
