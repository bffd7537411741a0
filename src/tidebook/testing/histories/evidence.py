"""Evidence of events: the sequence numbers with which reads and streams returned them, and those in the folded log."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from tidebook.testing.histories.call import RecordedCall, RecordedHistory
from tidebook.testing.histories.log_fold import FoldedEvent


class Sighting(NamedTuple):
    """An event that a call has returned."""

    key: str
    seq_nr: int
    call: RecordedCall


class Evidence:
    """All sightings of events by their value. Each value of a history is unique and identifies its event.

    `events` are the events of the folded log, by value; None if the history has no dump of the log.
    """

    def __init__(self, history: RecordedHistory, events: Mapping[str, FoldedEvent] | None) -> None:
        self.sightings: Mapping[str, list[Sighting]] = _sightings(history)
        self.events = events
        self._removals = _removals_left(history)

    def is_known(self, value: str) -> bool:
        """Return whether the value's event was seen, or is in the folded log."""
        return value in self.sightings or (self.events is not None and value in self.events)

    def number_of(self, value: str) -> int | None:
        """Return the sequence number of the value's event; None if none or several are known."""
        numbers = {each.seq_nr for each in self.sightings.get(value, ())}
        if self.events is not None and value in self.events:
            numbers.add(self.events[value].seq_nr)
        return next(iter(numbers)) if len(numbers) == 1 else None

    def never_took_effect(self, call: RecordedCall) -> bool:
        """Return whether a write of unknown outcome had no effect for certain, because the log has no record of it."""
        if call.outcome != "unknown" or self.events is None:
            return False
        if call.op == "append":
            return not any(map(self.is_known, call.args["values"]))
        return self._removals[call.op, call.args["key"], call.args.get("to")] <= 0


def _sightings(history: RecordedHistory) -> dict[str, list[Sighting]]:
    found: dict[str, list[Sighting]] = defaultdict(list)
    for call in history.of("read"):
        if call.outcome == "ok":
            for seq_nr, value in call.result["events"]:
                found[value].append(Sighting(call.args["key"], seq_nr, call))
    for call in history.of("deliver"):
        found[call.result["value"]].append(Sighting(call.result["key"], call.result["seq_nr"], call))
    return found


def _removals_left(history: RecordedHistory) -> Counter[tuple[str, str, int | None]]:
    """Return how many more deletes and purges of each journal are in the log than were acknowledged."""
    found: Counter[tuple[str, str, int | None]] = Counter()
    for dump in history.of("dump_log"):
        for record in dump.result:
            if record["kind"] in ("delete", "purge"):
                found[record["kind"], record["key"], record.get("to")] += 1
    for call in history.of("delete", "purge"):
        if call.outcome == "ok":
            found[call.op, call.args["key"], call.args.get("to")] -= 1
    return found
