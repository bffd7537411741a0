"""The rules of journals: linearizability, one place for each event, and removed events that never return."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

from tidebook.testing.histories.call import RecordedCall, RecordedHistory
from tidebook.testing.histories.evidence import Evidence
from tidebook.testing.histories.linearizability import (
    CONFIGURATIONS_MAX,
    Linearizable,
    NotLinearizable,
    Step,
    Undecided,
    find_order,
)
from tidebook.testing.histories.log_fold import LoggedJournal
from tidebook.testing.histories.verdict import RuleRun, RuleVerdict, first_few, repeated

OPERATIONS = ("append", "read", "pointer", "delete", "purge")


class ModelJournal(NamedTuple):
    """A journal: whether it exists, its last number, the events that are left, and the results of retried appends."""

    live: bool = False
    last: int = 0
    events: tuple[tuple[int, str], ...] = ()
    #: (append id, first, last) of the appends that have more than one attempt; they outlive a purge.
    retried: tuple[tuple[str, int, int], ...] = ()

    def __str__(self) -> str:
        if not self.live:
            return "no journal"
        return f"last {self.last}, events {first_few((f'{n}={v}' for n, v in self.events[-5:]))}"


class JournalModel:
    """The model of journals: the effect of each call, as the reference documentation defines it."""

    def __init__(self, evidence: Evidence, retried_ids: frozenset[str]) -> None:
        self._evidence = evidence
        self._retried_ids = retried_ids

    def step(self, state: ModelJournal, call: RecordedCall) -> ModelJournal | None:
        """Return the state after a call; None if the call could not have returned its result in this state."""
        match call.op:
            case "append":
                return self._append(state, call)
            case "read":
                first, last = call.args.get("start", 1), call.args.get("end")
                expected = [[n, v] for n, v in state.events if n >= first and (last is None or n <= last)]
                return state if call.result["events"] == expected else None
            case "pointer":
                return state if call.result == (state.last if state.live else None) else None
            case "delete":
                after = _deleted(state, call.args["to"])
                return None if after is state and call.outcome == "unknown" else after
            case "purge":
                if not state.live:
                    return None if call.outcome == "unknown" else state
                return state._replace(live=False, last=0, events=())
            case _:
                raise ValueError(f"{call.op} is not an operation of a journal")

    def kind(self, call: RecordedCall) -> tuple[object, ...] | None:
        """Return a key that interchangeable unknown calls share: no result shows which of them took effect."""
        if call.op != "append":
            return call.op, call.args.get("to")
        values, id = call.args["values"], call.args["append_id"]
        if id in self._retried_ids or any(self._evidence.is_known(value) for value in values):
            return call.op, id  # of all attempts of an append, only one changes the journal
        return call.op, len(values), call.args.get("expected"), call.args.get("at")

    def _append(self, state: ModelJournal, call: RecordedCall) -> ModelJournal | None:
        args = call.args
        known = next((each for each in state.retried if each[0] == args["append_id"]), None)
        if known is not None:
            if call.outcome == "ok" and [call.result["first"], call.result["last"]] == list(known[1:]):
                return state
            return None
        expected, at = args.get("expected"), args.get("at")
        accepted = (expected is None or expected == state.last) and (at is None or at > state.last)
        if call.outcome == "fail":  # with Conflict: `_matters` leaves out other failures
            found = (call.result or {}).get("found")
            return state if not accepted and found in (None, state.last) else None
        if not accepted:
            return None
        first = state.last + 1 if at is None else at
        last = first + len(args["values"]) - 1
        if call.outcome == "ok" and (call.result["first"], call.result["last"]) != (first, last):
            return None
        # A value identifies its event, so an event that was seen can only have the number at which it was seen.
        seen = self._evidence.number_of(args["values"][0])
        if seen is not None and seen != first:
            return None
        events = state.events + tuple(enumerate(args["values"], first))
        retried = state.retried
        if args["append_id"] in self._retried_ids:
            retried = (*retried, (args["append_id"], first, last))
        return ModelJournal(True, last, events, retried)


def _deleted(state: ModelJournal, to: int) -> ModelJournal:
    if not state.live:
        return state._replace(live=True, last=to, events=())
    if not state.events or state.events[0][0] > to:
        return state
    return state._replace(events=tuple(each for each in state.events if each[0] > to))


def check_linearizability(
    history: RecordedHistory, evidence: Evidence, *, configurations_max: int = CONFIGURATIONS_MAX
) -> RuleVerdict:
    """Check that every journal is linearizable: some order of its calls explains every result."""
    run = RuleRun("journals are linearizable")
    for key, calls in _by_key(history).items():
        model = JournalModel(evidence, _retried_ids(calls))
        relevant = [call for call in calls if _matters(call, evidence)]
        run.count(len(relevant))
        step: Step[ModelJournal] = model.step
        match find_order(relevant, ModelJournal(), step, model.kind, configurations_max=configurations_max):
            case Linearizable():
                pass
            case NotLinearizable(_, call, states):
                run.violated(key, f"no order explains {call}: before it the journal had {first_few(states, 3)}")
            case Undecided(configurations):
                message = f"undecided after {configurations:,} configurations of {len(relevant):,} calls"
                run.violated(key, message, undecided=True)
    return run.verdict()


def _by_key(history: RecordedHistory) -> dict[str, list[RecordedCall]]:
    found: dict[str, list[RecordedCall]] = defaultdict(list)
    for call in history.of(*OPERATIONS):
        found[call.args["key"]].append(call)
    return found


def _retried_ids(calls: list[RecordedCall]) -> frozenset[str]:
    seen: dict[str, int] = defaultdict(int)
    for call in calls:
        if call.op == "append":
            seen[call.args["append_id"]] += 1
    return frozenset(id for id, attempts in seen.items() if attempts > 1)


def _matters(call: RecordedCall, evidence: Evidence) -> bool:
    """Return whether a call is relevant: it was answered, or may have had an effect."""
    if call.outcome == "fail":
        return call.op == "append" and call.error == "Conflict"
    if call.outcome == "unknown":
        return call.op in ("append", "delete", "purge") and not evidence.never_took_effect(call)
    return True


def check_appends(history: RecordedHistory, evidence: Evidence) -> RuleVerdict:
    """Check that every acknowledged append is in the log, that no failed one is anywhere, and that none is in part."""
    run = RuleRun("acknowledged appends are kept")
    succeeded = {call.args["append_id"] for call in history.of("append") if call.outcome != "fail"}
    for call in history.of("append"):
        run.count()
        values = call.args["values"]
        if call.outcome == "ok" and evidence.events is not None:
            lost = [value for value in values if value not in evidence.events]
            if lost:
                run.violated(call.args["key"], f"acknowledged, but not in the log: {first_few(lost)} of {call}")
        elif call.outcome == "fail" and call.args["append_id"] not in succeeded:
            seen = [value for value in values if evidence.is_known(value)]
            if seen:
                run.violated(call.args["key"], f"failed, but seen: {first_few(seen)} of {call}")
        elif call.outcome == "unknown" and evidence.events is not None:
            present = [value for value in values if value in evidence.events]
            if 0 < len(present) < len(values):
                run.violated(call.args["key"], f"is in the log in part: {first_few(present)} of {call}")
    return run.verdict()


def check_events(
    history: RecordedHistory, evidence: Evidence, folded: Mapping[str, LoggedJournal] | None
) -> RuleVerdict:
    """Check that each event was appended and has one journal and number, and that the numbers of a read increase."""
    run = RuleRun("each event has one place, and reads are in order")
    appended: dict[str, RecordedCall] = {}
    for call in history.of("append"):  # sorted by their beginning: a retry follows the first attempt
        for value in call.args["values"]:
            appended.setdefault(value, call)
    for value, sightings in evidence.sightings.items():
        run.count()
        places = {(each.key, each.seq_nr) for each in sightings}
        if len(places) > 1:
            run.violated(sightings[0].key, f"{value} is in several places: {first_few(sorted(places))}")
        origin = appended.get(value)
        if origin is None:
            run.violated(sightings[0].key, f"{value} was never appended, but was seen by {sightings[0].call}")
        elif sightings[0].key != origin.args["key"]:
            run.violated(sightings[0].key, f"{value} was appended to {origin.args['key']}")
        elif any(each.call.precedes(origin) for each in sightings):
            run.violated(sightings[0].key, f"{value} was seen before it was appended")
    _check_logged(run, appended, folded or {})
    for call in history.of("read"):
        if call.outcome == "ok":
            run.count()
            numbers = [number for number, _ in call.result["events"]]
            if any(b <= a for a, b in pairwise(numbers)):
                run.violated(call.args["key"], f"numbers do not increase: {call}")
    return run.verdict()


def _check_logged(run: RuleRun, appended: Mapping[str, RecordedCall], folded: Mapping[str, LoggedJournal]) -> None:
    """Check the events of the folded log, including those that nobody has read, in the topics of these appends."""
    topics = {_topic_of(call.args["key"]) for call in appended.values()}
    logged = [event for journal in folded.values() if _topic_of(journal.key) in topics for event in journal.events]
    if twice := list(repeated(event.value for event in logged)):
        run.violated(", ".join(sorted(topics)), f"in the log twice: {first_few(twice)}")
    for event in logged:
        run.count()
        call = appended.get(event.value)
        if call is None:
            run.violated(event.key, f"{event.value} was never appended, but is in the log")
            continue
        if event.key != call.args["key"]:
            run.violated(event.key, f"{event.value} was appended to {call.args['key']}, and is in the log of this one")
        if event.index != call.args["values"].index(event.value):
            run.violated(event.key, f"{event.value} is event {event.index} of its record, not as in {call}")


def _topic_of(key: str) -> str:
    return key.split("/", 1)[0]


def check_removals(history: RecordedHistory, evidence: Evidence) -> RuleVerdict:
    """Check that deleted and purged events never return.

    A removal that has ended covers the events that existed before it began; no read that begins later may return them.
    """
    run = RuleRun("deleted and purged events never return")
    existed = _existed_ns(history, evidence)
    removals: dict[str, list[RecordedCall]] = defaultdict(list)
    for call in history.of("delete", "purge"):
        if call.outcome == "ok":
            removals[call.args["key"]].append(call)
    for read in history.of("read"):
        if read.outcome != "ok":
            continue
        for removal in removals.get(read.args["key"], ()):
            if not removal.precedes(read):
                continue
            run.count()
            to = removal.args["to"] if removal.op == "delete" else None
            back = [
                value
                for number, value in read.result["events"]
                if (to is None or number <= to) and existed.get(value, removal.start_ns) < removal.start_ns
            ]
            if back:
                run.violated(read.args["key"], f"{first_few(back)} came back after {removal}: {read}")
                break
    return run.verdict()


def _existed_ns(history: RecordedHistory, evidence: Evidence) -> dict[str, int]:
    """Return for each value a time at which its event certainly existed."""
    found: dict[str, int] = {}
    for call in history.of("append"):
        if call.outcome == "ok":
            for value in call.args["values"]:
                found[value] = min(found.get(value, call.end_ns), call.end_ns)
    for value, sightings in evidence.sightings.items():
        first = min(each.call.end_ns for each in sightings)
        found[value] = min(found.get(value, first), first)
    return found


def check_snapshots(history: RecordedHistory) -> RuleVerdict:
    """Check that a loaded snapshot was saved, at or below the requested number, and in no purged incarnation."""
    run = RuleRun("snapshots are of the current incarnation")
    saves: dict[str, list[RecordedCall]] = defaultdict(list)
    for call in history.of("save_snapshot"):
        if call.outcome != "fail":
            saves[call.args["key"]].append(call)
    purges: dict[str, list[RecordedCall]] = defaultdict(list)
    for call in history.of("purge"):
        if call.outcome == "ok":
            purges[call.args["key"]].append(call)
    for load in history.of("load_snapshot"):
        if load.outcome != "ok" or load.result is None:
            continue
        run.count()
        key, seq_nr, payload = load.args["key"], load.result["seq_nr"], load.result["payload"]
        if "to" in load.args and seq_nr > load.args["to"]:
            run.violated(key, f"{load} is above the requested number")
        same = [
            save
            for save in saves[key]
            if (save.args["seq_nr"], save.args["payload"]) == (seq_nr, payload) and not load.precedes(save)
        ]
        if not same:
            run.violated(key, f"{load} was never saved")
        elif all(any(save.precedes(purge) and purge.precedes(load) for purge in purges[key]) for save in same):
            run.violated(key, f"{load} was saved in an incarnation that was purged before")
    return run.verdict()
