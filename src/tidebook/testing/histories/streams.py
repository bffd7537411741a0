"""The rules of the consumers of journals: streams by tag, groups and projections."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from tidebook.testing.histories.call import RecordedCall, RecordedHistory
from tidebook.testing.histories.log_fold import FoldedEvent
from tidebook.testing.histories.verdict import RuleRun, RuleVerdict, first_few, repeated


def check_tag_streams(history: RecordedHistory, events: Mapping[str, FoldedEvent] | None) -> RuleVerdict:
    """Check that each stream of a tag delivers the tag's events, each once, in the order of their positions."""
    run = RuleRun("streams by tag have each event once, in order")
    streams: dict[tuple[str, str], list[RecordedCall]] = defaultdict(list)
    for call in history.of("deliver"):
        streams[call.args["stream"], call.args["tag"]].append(call)
    positions: dict[tuple[str, str], list[Any]] = {}
    for (stream, tag), calls in streams.items():
        delivered = [call.result for call in calls]
        run.count(len(delivered))
        subject = f"{stream} of tag {tag}"
        if twice := list(repeated(each["value"] for each in delivered)):
            run.violated(subject, f"delivered twice: {first_few(twice)}")
        for before, after in pairwise(delivered):
            if after["position"] <= before["position"]:
                run.violated(subject, f"{after} was delivered after {before}")
        for each in delivered:
            known = positions.setdefault((tag, each["value"]), each["position"])
            if known != each["position"]:
                run.violated(subject, f"{each} was delivered to another stream at position {known}")
        if events is not None:
            _compare(run, subject, delivered, {v: e for v, e in events.items() if tag in e.tags})
    for dump in history.of("dump_tag"):
        if dump.outcome == "ok" and events is not None:
            _check_rest(
                run, dump, events, {value: at for (tag, value), at in positions.items() if tag == dump.args["tag"]}
            )
    return run.verdict()


def _check_rest(
    run: RuleRun, dump: RecordedCall, events: Mapping[str, FoldedEvent], positions: Mapping[str, Any]
) -> None:
    """Check that a whole stream, read at the end of the run, has all remaining events, and no removed one."""
    tag, found = dump.args["tag"], dump.result
    run.count(len(found))
    left = {value for value, event in events.items() if tag in event.tags and not event.removed}
    subject = f"tag {tag} at the end"
    if missing := [value for value in left if value not in set(found)]:
        run.violated(subject, f"lacks {first_few(missing)}")
    if removed := [value for value in found if value not in left]:
        run.violated(subject, f"has {first_few(removed)}, which were removed or never existed")
    if twice := list(repeated(found)):
        run.violated(subject, f"has twice: {first_few(twice)}")
    places = [positions[value] for value in found if value in positions]
    if places != sorted(places):
        run.violated(subject, "its order differs from that of the delivered streams")


def _compare(
    run: RuleRun, subject: str, delivered: Sequence[Mapping[str, Any]], expected: Mapping[str, FoldedEvent]
) -> None:
    for each in delivered:
        event = expected.get(each["value"])
        if event is None:
            run.violated(subject, f"{each} is not an event of this stream")
        elif (each["key"], each["seq_nr"], tuple(each["position"][2:5])) != (event.key, event.seq_nr, event.place):
            run.violated(subject, f"{each} is event {event.seq_nr} of {event.key} at {event.place}")
    present = {each["value"] for each in delivered}
    missing = [value for value, event in expected.items() if not event.removed and value not in present]
    if missing:
        run.violated(subject, f"never delivered: {first_few(missing)}")


def check_consumers(history: RecordedHistory, events: Mapping[str, FoldedEvent] | None) -> RuleVerdict:
    """Check that groups and projections have applied each event exactly once, those of a journal in its order."""
    run = RuleRun("groups and projections apply each event exactly once")
    for dump in history.of("dump_effects"):
        if dump.outcome != "ok":
            continue
        subject, rows = dump.args["consumer"], dump.result
        run.count(len(rows))
        if twice := list(repeated(row["value"] for row in rows)):
            run.violated(subject, f"applied twice: {first_few(twice)}")
        if events is None:
            continue
        expected = {value: event for value, event in events.items() if _is_of(dump, event)}
        last: dict[str, FoldedEvent] = {}
        for row in rows:
            event = expected.get(row["value"])
            if event is None:
                run.violated(subject, f"{row} is not an event of this consumer")
                continue
            if event.key != row["key"]:
                run.violated(subject, f"{row} is an event of {event.key}")
            before = last.get(event.key)
            if before is not None and event.place < before.place:
                run.violated(subject, f"{event.key}: {event.value} was applied after {before.value}")
            last[event.key] = event
        present = {row["value"] for row in rows}
        missing = [value for value, event in expected.items() if not event.removed and value not in present]
        if missing:
            run.violated(subject, f"never applied: {first_few(missing)}")
    return run.verdict()


def _is_of(dump: RecordedCall, event: FoldedEvent) -> bool:
    tag, topic = dump.args.get("tag"), dump.args.get("topic")
    return (tag is None or tag in event.tags) and (topic is None or event.key.split("/", 1)[0] == topic)
