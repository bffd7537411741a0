"""Turn small journal histories into log records, and fold them into the expected content of a store."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from tidebook.core.action import Action, Append
from tidebook.core.event import unpack_events
from tidebook.core.fold import AppendApplied, PurgeApplied, fold
from tidebook.core.head import Head
from tidebook.core.position import Position
from tidebook.core.record import encode_record
from tidebook.core.replication_plan import EventRow
from tidebook.core.topic_config import TopicConfig
from tidebook.log.port import Record
from tidebook.testing.action_histories import FIRST_MS, append, delete, purge

__all__ = [
    "FIRST_MS",
    "ExpectedJournal",
    "Step",
    "append",
    "delete",
    "expected_journals",
    "purge",
    "records_of",
    "topic_config",
]

#: One step of a history: a journal id, and an action on that journal.
Step = tuple[str, Action]


def topic_config(topic_id: str = "t", *, segment_size: int = 5, segments: int = 8, partitions: int = 1) -> TopicConfig:
    """Return a topic configuration with segments so small that a test crosses their borders."""
    return TopicConfig(topic_id=topic_id, partitions=partitions, segment_size=segment_size, segments=segments)


def records_of(steps: Iterable[Step], *, start: int = 0, limit_bytes: int = 10_000_000) -> list[Record]:
    """Return the steps as consecutive records of one partition."""
    records = []
    for offset, (id, action) in enumerate(steps, start):
        if isinstance(action, Append) and not action.append_id:
            action = msgspec.structs.replace(action, append_id=offset.to_bytes(16, "big"))
        value = encode_record(action, limit_bytes=limit_bytes)
        records.append(Record(offset, FIRST_MS + offset * 1000, id.encode(), value))
    return records


class ExpectedJournal(msgspec.Struct):
    """The expected state of a journal: its head or grave, and its events."""

    head: Head | None
    rows: tuple[EventRow, ...]


def expected_journals(steps: Sequence[Step], config: TopicConfig, *, start: int = 0) -> dict[str, ExpectedJournal]:
    """Fold a history, one record at a time, and return the expected state by journal id."""
    heads: dict[str, Head | None] = {}
    rows: dict[str, dict[int, EventRow]] = {}
    for record, (id, action) in zip(records_of(steps, start=start), steps, strict=True):
        if isinstance(action, Append) and not action.append_id:
            action = msgspec.structs.replace(action, append_id=record.offset.to_bytes(16, "big"))
        at = Position(config.epoch, record.offset)
        kept = rows.setdefault(id, {})
        heads[id], change = fold(heads.get(id), action, at, record.timestamp_ms, config)
        match change:
            case PurgeApplied():
                kept.clear()
            case AppendApplied(first=first):
                assert isinstance(action, Append)
                for i, event in enumerate(unpack_events(action.body)):
                    kept[first + i] = EventRow(first + i, event, record.timestamp_ms, at, i, record.timestamp_ms)
            case _:
                pass
    return {id: ExpectedJournal(head, _visible(head, rows[id])) for id, head in heads.items()}


def _visible(head: Head | None, rows: dict[int, EventRow]) -> tuple[EventRow, ...]:
    if head is None or not head.live:
        return ()
    return tuple(rows[seq_nr] for seq_nr in sorted(rows) if seq_nr > head.delete_to)
