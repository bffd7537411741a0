"""The rules of queues: an entry has one holder at a time, is finished at least once, and then stays finished."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise

import msgspec

from tidebook.testing.histories.call import NEVER_NS, RecordedCall, RecordedHistory
from tidebook.testing.histories.verdict import RuleRun, RuleVerdict


class Hold(msgspec.Struct):
    """An entry that one worker holds, from its claim to its end."""

    claim: RecordedCall
    id: int
    key: str | None
    value: str
    #: Both times are by the clock of the store, which decides leases.
    started_ms: int
    lease_until_ms: int
    #: When the worker began to give the entry back, finished or failed.
    released_ns: int = NEVER_NS
    released_by: str | None = None
    #: The outcome of that call; None if there was none.
    outcome: str | None = None
    ended_ns: int = NEVER_NS

    @property
    def subject(self) -> str:
        """What only one worker may hold at a time: the key, or the entry if it has no key."""
        return self.key if self.key is not None else f"entry {self.id}"


def _holds(history: RecordedHistory) -> list[Hold]:
    found: dict[str, Hold] = {}
    for call in history.of("claim", "heartbeat", "finish", "give_back"):
        if call.op == "claim":
            for each in call.result or () if call.outcome == "ok" else ():
                found[each["hold"]] = Hold(
                    call, each["id"], each["key"], each["value"], each["started_ms"], each["lease_until_ms"]
                )
            continue
        hold = found[call.args["hold"]]
        if call.op == "heartbeat":
            if call.outcome == "ok":
                hold.lease_until_ms = max(hold.lease_until_ms, call.result["lease_until_ms"])
        else:
            hold.released_ns, hold.released_by = call.start_ns, call.op
            hold.outcome, hold.ended_ns = call.outcome, call.end_ns
    return list(found.values())


def check_holders(history: RecordedHistory) -> RuleVerdict:
    """Check that no entry and no key has two holders with a valid lease, and that finished entries stay finished."""
    run = RuleRun("a queue entry has one valid holder")
    by_subject: dict[str, list[Hold]] = defaultdict(list)
    for hold in _holds(history):
        by_subject[hold.subject].append(hold)
    for subject, holds in by_subject.items():
        holds.sort(key=lambda hold: (hold.started_ms, hold.claim.end_ns))
        run.count(len(holds))
        for first, second in pairwise(holds):
            # The store dates a claim when its statement begins, but it takes effect at some time during the call.
            took_ms = (second.claim.end_ns - second.claim.start_ns) / 1_000_000
            if second.started_ms + took_ms < first.lease_until_ms and second.claim.end_ns < first.released_ns:
                run.violated(subject, f"held by {first.claim.name} and {second.claim.name} at the same time")
        finished = {hold.id: hold for hold in holds if hold.released_by == "finish" and hold.outcome == "ok"}
        for hold in holds:
            end = finished.get(hold.id)
            if end is None or end is hold:
                continue
            if hold.claim.start_ns > end.ended_ns:
                run.violated(subject, f"{hold.claim.name} claimed an entry that {end.claim.name} had finished")
            elif end.claim.precedes(hold.claim) and hold.claim.end_ns < end.released_ns:
                run.violated(
                    subject, f"{end.claim.name} finished an entry that {hold.claim.name} had claimed meanwhile"
                )
    return run.verdict()


def check_puts(history: RecordedHistory) -> RuleVerdict:
    """Check that every acknowledged put is finished: itself or, merged, with a later one of its key.

    The history must have a quiet end: its `dump_queue` must contain no entry.
    """
    run = RuleRun("queue entries are finished at least once")
    dumps = [call for call in history.of("dump_queue") if call.outcome == "ok"]
    if not dumps:
        return run.verdict()
    left = {entry["value"] for dump in dumps for entry in dump.result}
    puts_by_value: dict[str, RecordedCall] = {call.args["value"]: call for call in history.of("put")}
    #: The puts whose entries were finished with their own data.
    done: dict[str, list[RecordedCall]] = defaultdict(list)
    held: set[str] = set()
    for hold in _holds(history):
        held.add(hold.value)
        if hold.value not in puts_by_value:
            run.violated(hold.subject, f"{hold.value} was never put")
        elif hold.released_by == "finish" and hold.outcome != "fail":
            done[hold.key or hold.value].append(puts_by_value[hold.value])
    lost_claim_ns = max((call.start_ns for call in history.of("claim") if call.outcome == "unknown"), default=0)
    puts: dict[str, list[RecordedCall]] = defaultdict(list)
    for call in history.of("put"):
        puts[call.args.get("key") or call.args["value"]].append(call)
    for key, calls in puts.items():
        covered = _covered(calls, done[key], lambda put: put.args["value"] in held or put.start_ns < lost_claim_ns)
        for call in calls:
            if call.outcome != "ok":
                continue
            run.count()
            if call.args["value"] in left:
                run.violated(call.args["value"], "is left in the queue")
            elif call not in covered:
                run.violated(call.args["value"], f"was put by {call.name}, and never finished")
    return run.verdict()


def _covered(
    puts: Sequence[RecordedCall], done: Sequence[RecordedCall], may_be_held: Callable[[RecordedCall], bool]
) -> set[RecordedCall]:
    """Return the puts of one key that are finished, themselves or merged into a finished one.

    A put replaces the data of a waiting entry and reports that it merged. An entry that was held, and was given back or
    lost its lease, is merged into a newer one without a report. Such merges may form chains.
    """
    covered = set(done)
    while True:
        # Each pass finds the puts that are merged into those that are already covered.
        found = {
            put
            for put in reversed(puts)
            if put not in covered and any(_may_merge(put, into, may_be_held) for into in covered)
        }
        if not found:
            return covered
        covered |= found


def _may_merge(put: RecordedCall, into: RecordedCall, may_be_held: Callable[[RecordedCall], bool]) -> bool:
    merged = into.outcome != "ok" or into.result["merged"] > 0 or may_be_held(put)
    return merged and not into.precedes(put)
