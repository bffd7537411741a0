"""The view of a journal that a read returns, and all decisions about it. Everything here is pure.

A view starts from a base: a head that includes every record of the journal up to an offset. The unreplicated records
after that offset, its tail, are folded onto it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from tidebook.core.action import Action, Append, Damaged
from tidebook.core.bounds import DECODE_ERRORS
from tidebook.core.errors import Corrupt, Fenced
from tidebook.core.event import EncodedEvent, ReadEvent, unpack_events
from tidebook.core.fold import AppendApplied, Change, PurgeApplied, fold
from tidebook.core.head import Head
from tidebook.core.payload import BYTES, JSON, decode_payload
from tidebook.core.position import Position
from tidebook.core.record import read_record
from tidebook.core.replication_plan import EventRow, Pointer, first_unreplicated_offset
from tidebook.core.topic_config import TopicConfig
from tidebook.log.port import Record


class ViewBase(NamedTuple):
    """A head that includes every record of its journal up to offset `as_of`."""

    head: Head | None
    as_of: int


def stored_base(
    pointer: Pointer | None, head: Head | None, topic: str, partition: int, config: TopicConfig
) -> ViewBase:
    """Return the store's head and the last offset of this epoch that it is known to include, or -1.

    The pointer must be read before the head: head and rows then include at least what the pointer covers. Raise Fenced
    if one of them is of a newer epoch.
    """
    firsts = [first_unreplicated_offset(each, topic, partition, config) for each in (pointer, head)]
    return ViewBase(head, max(firsts) - 1)


def is_replicated(head: Head | None, pointer: Pointer | None) -> bool:
    """Return whether a journal is live and the store has everything that its head describes."""
    return head is not None and head.live and pointer is not None and head.position <= pointer.position


def choose_base(
    *, stored: ViewBase | None, cached: ViewBase | None, pointer: Pointer | None, tail_start: int, epoch: int
) -> ViewBase | None:
    """Choose the base of a view; return None if neither the store's answer nor the cache suffices.

    `stored` is what the store returned, if it was read. `cached` is the head that this process has folded, at or after
    the barrier, and `tail_start` the first offset of the records that it still has. `pointer` is None if the store
    is unavailable: the tail must then hold the whole incarnation.
    """
    if stored is not None or cached is None:
        return stored
    head = cached.head
    if pointer is not None:
        return cached if is_replicated(head, pointer) else None
    if head is None:
        return cached
    began = head.incarnation
    if began.epoch != epoch or began.offset < tail_start:
        return None
    # An append may be the retry of one in the incarnation before, whose recent appends are therefore retained.
    evicted = head.evicted if head.evicted is not None and head.evicted < began else None
    recent = tuple(each for each in head.recent if each.position < began)
    return ViewBase(msgspec.structs.replace(head, live=False, recent=recent, evicted=evicted), began.offset - 1)


class TailAppend(msgspec.Struct, frozen=True, gc=False):
    """An append in the tail that took effect."""

    first: int
    body: bytes
    timestamp_ms: int
    offset: int

    def rows(self, epoch: int, *, after: int, to: int) -> list[EventRow]:
        """Return the events with after < seq_nr ≤ to, as the store will have them, but without their log time."""
        return [
            EventRow(self.first + index, encoded, self.timestamp_ms, Position(epoch, self.offset), index)
            for index, encoded in enumerate(unpack_events(self.body))
            if after < self.first + index <= to
        ]


class ReadPlan(NamedTuple):
    """Read the rows after `after` up to `rows_to` from the store, then the tail's events after those up to `to`."""

    after: int
    rows_to: int
    to: int


def read_action(record: Record, config: TopicConfig) -> Action | Damaged:
    """Decode the action of a record; raise Fenced if it is of a newer epoch, because `config` is then outdated."""
    action = read_record(record.value, limit_bytes=config.limit_bytes)
    if not isinstance(action, Damaged) and action.epoch > config.epoch:
        raise Fenced(f"the topic has moved on from epoch {config.epoch} to {action.epoch}: open the book again")
    return action


class ReadView:
    """A journal as of offset `as_of`: the base, of which the store has the rows, and the tail folded onto it.

    The appends of the tail are kept up to `bytes_max`.
    """

    def __init__(self, base: ViewBase, config: TopicConfig, *, bytes_max: int = 0) -> None:
        self.stored, self.as_of = base
        self.head = base.head
        self.purged = False
        #: None once they exceed `bytes_max`: they must then be read a second time.
        self.appends: list[TailAppend] | None = []
        #: Where that second pass starts.
        self.restart = base
        #: The action of the last record.
        self.action: Action | Damaged | None = None
        self._config = config
        self._bytes = 0
        self._bytes_max = bytes_max

    def take(self, record: Record) -> Change:
        """Fold the next record of the journal and return its change."""
        self.action = action = read_action(record, self._config)
        position = Position(self._config.epoch, record.offset)
        self.head, change = fold(self.head, action, position, record.timestamp_ms, self._config)
        self.as_of = record.offset
        if type(change) is AppendApplied:
            assert type(action) is Append
            if self.appends is not None:
                self._bytes += len(action.body)
                if self._bytes > self._bytes_max:
                    self.appends = None
                else:
                    self.appends.append(TailAppend(change.first, action.body, record.timestamp_ms, record.offset))
        elif type(change) is PurgeApplied:
            self.purged, self.appends, self._bytes = True, [], 0
            self.restart = ViewBase(self.head, record.offset)
        return change

    def plan(self, after: int, to: int) -> ReadPlan | None:
        """Decide where the events after `after` up to `to` are read from; return None if there are none."""
        return plan_read(stored=None if self.purged else self.stored, folded=self.head, after=after, to=to)


def plan_read(*, stored: Head | None, folded: Head | None, after: int, to: int) -> ReadPlan | None:
    """Decide where the events after `after` up to `to` are read from; return None if there are none.

    `stored` is the store's head, or None if the tail purges it; `folded` is that head with the tail folded onto it.
    """
    if folded is None or not folded.live:
        return None
    after, to = max(after, folded.delete_to), min(to, folded.seq_nr)
    if after >= to:
        return None
    rows_to = stored.seq_nr if stored is not None and stored.live else 0
    return ReadPlan(after, max(after, min(rows_to, to)), to)


def may_continue(incarnation: Position, head: Head | None, cursor: int) -> bool:
    """Return whether a read that yielded up to `cursor` may continue: same incarnation, nothing after it deleted."""
    return head is not None and head.live and head.incarnation == incarnation and head.delete_to <= cursor


def page_is_valid(planned: Head, now: Head | None, cursor: int) -> bool:
    """Return whether a page read after `cursor` may be yielded, given the head `now` that was read after the page."""
    return may_continue(planned.incarnation, now, cursor)


def is_gap_free(rows: Sequence[EventRow], after: int, head: Head) -> bool:
    """Return whether the rows after number `after` are provably the events that `head` describes.

    Within an incarnation a number is assigned once and its row never changes. So if there is one row of this
    incarnation for each number, the rows are right whatever happened since, and the head need not be read again.
    """
    if not rows or rows[-1].seq_nr - after != len(rows):
        return False
    first, last = head.incarnation, head.position
    return all(first <= row.position <= last for row in rows)


def check_rows(rows: Sequence[EventRow], head: Head) -> None:
    """Raise Corrupt if a row is of another incarnation or newer than the head, which no interleaving can cause."""
    for row in rows:
        if not head.incarnation <= row.position <= head.position:
            raise Corrupt(
                f"event {row.seq_nr} was written at {row.position}, outside the incarnation of its journal, from "
                f"{head.incarnation} to {head.position}: run 'tidebook pipeline verify'"
            )


_decode = msgspec.msgpack.Decoder(EncodedEvent).decode
_NO_TAGS: frozenset[str] = frozenset()


def read_events(rows: Iterable[EventRow], partition: int) -> list[ReadEvent]:
    """Decode rows for a reader, with few calls, because this runs for every event that is read."""
    events: list[ReadEvent] = []
    decode, add = _decode, events.append
    try:
        for row in rows:
            event = decode(row.encoded)
            kind, payload, tags, metadata = event.payload_type, event.payload, event.tags, event.metadata
            add(
                ReadEvent(
                    row.seq_nr,
                    payload if kind == BYTES else decode_payload(kind, payload),
                    frozenset(tags) if tags else _NO_TAGS,
                    None if metadata is None else decode_payload(JSON, metadata),
                    row.timestamp_ms,
                    partition,
                    row.position.offset,
                    event.type,
                    event.version,
                )
            )
    except DECODE_ERRORS as error:
        raise Corrupt(f"an event's bytes are damaged: {error}") from error
    return events
