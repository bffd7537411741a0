"""The rules of write-ahead logs: what is acknowledged or was replayed is replayed, and what is fenced is not."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator

from tidebook.testing.histories.call import NEVER_NS, RecordedCall, RecordedHistory
from tidebook.testing.histories.verdict import RuleRun, RuleVerdict, first_few


class _Table:
    """The entries of a table that are known from acknowledged writes and from replays."""

    def __init__(self) -> None:
        self.seqs: list[int] = []
        self.values: dict[int, str] = {}
        #: From when on an entry must be replayed, until it is marked deleted.
        self.known_ns: dict[int, int] = {}
        self.marks: list[RecordedCall] = []

    def add(self, seq: int, value: str, ns: int) -> str:
        """Add an entry that is known from this time on; return the value that is known by its number."""
        if seq not in self.values:
            self.values[seq] = value
            insort(self.seqs, seq)
        self.known_ns[seq] = min(self.known_ns.get(seq, NEVER_NS), ns)
        return self.values[seq]

    def marked(self, before_ns: int) -> int:
        """Return the highest mark that may have been set before this time."""
        return max((mark.args["seq"] for mark in self.marks if mark.start_ns < before_ns), default=0)

    def missing(self, replay: RecordedCall, present: set[str]) -> Iterator[str]:
        """Yield the entries that were known when the replay began, were not marked, and are not in it."""
        for seq in self.seqs[bisect_left(self.seqs, self.marked(replay.end_ns)) :]:
            if self.known_ns[seq] < replay.start_ns and self.values[seq] not in present:
                yield self.values[seq]


def check_wal(history: RecordedHistory) -> RuleVerdict:
    """Check every replay against the writes and marks of its region, and against the replays before it."""
    run = RuleRun("acknowledged WAL writes are replayed, fenced ones are not")
    tables: dict[str, dict[int, _Table]] = defaultdict(lambda: defaultdict(_Table))
    by_value: dict[str, RecordedCall] = {}
    for write in history.of("wal_write"):
        region, table = write.args["region"], write.args["table"]
        by_value |= dict.fromkeys(write.args["values"], write)
        if write.outcome == "ok":
            for seq, value in enumerate(write.args["values"], write.result["first"]):
                if (known := tables[region][table].add(seq, value, write.end_ns)) != value:
                    run.violated(f"{region}/{table}", f"number {seq} was acknowledged to {known} and to {value}")
    for mark in history.of("wal_mark"):
        if mark.outcome != "fail":
            tables[mark.args["region"]][mark.args["table"]].marks.append(mark)
    replays = [replay for replay in history.of("wal_replay") if replay.outcome == "ok"]
    for replay in replays:
        run.count(len(replay.result))
        _check_entries(run, replay, by_value, tables[replay.args["region"]])
    for replay in replays:
        present = {value for _, _, value in replay.result}
        for number, table in tables[replay.args["region"]].items():
            if missing := [*table.missing(replay, present)]:
                subject = f"{replay.args['region']}/{number}"
                run.violated(
                    subject, f"acknowledged or replayed before, but not by {replay.name}: {first_few(missing)}"
                )
    return run.verdict()


def _check_entries(
    run: RuleRun, replay: RecordedCall, by_value: dict[str, RecordedCall], tables: dict[int, _Table]
) -> None:
    region = replay.args["region"]
    found: dict[int, dict[int, str]] = defaultdict(dict)
    for table, seq, value in replay.result:
        subject, entries = f"{region}/{table}", found[table]
        last = next(reversed(entries), None)
        if last is None and seq > max(1, tables[table].marked(replay.end_ns)):
            run.violated(subject, f"{replay.name} begins with number {seq}")
        if last is not None and seq != last + 1:
            run.violated(subject, f"{replay.name} has number {seq} after {last}")
        entries[seq] = value
        known = tables[table].add(seq, value, replay.end_ns)
        if known != value:
            run.violated(subject, f"number {seq} is {value} in {replay.name}, and was {known} before")
        write = by_value.get(value)
        if write is None:
            run.violated(subject, f"{value} was never written")
        elif write.outcome == "fail":
            run.violated(subject, f"{value} failed with {write.error}, and is replayed by {replay.name}")
        elif (write.args["region"], write.args["table"]) != (region, table):
            run.violated(subject, f"{value} was written to {write.args['region']}/{write.args['table']}")
        elif write.outcome == "ok" and seq != write.result["first"] + write.args["values"].index(value):
            run.violated(subject, f"{value} is number {seq}, and was acknowledged as {write.result}")
        elif replay.precedes(write):
            run.violated(subject, f"{value} is replayed before it was written")
    for table, entries in found.items():
        marked = tables[table].marked(replay.end_ns)
        for seq, value in entries.items():
            if value in by_value:
                _check_whole(run, replay, by_value[value], f"{region}/{table}", entries, seq, marked)


def _check_whole(
    run: RuleRun,
    replay: RecordedCall,
    write: RecordedCall,
    subject: str,
    entries: dict[int, str],
    seq: int,
    marked: int,
) -> None:
    """Check that the entry that follows in the write of an entry is the next one in the replay too."""
    values = write.args["values"]
    after = values.index(entries[seq]) + 1
    if after < len(values) and seq + 1 >= marked and entries.get(seq + 1) != values[after]:
        run.violated(subject, f"{replay.name} has {entries[seq]} without {values[after]} of the same write")
    before = after - 2
    if before >= 0 and seq - 1 >= marked and entries.get(seq - 1) != values[before]:
        run.violated(subject, f"{replay.name} has {entries[seq]} without {values[before]} of the same write")
