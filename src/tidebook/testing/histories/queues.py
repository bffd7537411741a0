"""The rules of queues: an entry has one holder at a time, is finished at least once, and then stays finished."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import msgspec

from tidebook.testing.histories.call import NEVER_NS, RecordedCall, RecordedHistory
from tidebook.testing.histories.verdict import RuleRun, RuleVerdict

#: The dates of a lease are rounded to milliseconds.
ROUNDED_MS = 2


class Hold(msgspec.Struct):
    """An entry that one worker holds, from its claim to its end."""

    claim: RecordedCall
    id: int
    key: str | None
    value: str
    #: Both times are by the clock of the store, which decides leases.
    started_ms: int
    lease_until_ms: int
    #: When the worker began to finish the entry or to give it back, in a call that did not fail: one that failed has
    #: changed nothing.
    released_ns: int = NEVER_NS
    released_by: str | None = None
    #: The outcome of that call, ok or unknown; None if there was none. The call may have been retried.
    outcome: str | None = None
    ended_ns: int = NEVER_NS

    @property
    def subject(self) -> str:
        """What only one worker may hold at a time: the key, or the entry if it has no key."""
        return self.key if self.key is not None else f"entry {self.id}"

    def release(self, call: RecordedCall) -> None:
        """Take a call that may have released the entry; of several, one that was acknowledged counts."""
        if call.outcome != "fail" and self.outcome != "ok":
            self.released_ns, self.released_by = min(self.released_ns, call.start_ns), call.op
            self.outcome, self.ended_ns = call.outcome, call.end_ns

    @property
    def lease_until_ns(self) -> int:
        """The time by the machine's monotonic clock at which the lease ends at the earliest."""
        return self.claim.start_ns + (self.lease_until_ms - self.started_ms - ROUNDED_MS) * 1_000_000

    def is_leased_at(self, other: Hold) -> bool:
        """Return whether the lease was valid, by either clock, when the claim of the other hold began or ended."""
        return self.lease_until_ms > other.started_ms or self.lease_until_ns > other.claim.end_ns

    def may_precede(self, other: Hold) -> bool:
        """Return whether this hold may have ended before the other began.

        A lease must have ended by the store's clock and by the monotonic one: otherwise the store's is not one clock.
        The store dates a claim when its statement begins, but it takes effect at some time during the call.
        """
        took_ms = (other.claim.end_ns - other.claim.start_ns) / 1_000_000
        is_over = self.lease_until_ms <= other.started_ms + took_ms and self.lease_until_ns <= other.claim.end_ns
        return is_over or self.released_ns <= other.claim.end_ns


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
            hold.release(call)
    return list(found.values())


def check_holders(history: RecordedHistory) -> RuleVerdict:
    """Check that no entry and no key has two holders with a valid lease, and that finished entries stay finished."""
    run = RuleRun("a queue entry has one valid holder")
    by_subject: dict[str, list[Hold]] = defaultdict(list)
    for hold in _holds(history):
        by_subject[hold.subject].append(hold)
    for subject, holds in by_subject.items():
        holds.sort(key=lambda hold: (hold.claim.end_ns, hold.started_ms))
        run.count(len(holds))
        leased: list[Hold] = []
        for second in holds:
            leased = [first for first in leased if first.is_leased_at(second)]
            for first in leased:
                if not first.may_precede(second) and not second.may_precede(first):
                    run.violated(subject, f"held by {first.claim.name} and {second.claim.name} at the same time")
            leased.append(second)
        by_id: dict[int, list[Hold]] = defaultdict(list)
        for hold in holds:
            by_id[hold.id].append(hold)
        for same in by_id.values():
            _check_ends(run, subject, same)
    return run.verdict()


def _check_ends(run: RuleRun, subject: str, holds: Sequence[Hold]) -> None:
    """Check that nobody else held an entry when it was released, and that nobody claimed or finished it afterwards."""
    for end in holds:
        if end.outcome != "ok":
            continue
        for hold in holds:
            if hold is end:
                continue
            is_finished = end.released_by == "finish"
            if is_finished and hold.claim.start_ns > end.ended_ns:
                run.violated(subject, f"{hold.claim.name} claimed an entry that {end.claim.name} had finished")
            elif end.claim.precedes(hold.claim) and hold.claim.end_ns < end.released_ns:
                run.violated(
                    subject, f"{end.claim.name} released an entry that {hold.claim.name} had claimed meanwhile"
                )
            elif is_finished and (hold.released_by, hold.outcome) == ("finish", "ok"):
                run.violated(subject, f"{hold.claim.name} and {end.claim.name} both finished the entry")


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
            continue
        if puts_by_value[hold.value].outcome == "fail":
            run.violated(hold.subject, f"{hold.value} was claimed, and its put has failed")
        if hold.released_by == "finish":
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
