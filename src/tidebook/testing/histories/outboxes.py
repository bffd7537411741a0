"""The rule of the outbox: a message arrives once if its transaction committed, and in the order of its key."""

from __future__ import annotations

from collections import defaultdict

from tidebook.testing.histories.call import RecordedCall, RecordedHistory
from tidebook.testing.histories.verdict import RuleRun, RuleVerdict, first_few


def check_outbox(history: RecordedHistory) -> RuleVerdict:
    """Check the messages that arrived in each topic against the transactions that published to it."""
    run = RuleRun("outbox messages arrive once, if committed, in key order")
    places = _arrived(history, run)
    if places is None:
        return run.verdict()
    by_key: dict[tuple[str, str], list[RecordedCall]] = defaultdict(list)
    for call in history.of("transaction"):
        values = [value for _, _, value in call.args["messages"]]
        present = [value for value in values if value in places]
        run.count(len(values))
        match call.outcome:
            case "ok" if len(present) < len(values):
                lost = [value for value in values if value not in places]
                run.violated(call.name, f"committed, but never arrived: {first_few(lost)}")
            case "fail" if present:
                run.violated(call.name, f"rolled back, but arrived: {first_few(present)}")
            case "unknown" if 0 < len(present) < len(values):
                run.violated(call.name, f"arrived in part: {first_few(present)} of {first_few(values)}")
        for place in {(topic, key) for topic, key, value in call.args["messages"] if value in places}:
            by_key[place].append(call)
    published = {value for call in history.of("transaction") for _, _, value in call.args["messages"]}
    for value in places:
        if value not in published:
            run.violated(value, "arrived, but was never published")
    for (topic, key), calls in by_key.items():
        _check_order(run, f"{topic}/{key}", [(call, _places_of(call, topic, key, places)) for call in calls])
    return run.verdict()


def _arrived(history: RecordedHistory, run: RuleRun) -> dict[str, tuple[int, int]] | None:
    """Return the partition and offset of each message; None if the history has no dump of the messages."""
    dumps = [call for call in history.of("dump_messages") if call.outcome == "ok"]
    if not dumps:
        return None
    found: dict[str, tuple[int, int]] = {}
    for dump in dumps:
        for row in dump.result:
            if row["value"] in found:
                run.violated(f"{dump.args['topic']}/{row['key']}", f"{row['value']} arrived twice")
            found[row["value"]] = (row["partition"], row["offset"])
    return found


def _places_of(call: RecordedCall, topic: str, key: str, places: dict[str, tuple[int, int]]) -> list[tuple[int, int]]:
    values = (value for t, k, value in call.args["messages"] if (t, k) == (topic, key))
    return [places[value] for value in values if value in places]


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
