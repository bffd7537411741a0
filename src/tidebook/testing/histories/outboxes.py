"""The rule of the outbox: a message arrives once if its transaction committed, and in the order of its key."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from tidebook.testing.histories.call import RecordedCall, RecordedHistory
from tidebook.testing.histories.verdict import RuleRun, RuleVerdict, first_few


class Arrival(NamedTuple):
    """Where a message arrived."""

    topic: str
    key: str
    #: The partition and the offset.
    place: tuple[int, int]


def check_outbox(history: RecordedHistory) -> RuleVerdict:
    """Check the messages that arrived in each topic against the transactions that published to it."""
    run = RuleRun("outbox messages arrive once, if committed, in key order")
    arrivals = _arrived(history, run)
    if arrivals is None:
        return run.verdict()
    by_key: dict[tuple[str, str], list[RecordedCall]] = defaultdict(list)
    for call in history.of("transaction"):
        values = [value for _, _, value in call.args["messages"]]
        present = [value for value in values if value in arrivals]
        run.count(len(values))
        match call.outcome:
            case "ok" if len(present) < len(values):
                lost = [value for value in values if value not in arrivals]
                run.violated(call.name, f"committed, but never arrived: {first_few(lost)}")
            case "fail" if present:
                run.violated(call.name, f"rolled back, but arrived: {first_few(present)}")
            case "unknown" if 0 < len(present) < len(values):
                run.violated(call.name, f"arrived in part: {first_few(present)} of {first_few(values)}")
        for topic, key, value in call.args["messages"]:
            arrival = arrivals.get(value)
            if arrival is not None and (arrival.topic, arrival.key) != (topic, key):
                run.violated(value, f"was published to {topic}/{key}, and arrived in {arrival.topic}/{arrival.key}")
        for published_to in {(topic, key) for topic, key, value in call.args["messages"] if value in arrivals}:
            by_key[published_to].append(call)
    published = {value for call in history.of("transaction") for _, _, value in call.args["messages"]}
    for value in arrivals:
        if value not in published:
            run.violated(value, "arrived, but was never published")
    for (topic, key), calls in by_key.items():
        _check_order(run, f"{topic}/{key}", [(call, _places_of(call, topic, key, arrivals)) for call in calls])
    return run.verdict()


def _arrived(history: RecordedHistory, run: RuleRun) -> dict[str, Arrival] | None:
    """Return where each message arrived; None if the history has no dump of the messages."""
    dumps = [call for call in history.of("dump_messages") if call.outcome == "ok"]
    if not dumps:
        return None
    found: dict[str, Arrival] = {}
    for dump in dumps:
        for row in dump.result:
            arrival = Arrival(dump.args["topic"], row["key"], (row["partition"], row["offset"]))
            if row["value"] in found:
                run.violated(f"{arrival.topic}/{arrival.key}", f"{row['value']} arrived twice")
            found[row["value"]] = arrival
    return found


def _places_of(call: RecordedCall, topic: str, key: str, arrivals: dict[str, Arrival]) -> list[tuple[int, int]]:
    values = (value for t, k, value in call.args["messages"] if (t, k) == (topic, key))
    return [arrivals[value].place for value in values if value in arrivals]


def _check_order(run: RuleRun, subject: str, calls: list[tuple[RecordedCall, list[tuple[int, int]]]]) -> None:
    """Check the order within each transaction, and that a transaction precedes those that began after its commit."""
    if len({partition for _, found in calls for partition, _ in found}) > 1:
        run.violated(subject, "the messages of one key are in several partitions")
    for call, found in calls:
        if found != sorted(found):
            run.violated(subject, f"out of order within {call.name}")
    ended = sorted(((call, found) for call, found in calls if call.outcome == "ok"), key=lambda each: each[0].end_ns)
    index, latest, owner = 0, (-1, -1), ""
    for call, found in sorted(calls, key=lambda each: each[0].start_ns):
        while index < len(ended) and ended[index][0].precedes(call):
            if max(ended[index][1]) > latest:
                latest, owner = max(ended[index][1]), ended[index][0].name
            index += 1
        if min(found) < latest:
            run.violated(subject, f"{call.name} began after {owner} had committed, and arrived before it")
