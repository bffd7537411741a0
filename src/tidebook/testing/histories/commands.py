"""The rules of deciders and process managers: each command takes effect once, and so does each effect of an event."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from tidebook.testing.histories.call import RecordedCall, RecordedHistory
from tidebook.testing.histories.linearizability import (
    CONFIGURATIONS_MAX,
    Linearizable,
    NotLinearizable,
    Step,
    find_order,
)
from tidebook.testing.histories.log_fold import FoldedEvent, LoggedJournal
from tidebook.testing.histories.verdict import RuleRun, RuleVerdict, first_few, repeated


class ModelAccount(NamedTuple):
    """An entity of a decider: a balance, the number of its last event, and the commands that were tried repeatedly."""

    balance: int = 0
    last: int = 0
    #: (command id, number, balance after it).
    retried: tuple[tuple[str, int, int], ...] = ()


class AccountModel:
    """The model of accounts: a deposit adds, and a withdrawal of more than the balance is refused."""

    def __init__(self, numbers: Mapping[str, int] | None, retried_ids: frozenset[str]) -> None:
        #: The number of each value in the log, if the history has a dump of it.
        self._numbers = numbers
        self._retried_ids = retried_ids

    def step(self, state: ModelAccount, call: RecordedCall) -> ModelAccount | None:
        """Return the state after a call; None if the call could not have returned its result in this state."""
        if call.op == "balance":
            return state if (call.result["state"], call.result["seq_nr"]) == (state.balance, state.last) else None
        args = call.args
        known = next((each for each in state.retried if each[0] == args["command_id"]), None)
        if known is not None:
            return state if call.outcome == "ok" and _result(call) == known[1:] else None
        is_refused = args["command"] == "withdraw" and args["amount"] > state.balance
        if call.outcome == "fail":
            return state if is_refused and call.result["found"] == state.balance else None
        last = state.last + 1
        if is_refused or (self._numbers is not None and self._numbers.get(args["value"]) != last):
            return None
        balance = state.balance + (args["amount"] if args["command"] == "deposit" else -args["amount"])
        if call.outcome == "ok" and _result(call) != (last, balance):
            return None
        retried = state.retried
        if args["command_id"] in self._retried_ids:
            retried = (*retried, (args["command_id"], last, balance))
        return ModelAccount(balance, last, retried)

    def kind(self, call: RecordedCall) -> tuple[object, ...] | None:
        """Return None, because no two commands of unknown outcome are interchangeable."""
        return None


def _result(call: RecordedCall) -> tuple[int, int]:
    return call.result["seq_nr"], call.result["state"]


def check_commands(
    history: RecordedHistory,
    folded: Mapping[str, LoggedJournal] | None,
    *,
    configurations_max: int = CONFIGURATIONS_MAX,
) -> RuleVerdict:
    """Check that some order of an entity's commands explains all results, and that the log has only them, each once."""
    run = RuleRun("commands of deciders take effect once, in one order")
    by_key: dict[str, list[RecordedCall]] = defaultdict(list)
    for call in history.of("execute", "balance"):
        by_key[call.args["key"]].append(call)
    for key, calls in by_key.items():
        numbers = None
        if folded is not None:
            events = folded[key].events if key in folded else []
            numbers = {event.value: event.seq_nr for event in events}
            if twice := list(repeated(event.value for event in events)):
                run.violated(key, f"executed twice: {first_few(twice)}")
            _check_log(run, calls, numbers)
        attempts = Counter(call.args["command_id"] for call in calls if call.op == "execute")
        model = AccountModel(numbers, frozenset(id for id, count in attempts.items() if count > 1))
        relevant = [call for call in calls if _matters(call, numbers)]
        run.count(len(relevant))
        step: Step[ModelAccount] = model.step
        match find_order(relevant, ModelAccount(), step, model.kind, configurations_max=configurations_max):
            case Linearizable():
                pass
            case NotLinearizable(_, call, states):
                run.violated(key, f"no order explains {call}: before it the entity was {first_few(states, 3)}")
            case undecided:
                message = f"undecided after {undecided.configurations:,} configurations"
                run.violated(key, message, undecided=True)
    return run.verdict()


def _matters(call: RecordedCall, numbers: Mapping[str, int] | None) -> bool:
    if call.op == "balance":
        return call.outcome == "ok"
    if call.outcome == "fail":
        return call.error == "Refused"
    return call.outcome == "ok" or numbers is None or call.args["value"] in numbers


def _check_log(run: RuleRun, calls: list[RecordedCall], numbers: Mapping[str, int]) -> None:
    executed = [call for call in calls if call.op == "execute"]
    succeeded = {call.args["command_id"] for call in executed if call.outcome != "fail"}
    for call in executed:
        if call.outcome == "ok" and call.args["value"] not in numbers:
            run.violated(call.args["key"], f"acknowledged, but not in the log: {call}")
        elif call.args["command_id"] not in succeeded and call.args["value"] in numbers:
            run.violated(call.args["key"], f"failed, but in the log: {call}")
    commanded = {call.args["value"] for call in executed}
    if invented := [value for value in numbers if value not in commanded]:
        run.violated(calls[0].args["key"], f"in the log without a command: {first_few(invented)}")


def check_effects(history: RecordedHistory, folded: Mapping[str, LoggedJournal] | None) -> RuleVerdict:
    """Check that each event of a process manager's topic has had its effect exactly once, in its journal's order."""
    run = RuleRun("process managers cause each effect exactly once")
    for dump in history.of("dump_caused"):
        if dump.outcome != "ok" or folded is None:
            continue
        subject = f"{dump.args['process']} ({dump.args['effect']})"
        sources = {call.args["key"] for call in history.of("execute")} & folded.keys()
        events = {event.value: event for key in sources for event in folded[key].events}
        run.count(len(dump.result))
        if twice := list(repeated(row["value"] for row in dump.result)):
            run.violated(subject, f"caused twice: {first_few(twice)}")
        present = {row["value"] for row in dump.result}
        if invented := [value for value in present if value not in events]:
            run.violated(subject, f"caused by no event: {first_few(invented)}")
        if missing := [value for value in events if value not in present]:
            run.violated(subject, f"never caused: {first_few(missing)}")
        if dump.args["effect"] == "command":
            _check_order(run, subject, dump, events)
    return run.verdict()


def _check_order(run: RuleRun, subject: str, dump: RecordedCall, events: Mapping[str, FoldedEvent]) -> None:
    """Check that the commands of each source are in the order of its events."""
    last: dict[str, FoldedEvent] = {}
    for row in dump.result:
        event = events.get(row["value"])
        if event is None:
            continue
        if event.key != row["key"]:
            run.violated(subject, f"{event.value} of {event.key} took effect as one of {row['key']}")
        before = last.get(event.key)
        if before is not None and event.place < before.place:
            run.violated(subject, f"{event.key}: {event.value} took effect after {before.value}")
        last[event.key] = event
