"""The rules of write-ahead logs: acknowledged writes are replayed, and fenced ones are not."""

from __future__ import annotations

from collections import defaultdict

from tidebook.testing.histories.call import RecordedCall, RecordedHistory
from tidebook.testing.histories.verdict import RuleRun, RuleVerdict, first_few

Table = tuple[str, int]


def check_wal(history: RecordedHistory) -> RuleVerdict:
    """Check every replay against the writes and marks of its region."""
    run = RuleRun("acknowledged WAL writes are replayed, fenced ones are not")
    writes: dict[str, list[RecordedCall]] = defaultdict(list)
    by_value: dict[str, RecordedCall] = {}
    for call in history.of("wal_write"):
        writes[call.args["region"]].append(call)
        by_value |= dict.fromkeys(call.args["values"], call)
    marks = [call for call in history.of("wal_mark") if call.outcome != "fail"]
    numbers: dict[tuple[str, int, int], str] = {}
    for replay in history.of("wal_replay"):
        if replay.outcome != "ok":
            continue
        region = replay.args["region"]
        run.count(len(replay.result))
        _check_entries(run, replay, by_value, numbers)
        marked: dict[int, int] = defaultdict(int)
        for mark in marks:
            if mark.args["region"] == region and mark.start_ns < replay.end_ns:
                marked[mark.args["table"]] = max(marked[mark.args["table"]], mark.args["seq"])
        present = {value for _, _, value in replay.result}
        for write in writes[region]:
            if write.outcome == "ok" and write.precedes(replay):
                expected = enumerate(write.args["values"], write.result["first"])
                lost = [v for seq, v in expected if seq >= marked[write.args["table"]] and v not in present]
                if lost:
                    run.violated(region, f"acknowledged, but not replayed by {replay.name}: {first_few(lost)}")
    return run.verdict()


def _check_entries(
    run: RuleRun, replay: RecordedCall, by_value: dict[str, RecordedCall], numbers: dict[tuple[str, int, int], str]
) -> None:
    region = replay.args["region"]
    last: dict[int, int] = {}
    for table, seq, value in replay.result:
        subject = f"{region}/{table}"
        if table in last and seq != last[table] + 1:
            run.violated(subject, f"{replay.name} has number {seq} after {last[table]}")
        last[table] = seq
        known = numbers.setdefault((region, table, seq), value)
        if known != value:
            run.violated(subject, f"number {seq} is {value} in {replay.name}, and was {known} before")
        write = by_value.get(value)
        if write is None:
            run.violated(subject, f"{value} was never written")
        elif write.outcome == "fail":
            run.violated(subject, f"{value} failed with {write.error}, and is replayed by {replay.name}")
        elif write.outcome == "ok" and seq != write.result["first"] + write.args["values"].index(value):
            run.violated(subject, f"{value} is number {seq}, and was acknowledged as {write.result}")
        elif replay.precedes(write):
            run.violated(subject, f"{value} is replayed before it was written")
