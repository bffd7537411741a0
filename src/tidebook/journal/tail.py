"""The unreplicated tail of one journal, folded onto the head that the store has."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from tidebook.core.action import Action, Append, Damaged
from tidebook.core.errors import Fenced
from tidebook.core.event import ReadEvent, read_event, unpack_events
from tidebook.core.fold import Appended, Change, Purged, fold
from tidebook.core.head import Head
from tidebook.core.position import Position
from tidebook.core.record import read_record
from tidebook.core.topic import TopicFacts
from tidebook.log.port import Record


class TailAppend(msgspec.Struct, frozen=True, gc=False):
    """A valid append of the tail."""

    first: int
    body: bytes
    timestamp_ms: int
    offset: int

    def events(self, partition: int, *, after: int, to: int) -> Iterator[ReadEvent]:
        """Its events with after < seq_nr ≤ to."""
        number = self.first
        for kept in unpack_events(self.body):
            if after < number <= to:
                yield read_event(kept, number, self.timestamp_ms, partition, self.offset)
            number += 1


def read_action(record: Record, facts: TopicFacts) -> Action | Damaged:
    """What a record says. One of a newer epoch says that these facts are old: whoever holds them stops here."""
    action = read_record(record.value, limit_bytes=facts.limit_bytes)
    if not isinstance(action, Damaged) and action.epoch > facts.epoch:
        raise Fenced(f"the topic has moved on from epoch {facts.epoch} to {action.epoch}: open the book again")
    return action


class Tail:
    """Folds a key's records in offset order; keeps the appends of the present life up to a bound of bytes."""

    def __init__(self, head: Head | None, facts: TopicFacts, *, bytes_max: int) -> None:
        self.head = head
        self.purged = False
        self.appends: list[TailAppend] | None = []
        #: From here a second pass begins: the head, and the offset of the last record before.
        self.restart: tuple[Head | None, int | None] = (head, None)
        self.appended = False
        #: The action of the record taken last.
        self.action: Action | Damaged | None = None
        self._facts = facts
        self._bytes = 0
        self._bytes_max = bytes_max

    def take(self, record: Record) -> Change:
        """Fold one record."""
        self.action = action = read_action(record, self._facts)
        position = Position(self._facts.epoch, record.offset)
        self.head, change = fold(self.head, action, position, record.timestamp_ms, self._facts)
        if type(change) is Appended:
            assert type(action) is Append
            self.appended = True
            if self.appends is not None:
                self._bytes += len(action.body)
                if self._bytes > self._bytes_max:
                    self.appends = None
                else:
                    self.appends.append(TailAppend(change.first, action.body, record.timestamp_ms, record.offset))
        elif type(change) is Purged:
            self.purged, self.appended = True, False
            self.appends, self._bytes = [], 0
            self.restart = (self.head, record.offset)
        return change
