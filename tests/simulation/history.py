"""A random log of a few journals, and the fold of it after every record."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tidebook.core.action import Action, Append, Damaged, Delete, Mark, Purge
from tidebook.core.event import Event, encode_events, event_tags, unpack_events
from tidebook.core.fold import AppendApplied, PurgeApplied, fold
from tidebook.core.head import Head
from tidebook.core.key import Key
from tidebook.core.position import FIRST_EPOCH, Position
from tidebook.core.record import encode_record, read_record
from tidebook.core.replication_plan import EventRow, Parked, TagRow, advance_time, tag_row
from tidebook.core.topic_config import TopicConfig
from tidebook.log.port import Record
from tidebook.testing.action_histories import FIRST_MS

TOPIC = "orders"
PARTITION = 0
IDS = ("a", "b")
TAGS = ("x", "y")
#: Events per append: one, a few that are packed into one row, and more than one row holds.
COUNTS = (1, 2, 3, 3, 5, 5, 18)
#: Packed rows end at segment borders, so both short and long segments matter.
SEGMENT_SIZES = (2, 5, 5, 40)


class ExpectedJournal(NamedTuple):
    """All journals as the fold has them: heads (also of purged journals), existing events, and their tag rows."""

    heads: Mapping[str, Head]
    rows: Mapping[str, tuple[EventRow, ...]]
    tags: Mapping[str, tuple[TagRow, ...]]
    parked: tuple[Parked, ...]
    time_ms: int


class History(NamedTuple):
    """A log, and the truth before its first record and after each record."""

    config: TopicConfig
    records: list[Record]
    truths: list[ExpectedJournal]
    shown: str


def random_history(dice: random.Random) -> History:
    """Return a log of 2 to 9 records: appends with and without tags, deletes, purges, marks and damaged records."""
    builder = HistoryBuilder(segment_size=dice.choice(SEGMENT_SIZES), step_ms=dice.choice((1_000, 2_500_000)))
    ids = IDS if dice.random() < 0.3 else IDS[:1]
    jumps = 5 if dice.random() < 0.25 else 1
    for offset in range(dice.choice((dice.randint(2, 5), dice.randint(4, 9)))):
        id = dice.choice(ids)
        builder.append(id, _random_action(dice, builder.heads.get(id), offset, jumps))
    return builder.history()


class HistoryBuilder:
    """Folds a log record by record, in the simplest way."""

    def __init__(self, *, segment_size: int = 5, step_ms: int = 1_000) -> None:
        self._config = TopicConfig(topic_id="t", partitions=1, segment_size=segment_size, segments=2)
        self._step_ms = step_ms
        self.heads: dict[str, Head] = {}
        self._events: dict[str, list[EventRow]] = {id: [] for id in IDS}
        self._tags: dict[str, list[TagRow]] = {id: [] for id in IDS}
        self._parked: list[Parked] = []
        self._time_ms = 0
        self._records: list[Record] = []
        self._truths = [self._truth()]
        self._shown = [f"segments of {segment_size}, {step_ms} ms a record"]

    def history(self) -> History:
        return History(self._config, self._records, self._truths, "\n  ".join(self._shown))

    def append(self, id: str, action: Action | None) -> None:
        """Append the next record; None is a damaged record."""
        value = b"\0damaged" if action is None else encode_record(action, limit_bytes=self._config.limit_bytes)
        self.append_value(id, value, key=None if isinstance(action, Mark) else id.encode(), shown=_brief(action))

    def append_value(self, id: str, value: bytes, *, key: bytes | None, shown: str) -> None:
        """Append a record with any value."""
        config, offset = self._config, len(self._records)
        record = Record(offset, FIRST_MS + offset * self._step_ms, key, value)
        read = read_record(value, limit_bytes=config.limit_bytes)
        position = Position(config.epoch, offset)
        self._records.append(record)
        self._shown.append(f"{offset}: {id} {shown}")
        self._time_ms = advance_time(self._time_ms, record.timestamp_ms, read)
        if isinstance(read, Damaged):
            self._parked.append(Parked(TOPIC, PARTITION, position, record.timestamp_ms, id, read.reason, value))
        elif not isinstance(read, Mark):
            self._fold(id, read, record)
        self._truths.append(self._truth())

    def _fold(self, id: str, action: Action, record: Record) -> None:
        before, position = self.heads.get(id), Position(self._config.epoch, record.offset)
        head, change = fold(before, action, position, record.timestamp_ms, self._config)
        if head is None:
            return
        self.heads[id] = head
        if isinstance(change, PurgeApplied):
            self._events[id], self._tags[id] = [], []
        elif isinstance(change, AppendApplied):
            assert isinstance(action, Append)
            counts = dict(before.tag_counts) if before is not None and before.live else {}
            for i, encoded in enumerate(unpack_events(action.body)):
                row = EventRow(change.first + i, encoded, record.timestamp_ms, position, i, self._time_ms)
                self._events[id].append(row)
                for tag in event_tags(encoded):
                    counts[tag] = counts.get(tag, 0) + 1
                    made = tag_row(tag, Key(TOPIC, id), PARTITION, head.incarnation, counts[tag], row)
                    self._tags[id].append(made)
        self._events[id] = [row for row in self._events[id] if row.seq_nr > head.delete_to]
        self._tags[id] = [row for row in self._tags[id] if row.seq_nr > head.delete_to]

    def _truth(self) -> ExpectedJournal:
        rows = [row for of_id in self._tags.values() for row in of_id]
        by_tag = {tag: tuple(sorted((r for r in rows if r.tag == tag), key=lambda r: r.place)) for tag in TAGS}
        events = {id: tuple(of_id) for id, of_id in self._events.items()}
        return ExpectedJournal(dict(self.heads), events, by_tag, tuple(self._parked), self._time_ms)


def append(offset: int, count: int, *, tags: Sequence[str] = (), at: int | None = None) -> Append:
    """Return an append whose events contain their position in the log."""
    return _append(offset, [Event(f"{offset}.{i}", tags=set(tags)) for i in range(count)], at=at)


def _append(offset: int, events: Sequence[Event], *, at: int | None = None, expected: int | None = None) -> Append:
    body, counts = encode_events(events)
    return Append(FIRST_EPOCH, offset.to_bytes(16, "big"), len(events), body, expected, at, tagged=counts)


def _random_action(dice: random.Random, head: Head | None, offset: int, jumps: int) -> Action | None:
    """Return the next action for the journal in its current state; None is a damaged record."""
    last = head.seq_nr if head is not None and head.live else 0
    kind = dice.choices(
        ("append", "expected", "at", "jump", "delete", "purge", "purge if", "mark", "damaged"),
        (9, 1, jumps, jumps, 6, 4, 1, 1, 0.5),
    )[0]
    match kind:
        case "delete":
            return Delete(FIRST_EPOCH, max(1, last - dice.choice((-1, 0, 1, 1, 2, 2, 3, 4))))
        case "purge":
            return Purge(FIRST_EPOCH)
        case "purge if":
            at = head.position if head is not None and dice.random() < 0.7 else Position(FIRST_EPOCH, 0)
            return Purge(FIRST_EPOCH, at)
        case "mark":
            return Mark(FIRST_EPOCH)
        case "damaged":
            return None
    count = dice.choice(COUNTS)
    tagged = dice.random() < 0.6
    made = [
        Event(f"{offset}.{i}", tags=set(dice.sample(TAGS, dice.randint(0, 2))) if tagged else set())
        for i in range(count)
    ]
    expected = dice.choice((last, last + 1)) if kind == "expected" else None
    at_number = {"at": last + dice.randint(1, 4), "jump": last + dice.choice((30, 10**9))}.get(kind)
    return _append(offset, made, at=at_number, expected=expected)


def _brief(action: Action | None) -> str:
    match action:
        case None:
            return "damaged"
        case Append():
            where = f" at={action.at}" if action.at is not None else ""
            where += f" expected={action.expected}" if action.expected is not None else ""
            return f"append x{action.count}{where} {dict(action.tagged) or ''}".rstrip()
        case Delete():
            return f"delete to={action.to}"
        case Purge():
            return f"purge if={action.if_position}" if action.if_position else "purge"
        case _:
            return type(action).__name__.lower()
