"""A small simulation that keeps every rule and records its history, which tests check or damage."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import msgspec

from tidebook.testing.histories.call import RecordedHistory, pair_lines
from tidebook.testing.histories.line import HistoryLine

TAGS = ("red", "blue")


class ToyJournal:
    """The simplest model of one journal."""

    def __init__(self) -> None:
        self.live, self.last, self.deleted, self.since = False, 0, 0, 0
        self.events: list[tuple[int, str]] = []


class World:
    """Journals, streams, an outbox, a queue and a write-ahead log; every call takes effect between its two lines."""

    def __init__(self, seed: int = 0, *, keys: int = 3, overlap: int = 4, lost: float = 0.1) -> None:
        self.dice = random.Random(seed)
        self.lines: list[HistoryLine] = []
        self.keys = [f"t/k{number}" for number in range(keys)]
        self._overlap = overlap
        self._lost = lost
        self._ns = 0
        self._calls = 0
        self._values = 0
        self._open: list[Callable[[], None]] = []
        self.journals: dict[str, ToyJournal] = defaultdict(ToyJournal)
        self.log: list[dict[str, Any]] = []
        self.delivered: list[dict[str, Any]] = []
        self._applied: dict[str, tuple[int, int]] = {}

    def tick(self) -> int:
        self._ns += self.dice.randrange(1, 5)
        return self._ns

    def value(self) -> str:
        self._values += 1
        return f"v{self._values}"

    def call(
        self,
        op: str,
        args: dict[str, Any],
        act: Callable[[], Any],
        *,
        process: str | None = None,
        lost: float | None = None,
    ) -> None:
        """Begin a call, which takes effect now or later, and ends after that or never."""
        self._calls += 1
        number, owner = self._calls, process or f"p{self._calls % 5}"
        self.lines.append(HistoryLine(owner, number, op, "invoke", self.tick(), args))

        def end() -> None:
            result = act()
            kind, error = "ok", None
            if isinstance(result, Exception):
                kind, error, result = "fail", type(result).__name__, vars(result) or None
            if self.dice.random() >= (self._lost if lost is None else lost):
                ends.append(HistoryLine(owner, number, op, kind, 0, {}, result, error))  # type: ignore[arg-type]

        ends: list[HistoryLine] = []

        def finish() -> None:
            for line in ends:
                self.lines.append(msgspec.structs.replace(line, ns=self.tick()))

        self._open += [end]
        self._open.append(finish)
        while len(self._open) > self._overlap:
            self._advance()

    def _advance(self) -> None:
        """Let one call in flight take its next step, which is its effect or its end."""
        index = self.dice.randrange(len(self._open) // 2) * 2
        effect, finish = self._open[index : index + 2]
        if effect is not _nothing:
            effect()
            self._open[index] = _nothing
        else:
            finish()
            del self._open[index : index + 2]

    def settle(self) -> None:
        while self._open:
            self._advance()

    def observe(self, op: str, result: Any, args: dict[str, Any]) -> None:
        self._calls += 1
        self.lines.append(HistoryLine("inspector", self._calls, op, "ok", self.tick(), args, result))

    @property
    def history(self) -> RecordedHistory:
        return pair_lines(self.lines)

    # ---- journals

    def append(self, key: str, *, id: str | None = None, expected: int | None = None, at: int | None = None) -> None:
        values = [self.value() for _ in range(self.dice.choice((1, 1, 2)))]
        args: dict[str, Any] = {"key": key, "append_id": id or f"a{self._values}", "values": values}
        if expected is not None:
            args["expected"] = expected
        if at is not None:
            args["at"] = at
        tags = [[self.dice.choice(TAGS)] for _ in values]
        self.call("append", args, lambda: self._append(args, tags))
        if self.dice.random() < 0.15:  # and retries once, with the same id
            self.call("append", args, lambda: self._append(args, tags))

    def _append(self, args: dict[str, Any], tags: list[list[str]]) -> Any:
        journal = self.journals[args["key"]]
        offset = self._log("append", args, tags=tags, values=args["values"], append_id=args["append_id"])
        if args["append_id"] in self._applied:
            first, last = self._applied[args["append_id"]]
            return {"first": first, "last": last}
        last = journal.last if journal.live else 0
        expected, at = args.get("expected"), args.get("at")
        if (expected is not None and expected != last) or (at is not None and at <= last):
            return Conflict(last)
        if not journal.live:
            journal.live, journal.deleted, journal.since = True, 0, offset
        first = last + 1 if at is None else at
        for index, value in enumerate(args["values"]):
            journal.events.append((first + index, value))
            for tag in tags[index]:
                position = [offset, "t", 0, offset, index]
                self.delivered.append(
                    {"tag": tag, "key": args["key"], "seq_nr": first + index, "value": value, "position": position}
                )
        journal.last = first + len(args["values"]) - 1
        self._applied[args["append_id"]] = (first, journal.last)
        return {"first": first, "last": journal.last}

    def _log(self, kind: str, args: dict[str, Any], **fields: Any) -> int:
        record = {"kind": kind, "key": args["key"], "offset": len(self.log), "epoch": 1, "epoch_of_log": 1}
        if kind == "append":
            record |= {"expected": args.get("expected"), "at": args.get("at")}
        self.log.append(record | fields)
        return len(self.log) - 1

    def read(self, key: str, start: int = 1) -> None:
        def act() -> Any:
            journal = self.journals[key]
            return {"events": [[n, v] for n, v in journal.events if n >= start]} if journal.live else {"events": []}

        self.call("read", {"key": key, "start": start}, act)

    def pointer(self, key: str) -> None:
        self.call("pointer", {"key": key}, lambda: self.journals[key].last if self.journals[key].live else None, lost=0)

    def delete(self, key: str, to: int) -> None:
        def act() -> None:
            journal = self.journals[key]
            offset = self._log("delete", {"key": key}, to=to)
            if not journal.live:
                journal.live, journal.last, journal.deleted, journal.since = True, to, to, offset
                return
            journal.deleted = max(journal.deleted, min(to, journal.last))
            journal.events = [each for each in journal.events if each[0] > to]

        self.call("delete", {"key": key, "to": to}, act)

    def purge(self, key: str) -> None:
        def act() -> None:
            journal = self.journals[key]
            self._log("purge", {"key": key})
            journal.live, journal.last, journal.deleted, journal.events = False, 0, 0, []

        self.call("purge", {"key": key}, act)

    def use_journals(self, steps: int) -> None:
        for _ in range(steps):
            key = self.dice.choice(self.keys)
            match self.dice.randrange(12):
                case 0:
                    self.append(key, expected=self.journals[key].last)
                case 1:
                    self.append(key, at=self.journals[key].last + self.dice.randrange(3))
                case 2:
                    self.delete(key, max(1, self.journals[key].last - 2))
                case 3:
                    self.purge(key)
                case 4 | 5 | 6:
                    self.read(key, self.dice.choice((1, 2)))
                case 7:
                    self.pointer(key)
                case _:
                    self.append(key)
        self.settle()
        self.settle_journals()

    def settle_journals(self) -> None:
        """Record the final state of the log, the store and the streams."""
        for key in self.keys:
            self.read(key)
        self.settle()
        self.observe("dump_log", self.log, {"topic": "t", "partition": 0})
        store = {
            key: {
                "last": journal.last,
                "deleted": journal.deleted,
                "incarnation": [1, journal.since],
                "events": [list(each) for each in journal.events],
            }
            for key, journal in self.journals.items()
            if journal.live
        }
        self.observe("dump_store", store, {"topic": "t"})
        for tag in TAGS:
            events = [each for each in self.delivered if each["tag"] == tag]
            for each in events:
                self.observe("deliver", {k: v for k, v in each.items() if k != "tag"}, {"stream": "s", "tag": tag})
            left = {value for journal in self.journals.values() for _, value in journal.events}
            self.observe("dump_tag", [each["value"] for each in events if each["value"] in left], {"tag": tag})
            self.observe("dump_effects", events, {"consumer": f"group of {tag}", "tag": tag})
        self.observe("dump_effects", self.delivered, {"consumer": "projection", "topic": "t"})

    # ---- outbox

    def use_outbox(self, transactions: int) -> None:
        sent: list[dict[str, Any]] = []
        for _ in range(transactions):
            key = self.dice.choice("abc")
            values = [self.value() for _ in range(self.dice.choice((1, 2)))]
            fails = self.dice.random() < 0.2

            def act(key: str = key, values: list[str] = values, fails: bool = fails) -> Any:
                if fails:
                    return Rollback()
                partition = "abc".index(key) % 2
                sent.extend(
                    {"key": key, "value": value, "partition": partition, "offset": len(sent) + n}
                    for n, value in enumerate(values)
                )
                return None

            self.call("transaction", {"messages": [["m", key, value] for value in values]}, act)
        self.settle()
        self.observe("dump_messages", sent, {"topic": "m"})

    # ---- queue

    def use_queue(self, entries: int) -> None:
        """Put entries, some of which are claimed twice, because the lease of the first claim ended."""
        for number in range(1, entries + 1):
            value, key = self.value(), f"q{number}" if number % 2 else None
            self.call("put", {"value": value, "key": key}, lambda: {"inserted": 1, "merged": 0}, lost=0)
            self.settle()
            began_ms, hold = number * 1000, ""
            for attempt in (1, 2) if number % 3 == 0 else (2,):
                hold = f"h{number}.{attempt}"
                started_ms = began_ms + 300 * attempt
                claimed = {
                    "hold": hold, "id": number, "key": key, "value": value,
                    "started_ms": started_ms, "lease_until_ms": started_ms + 200,
                }  # fmt: skip
                self._ns = max(self._ns, started_ms * 1_000_000)
                self.call("claim", {}, lambda claimed=claimed: [claimed], process=f"w{attempt}", lost=0)  # type: ignore[misc]
                self.settle()
            self.call("finish", {"hold": hold}, lambda: None, process="w2", lost=0)
            self.settle()
        self.observe("dump_queue", [], {"queue": "q"})

    # ---- write-ahead log

    def use_wal(self, writes: int) -> None:
        entries: list[list[Any]] = []
        following: dict[int, int] = defaultdict(lambda: 1)
        marked: dict[int, int] = defaultdict(int)

        for number in range(writes):
            table, values = self.dice.choice((1, 2)), [self.value() for _ in range(self.dice.choice((1, 3)))]
            fenced = number % 7 == 6

            def act(table: int = table, values: list[str] = values, fenced: bool = fenced) -> Any:
                if fenced:
                    return Fenced()
                first = following[table]
                entries.extend([table, first + n, value] for n, value in enumerate(values))
                following[table] += len(values)
                return {"first": first, "last": following[table] - 1}

            self.call("wal_write", {"region": "r", "table": table, "values": values}, act)
            if number % 5 == 4:
                self.settle()
                seq = max(1, following[table] - 2)
                marked[table] = max(marked[table], seq)
                self.call("wal_mark", {"region": "r", "table": table, "seq": seq}, lambda: None, lost=0)
                self.settle()
                left = [each for each in entries if each[1] >= marked[each[0]]]
                self.call("wal_replay", {"region": "r"}, lambda left=left: left, lost=0)  # type: ignore[misc]
                self.settle()
        self.settle()
        left = [each for each in entries if each[1] >= marked[each[0]]]
        self.call("wal_replay", {"region": "r"}, lambda: left, lost=0)
        self.settle()


def _nothing() -> None:
    """Do nothing in place of an effect that was already taken."""


class Conflict(Exception):
    def __init__(self, found: int) -> None:
        super().__init__()
        self.found = found


class Rollback(Exception):
    pass


class Fenced(Exception):
    pass
