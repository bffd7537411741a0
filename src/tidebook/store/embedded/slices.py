"""Carrying out slices: one transaction each, refused where it did not begin from the pointer that stands."""

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
from tidebook.core.replication import (
    ClearEvents,
    ClearJournal,
    Parked,
    Pointer,
    PutEvents,
    PutHead,
    PutTags,
    SliceWrites,
    TagRow,
    Write,
)
from tidebook.core.seq_nr import LAST
from tidebook.folder.inbox import Session
from tidebook.folder.rows import put_rows

POINTER = 'SELECT epoch, "offset", time_ms FROM pointer WHERE topic = ? AND partition = ?'

_TAGGED = """SELECT seq_nr, log_ms, epoch, "offset", "index", kept FROM journal
    WHERE topic = ? AND id = ? AND seq_nr > ? AND seq_nr <= ? ORDER BY seq_nr LIMIT ?"""
_CLEAR_TAG = """DELETE FROM tag_views
    WHERE tag = ? AND log_ms = ? AND topic = ? AND "offset" = ? AND "index" = ? AND epoch = ? AND id = ?"""
#: How many events are looked at at once for the tags they carry.
CLEAR_PAGE = 1000

#: The wake-up channel of all pointers.
ANY_POINTER = "store"


def channel_of(topic: str, partition: int) -> str:
    """The wake-up channel of a partition's pointer."""
    return f"store/{topic}/{partition}"


def pointer_of(row: tuple[int, int, int] | None) -> Pointer | None:
    """A pointer as its table has it."""
    return None if row is None else Pointer(Position(row[0], row[1]), row[2])


def apply(session: Session, slices: Sequence[SliceWrites]) -> list[Fenced | None]:
    """Carry out slices one after another."""
    return [_apply(session, each) for each in slices]


def _apply(session: Session, writes: SliceWrites) -> Fenced | None:
    at = (writes.topic, writes.partition)
    stands = pointer_of(session.connection.execute(POINTER, at).fetchone())
    if stands != writes.began:
        if stands is not None and stands.position >= writes.pointer.position:
            return None  # somebody has done all of it
        return Fenced(
            f"{writes.topic}/{writes.partition}: the slice up to {writes.pointer.position} was begun from "
            f"{_told(writes.began)}, and the pointer stands at {_told(stands)}: read it again and plan anew"
        )
    if stands is not None and stands.position > writes.pointer.position:
        return None
    put_keys(session, writes.keys)
    if writes.parked:
        put_rows(session.connection, "INSERT OR REPLACE INTO parked VALUES {}", 8, _parked(writes.parked))
    position = writes.pointer.position
    session.connection.execute(
        "INSERT OR REPLACE INTO pointer VALUES (?, ?, ?, ?, ?)", (*at, *position, writes.pointer.time_ms)
    )
    session.channels.update((channel_of(*at), ANY_POINTER))
    return None


def put_keys(session: Session, keys: Sequence[Sequence[Write]]) -> None:
    """Carry out the writes of keys within the transaction."""
    # All of it becomes visible at once, so only what is left at the end of each key's writes is written, and what
    # they clear is cleared before it: a clear of a journal takes back the rows before it, and one of events lies
    # below all rows that are still put.
    # Keys and tag rows in the order of their tables: each page is then found, filled and split once.
    events: list[Any] = []
    tags: list[TagRow] = []
    progress: list[Any] = []
    heads: list[Any] = []
    for writes in sorted(filter(None, keys), key=_key_of):
        rows: list[PutEvents] = []
        tagged: list[PutTags] = []
        last: PutHead | None = None
        for write in writes:
            match write:
                case PutEvents():
                    rows.append(write)
                case PutHead():
                    last = write
                case PutTags():
                    tagged.append(write)
                case ClearEvents():
                    _clear_events(session, write)
                case ClearJournal():
                    rows.clear()
                    if write.clear_tags:
                        tagged.clear()
                    _clear_journal(session, write)
                case _:
                    assert_never(write)
        for put in rows:
            topic, id = put.key
            for row in put.rows:
                at = row.position
                events += (
                    topic, id, row.seq_nr, row.timestamp_ms, at.epoch, at.offset, row.index, row.time_ms, row.kept,
                )  # fmt: skip
        for put_tags in tagged:
            tags += put_tags.rows
            progress += _progress_values(put_tags)
        if last is not None:
            heads += _head(last.key, last.head)
    put_rows(session.connection, "INSERT OR REPLACE INTO journal VALUES {}", 9, events)
    tags.sort(key=_place_of)
    tag_values = list(chain.from_iterable(map(astuple, tags)))
    put_rows(session.connection, "INSERT OR REPLACE INTO tag_views VALUES {}", 14, tag_values)
    put_rows(session.connection, "INSERT OR REPLACE INTO tag_views_progress VALUES {}", 7, progress)
    put_rows(session.connection, "INSERT OR REPLACE INTO metajournal VALUES {}", 5, heads)


def _key_of(writes: Sequence[Write]) -> Key:
    return writes[0].key


#: Orders the tag rows of one log partition as their table does: its time never goes back.
_place_of = attrgetter("tag", "offset", "index")


def _clear_events(session: Session, write: ClearEvents) -> None:
    if write.clear_tags:
        _clear_tags(session, write.key, write.above, write.head.delete_to)
    session.connection.execute(
        "DELETE FROM journal WHERE topic = ? AND id = ? AND seq_nr > ? AND seq_nr <= ?",
        (*write.key, write.above, write.head.delete_to),
    )


def _clear_journal(session: Session, write: ClearJournal) -> None:
    if write.clear_tags:
        _clear_tags(session, write.key, 0, LAST)
    session.connection.execute("DELETE FROM journal WHERE topic = ? AND id = ?", write.key)
    if write.clear_tags:
        session.connection.execute("DELETE FROM tag_views_progress WHERE topic = ? AND id = ?", write.key)
    session.connection.execute(
        'DELETE FROM snapshot WHERE topic = ? AND id = ? AND (epoch, "offset") <= (?, ?)',
        (*write.key, *write.head.incarnation),
    )


def _clear_tags(session: Session, key: Key, above: int, to: int) -> None:
    """Found through the event rows, so that they need no index of their own, which would cost every write."""
    last = above
    while True:
        rows: list[Any] = session.connection.execute(_TAGGED, (*key, last, to, CLEAR_PAGE)).fetchall()
        if not rows:
            return
        places = [
            (tag, log_ms, key.topic, offset, index, epoch, key.id)
            for _, log_ms, epoch, offset, index, kept in rows
            for tag in event_tags(kept)
        ]
        session.connection.executemany(_CLEAR_TAG, places)
        last = rows[-1][0]


def _progress_values(put: PutTags) -> Iterator[Any]:
    last = {row.tag: row for row in put.rows}
    for tag, row in last.items():
        yield from (*put.key, tag, row.tag_seq_nr, row.seq_nr, row.epoch, row.offset)


def _head(key: Key, head: Head) -> tuple[Any, ...]:
    return (*key, head.live, head.expires_at_ms, encode_head(head))


def _parked(parked: Sequence[Parked]) -> list[Any]:
    values: list[Any] = []
    for each in parked:
        values += (each.topic, each.partition, *each.position, each.timestamp_ms, each.id, each.reason, each.value)
    return values


def _told(pointer: Pointer | None) -> str:
    return "nothing" if pointer is None else f"{pointer.position}, {pointer.time_ms} ms"
