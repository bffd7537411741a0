"""The unreplicated tail of one journal, folded onto the store's head."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from tidebook.core.action import Action, Append, Damaged
from tidebook.core.errors import Fenced, InvalidInput
from tidebook.core.event import ReadEvent, read_event, unpack_events
from tidebook.core.fold import AppendApplied, Change, PurgeApplied, fold
from tidebook.core.head import Head
from tidebook.core.key import journal_id
from tidebook.core.position import Position
from tidebook.core.record import read_record
from tidebook.core.topic_config import TopicConfig
from tidebook.log.port import Record


class TailAppend(msgspec.Struct, frozen=True, gc=False):
    """An append in the tail that took effect."""

    first: int
    body: bytes
    timestamp_ms: int
    offset: int

    def events(self, partition: int, *, after: int, to: int) -> Iterator[ReadEvent]:
        """Return the events with after < seq_nr ≤ to."""
        number = self.first
        for encoded in unpack_events(self.body):
            if after < number <= to:
                yield read_event(encoded, number, self.timestamp_ms, partition, self.offset)
            number += 1


def journal_of(record: Record) -> str | None:
    """Return the id of the journal that a record belongs to, or None if it belongs to none.

    A mark has no key. Any client may write to a log, so a key need not be a valid id; replication sets such records
    aside, and readers skip them.

    >>> journal_of(Record(0, 0, b"o-1", b"")), journal_of(Record(0, 0, None, b"")), journal_of(Record(0, 0, b"", b""))
    ('o-1', None, None)
    """
    try:
        return None if record.key is None else journal_id(record.key.decode())
    except (UnicodeDecodeError, InvalidInput):
        return None


def read_action(record: Record, config: TopicConfig) -> Action | Damaged:
    """Decode the action of a record; raise Fenced if it is of a newer epoch, because `config` is then outdated."""
    action = read_record(record.value, limit_bytes=config.limit_bytes)
    if not isinstance(action, Damaged) and action.epoch > config.epoch:
        raise Fenced(f"the topic has moved on from epoch {config.epoch} to {action.epoch}: open the book again")
    return action


class JournalTail:
    """Folds a journal's records in offset order, and keeps the appends of the current incarnation up to `bytes_max`."""

    def __init__(self, head: Head | None, config: TopicConfig, *, bytes_max: int) -> None:
        self.head = head
        self.purged = False
        #: None once they exceed `bytes_max`: they must then be read a second time.
        self.appends: list[TailAppend] | None = []
        #: Where that second pass starts: the head, and the offset of the last record that it includes.
        self.restart: tuple[Head | None, int | None] = (head, None)
        self.appended = False
        #: The action of the last record.
        self.action: Action | Damaged | None = None
        self._config = config
        self._bytes = 0
        self._bytes_max = bytes_max

    def take(self, record: Record) -> Change:
        """Fold the next record and return its change."""
        self.action = action = read_action(record, self._config)
        position = Position(self._config.epoch, record.offset)
        self.head, change = fold(self.head, action, position, record.timestamp_ms, self._config)
        if type(change) is AppendApplied:
            assert type(action) is Append
            self.appended = True
            if self.appends is not None:
                self._bytes += len(action.body)
                if self._bytes > self._bytes_max:
                    self.appends = None
                else:
                    self.appends.append(TailAppend(change.first, action.body, record.timestamp_ms, record.offset))
        elif type(change) is PurgeApplied:
            self.purged, self.appended = True, False
            self.appends, self._bytes = [], 0
            self.restart = (self.head, record.offset)
        return change
