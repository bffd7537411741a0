"""Evidence of events: the numbers at which any call that reads has returned them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from tidebook.testing.histories.call import RecordedCall, RecordedHistory


class Sighting(NamedTuple):
    """An event that a call has returned."""

    key: str
    seq_nr: int
    call: RecordedCall


class Evidence:
    """All sightings of events by their value. Each value of a history is unique and identifies its event."""

    def __init__(self, history: RecordedHistory) -> None:
        self.sightings: Mapping[str, list[Sighting]] = _sightings(history)
        #: The values that are in the log; None if the history has no dump of the log.
        self.logged: frozenset[str] | None = _logged(history)
        self._removals = _removals_left(history)

    def number_of(self, value: str) -> int | None:
        """Return the sequence number of the value's event; None if it was not seen, or seen at several numbers."""
        numbers = {each.seq_nr for each in self.sightings.get(value, ())}
        return next(iter(numbers)) if len(numbers) == 1 else None

    def never_took_effect(self, call: RecordedCall) -> bool:
        """Return whether a write of unknown outcome is known to have had no effect: it is not in the log at all."""
        if call.outcome != "unknown" or self.logged is None:
            return False
        if call.op == "append":
            return not any(value in self.logged or value in self.sightings for value in call.args["values"])
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


def _logged(history: RecordedHistory) -> frozenset[str] | None:
    dumps = [call for call in history.of("dump_log") if call.outcome == "ok"]
    if not dumps:
        return None
    return frozenset(value for call in dumps for record in call.result for value in record.get("values", ()))
