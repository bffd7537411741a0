"""Compute journals from dumped log records, independently of the product, so that the checker can compare the two.

This second fold follows the documented rules of journals, for whole histories in memory, and deliberately shares
no code with `tidebook.core.fold`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from tidebook.testing.histories.call import RecordedHistory

#: The number of append ids that a journal remembers.
IDS_MAX = 16


class FoldedEvent(msgspec.Struct):
    """An event that a valid append added to a journal, and whether a delete or purge has removed it since."""

    key: str
    seq_nr: int
    value: str
    tags: frozenset[str]
    partition: int
    offset: int
    index: int
    removed: bool = False

    @property
    def place(self) -> tuple[int, int, int]:
        """The partition, the offset and the index within the record, by which events are ordered."""
        return self.partition, self.offset, self.index


class LoggedJournal:
    """One journal, folded record by record."""

    def __init__(self, key: str, partition: int) -> None:
        self.key = key
        self.live = False
        self.last = 0
        self.deleted = 0
        self.incarnation: list[int] | None = None
        self.position: list[int] | None = None
        #: The events of all incarnations, including removed ones, in log order.
        self.events: list[FoldedEvent] = []
        self._partition = partition
        self._ids: list[tuple[str, list[int]]] = []
        self._evicted: list[int] | None = None

    def take(self, record: Mapping[str, Any]) -> None:
        """Apply a record of this journal."""
        at = [record["epoch_of_log"], record["offset"]]
        if record["kind"] in ("append", "delete", "purge") and record["epoch"] == record["epoch_of_log"]:
            {"append": self._append, "delete": self._delete, "purge": self._purge}[record["kind"]](record, at)

    def _append(self, record: Mapping[str, Any], at: list[int]) -> None:
        if any(id == record["append_id"] for id, _ in self._ids):
            return
        floor = record.get("floor")
        if floor is not None and self._evicted is not None and (floor < 0 or [at[0], floor] <= self._evicted):
            return
        expected, first, incarnation = record.get("expected"), record.get("at"), record.get("incarnation")
        last = self.last if self.live else 0
        if (expected is not None and expected != last) or (first is not None and first <= last):
            return
        if incarnation is not None and (not self.live or incarnation != self.incarnation):
            return
        if not self.live:
            self.live, self.deleted, self.incarnation = True, 0, at
        first = last + 1 if first is None else first
        for index, value in enumerate(record["values"]):
            tags = frozenset(record["tags"][index])
            event = FoldedEvent(self.key, first + index, value, tags, self._partition, at[1], index)
            self.events.append(event)
        self.last, self.position = first + len(record["values"]) - 1, at
        self._ids.append((record["append_id"], at))
        if len(self._ids) > IDS_MAX:
            self._evicted = self._ids.pop(0)[1]

    def _delete(self, record: Mapping[str, Any], at: list[int]) -> None:
        incarnation = record.get("incarnation")
        if not self.live:
            if incarnation is None:
                self.live, self.last, self.deleted = True, record["to"], record["to"]
                self.incarnation = self.position = at
            return
        to = min(record["to"], self.last)
        if (incarnation is None or incarnation == self.incarnation) and to > self.deleted:
            self.deleted, self.position = to, at
            self._remove(to)

    def _purge(self, record: Mapping[str, Any], at: list[int]) -> None:
        if_position = record.get("if_position")
        if self.live and if_position in (None, self.position):
            self._remove(self.last)
            self.live, self.last, self.deleted, self.incarnation, self.position = False, 0, 0, None, at

    def _remove(self, to: int) -> None:
        for event in self.events:
            # Events of earlier incarnations are already removed, regardless of their numbers.
            event.removed = event.removed or event.seq_nr <= to


def fold_log(history: RecordedHistory) -> dict[str, LoggedJournal] | None:
    """Return the journals that the dumped records produce, by key; None if the history has no dump."""
    dumps = [call for call in history.of("dump_log") if call.outcome == "ok"]
    if not dumps:
        return None
    found: dict[str, LoggedJournal] = {}
    for dump in dumps:
        for record in dump.result:
            if record["kind"] in ("append", "delete", "purge"):
                key = record["key"]
                found.setdefault(key, LoggedJournal(key, dump.args["partition"])).take(record)
    return found


def all_events(journals: Iterable[LoggedJournal]) -> dict[str, FoldedEvent]:
    """Return every event that was ever part of a journal, by its value."""
    return {event.value: event for journal in journals for event in journal.events}
