"""The report of a run: JSON, and one self-contained HTML file."""

from __future__ import annotations

import html
import json
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import quantiles
from typing import Any

from faults.run import DoneFault, RunResult
from faults.schedule import ONE_DOWN
from tidebook.testing.histories.call import NEVER_NS, RecordedCall, RecordedHistory

PAGE = Path(__file__).with_name("report.html")
#: Errors that are answers: the book was available, and refused the call.
ANSWERS = {"Conflict", "RolledBack", "LeaseLost", "Truncated", "Fenced", "NotFound", "Refused"}
#: After one broker and one node have been down for this long, calls must succeed again: before the servers are
#: restarted or, if a call begins just before that, within this time.
AVAILABLE_AFTER_S, ANSWERED_WITHIN_S = 8.0, 5.0
#: The most calls of one operation that the timeline shows: of those that succeeded, and of those that did not.
POINTS_MAX = 4_000

#: The operations that must succeed again after a fault of a server.
SERVER_OPS = {
    "kafka": ("append", "wal_write"),
    "cassandra": ("append", "read"),
    "postgres": ("put", "transaction"),
    "servers": ("append", "read", "put", "transaction"),
}


def _answered(call: RecordedCall) -> bool:
    return call.outcome == "ok" or call.error in ANSWERS


class _OperationCalls:
    """The calls of one operation, sorted by start, to count those during each fault quickly."""

    def __init__(self, calls: Sequence[RecordedCall]) -> None:
        self.calls = calls
        self._starts = [call.start_ns for call in calls]
        self._answered = [0, *accumulate(map(_answered, calls))]

    def answered_between(self, start_ns: int, end_ns: int) -> tuple[int, int]:
        """Return how many calls that began in this period were answered, and how many began in it."""
        first, last = bisect_left(self._starts, start_ns), bisect_right(self._starts, end_ns)
        return self._answered[last] - self._answered[first], last - first

    def answered_in_time(self, start_ns: int, end_ns: int) -> tuple[int, int]:
        """Return how many calls of this period were answered while it lasted or quickly, and how many began in it."""
        calls = self.calls[bisect_left(self._starts, start_ns) : bisect_right(self._starts, end_ns)]
        limit_ns = int(ANSWERED_WITHIN_S * 1e9)
        return sum(_answered(call) and call.end_ns <= max(end_ns, call.start_ns + limit_ns) for call in calls), len(
            calls
        )

    @property
    def answered(self) -> int:
        """The number of answered calls."""
        return self._answered[-1]


class _Successes:
    """The end times of successful calls, by process (without the number of its incarnation) and by operation."""

    def __init__(self, history: RecordedHistory) -> None:
        self._ends: dict[str, list[int]] = defaultdict(list)
        for call in history.calls:
            if call.outcome == "ok" and call.op != "restarted":
                self._ends[call.process.rsplit(".", 1)[0]].append(call.end_ns)
                self._ends[call.op].append(call.end_ns)
        for ends in self._ends.values():
            ends.sort()

    def recovery_s(self, fault: DoneFault) -> float | None:
        """Return how long after a fault a call of its target succeeded again; None if none did.

        For a fault of a server, these are the calls that need the server.
        """
        kind = fault.target.rsplit("-", 1)[0]
        names: Sequence[str] = SERVER_OPS.get(kind, (fault.target,))
        if fault.target in ("http", "server"):
            names = ("remote-1",)
        firsts = [self._first_after(name, fault.end_ns) for name in names]
        if any(first is None for first in firsts):
            return None
        return round((max(first for first in firsts if first is not None) - fault.end_ns) / 1e9, 3)

    def _first_after(self, name: str, ns: int) -> int | None:
        ends = self._ends.get(name, [])
        at = bisect_right(ends, ns)
        return ends[at] if at < len(ends) else None


def _by_operation(history: RecordedHistory, result: RunResult) -> dict[str, _OperationCalls]:
    """Return the calls of the workload by operation, without observations and the inspector."""
    found: dict[str, list[RecordedCall]] = defaultdict(list)
    for call in history.calls:
        if call.start_ns >= result.began_ns and call.start_ns != call.end_ns and "inspector" not in call.process:
            found[call.op].append(call)
    return {op: _OperationCalls(calls) for op, calls in sorted(found.items())}


def _latency_ms(calls: Sequence[RecordedCall]) -> dict[str, float]:
    took = sorted((call.end_ns - call.start_ns) / 1e6 for call in calls if call.end_ns < NEVER_NS)
    if len(took) < 2:
        return {}
    cuts = quantiles(took, n=100, method="inclusive")
    return {"p50": round(cuts[49], 2), "p99": round(cuts[98], 2), "max": round(took[-1], 2)}


def _availability(operations: Mapping[str, _OperationCalls], start_ns: int, end_ns: int) -> dict[str, list[int]]:
    found = {op: calls.answered_between(start_ns, end_ns) for op, calls in operations.items()}
    return {op: [answered, count] for op, (answered, count) in found.items() if count}


def _available_after(fault: DoneFault, operations: Mapping[str, _OperationCalls]) -> dict[str, list[int]]:
    """Return the answered calls while servers were down, without the first seconds, in which others take over.

    A call that was answered only because the servers were restarted does not count as answered.
    """
    if fault.kind != ONE_DOWN or fault.down_ns is None:
        return {}
    start_ns = fault.start_ns + int(AVAILABLE_AFTER_S * 1e9)
    found = {op: calls.answered_in_time(start_ns, fault.down_ns) for op, calls in operations.items()}
    return {op: [answered, count] for op, (answered, count) in found.items() if count}


def _sum(counts: Iterable[Mapping[str, Sequence[int]]]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for each in counts:
        for op, (answered, count) in each.items():
            before = found.setdefault(op, [0, 0])
            found[op] = [before[0] + answered, before[1] + count]
    return found


def _spread(recoveries: Iterable[float | None]) -> dict[str, float] | None:
    known = sorted(each for each in recoveries if each is not None)
    return {"p50": known[len(known) // 2], "worst": known[-1]} if known else None


def _by_kind(faults: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a summary of the faults of each kind."""
    kinds: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for fault in faults:
        target = fault["target"].rsplit("-", 1)[0]
        of = f" {target}" if target in SERVER_OPS or fault["kind"] in ("kill", "pause") else ""
        kinds[f"{fault['kind']}{of}"].append(fault)
    return [
        {
            "kind": kind,
            "count": len(found),
            "recovery_s": _spread(fault["recovery_s"] for fault in found),
            "availability": _sum(fault["availability"] for fault in found),
        }
        for kind, found in sorted(kinds.items())
    ]


def _errors(calls: Sequence[RecordedCall]) -> dict[str, int]:
    """Return how many calls ended with each error, the most frequent first; a killed process ends its calls without."""
    found = Counter(call.error or "process killed" for call in calls if call.outcome != "ok")
    return dict(found.most_common())


def _restarts(result: RunResult, history: RecordedHistory) -> dict[str, int]:
    """Return how often each command, server or part of a process was started again after an error."""
    parts = Counter(
        f"{call.process.rsplit('.', 1)[0]} ({call.args['part']}, {call.result['error']})"
        for call in history.of("restarted")
    )
    return {**result.restarts, **dict(sorted(parts.items()))}


def facts(result: RunResult, history: RecordedHistory) -> dict[str, Any]:
    """Return the report as data."""
    by_operation, successes = _by_operation(history, result), _Successes(history)
    operations = {
        op: {
            "calls": len(found.calls),
            "ok": sum(call.outcome == "ok" for call in found.calls),
            "answered": found.answered,
            "unknown": sum(call.outcome == "unknown" for call in found.calls),
            "errors": _errors(found.calls),
            "latency_ms": _latency_ms(found.calls),
        }
        for op, found in by_operation.items()
    }
    faults: list[dict[str, Any]] = [
        {
            "kind": fault.kind,
            "target": fault.target,
            "start_s": round((fault.start_ns - result.began_ns) / 1e9, 2),
            "end_s": round((fault.end_ns - result.began_ns) / 1e9, 2),
            "recovery_s": successes.recovery_s(fault),
            "availability": _availability(by_operation, fault.start_ns, fault.end_ns),
            "available_after": _available_after(fault, by_operation),
        }
        for fault in result.faults
    ]
    return {
        "ok": result.ok,
        "seed": result.seed,
        "command": result.command,
        "operations": operations,
        "calls": sum(len(found.calls) for found in by_operation.values()),
        "faults": faults,
        "kinds": _by_kind(faults),
        "one_down": _sum(fault["available_after"] for fault in faults),
        "one_down_after_s": AVAILABLE_AFTER_S,
        "recovery_s": _spread(fault["recovery_s"] for fault in faults),
        "recovered_s": result.recovered_s,
        "recovery_s_max": result.recovery_s_max,
        "restarts": _restarts(result, history),
        "caught_up_s": result.caught_up_s,
        "lacking": result.lacking,
        "unrecovered": result.unrecovered,
        "ended_badly": result.ended_badly,
        "ended_early": result.ended_early,
        "quiet_s": round((result.quiet_ns - result.began_ns) / 1e9, 2),
        "checker_s": round(result.checked_s, 2),
        "verdicts": [
            {
                "rule": verdict.rule,
                "ok": verdict.ok,
                "checked": verdict.checked,
                "violations": [f"{each.subject}: {each.message}" for each in verdict.violations],
            }
            for verdict in result.verdicts
        ],
    }


def summarize(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of these facts that the command prints."""
    yield f"{found['calls']:,} calls, {len(found['faults'])} faults"
    for verdict in found["verdicts"]:
        holds = "VIOLATED" if not verdict["ok"] else "holds   " if verdict["checked"] else "NO FACTS"
        yield f"  {holds} {verdict['rule']} ({verdict['checked']:,} checked)"
        for violation in verdict["violations"][:5]:
            yield f"           {violation[:400]}"
    if found["recovery_s"] is not None:
        yield "recovery after a fault: p50 {p50:.2f} s, worst {worst:.2f} s".format(**found["recovery_s"])
    if found["caught_up_s"] is not None:
        yield f"caught up {found['caught_up_s']:.1f} s after the last write"
    for op, (answered, calls) in found["one_down"].items():
        if op in ("append", "read"):
            share = 100 * answered / calls
            yield f"{op} with one broker and one node down, after {AVAILABLE_AFTER_S:g} s: {share:.1f} % of {calls}"
    for name, count in found["restarts"].items():
        yield f"{name} ended {count} times with an error or because a server was unavailable, and was restarted"
    for operation in found["unrecovered"]:
        yield f"NOT RECOVERED within {found['recovery_s_max']:g} s: {operation}"
    for lacking in found["lacking"]:
        yield f"NOT CAUGHT UP: {lacking}"
    for ended in found["ended_badly"]:
        yield f"ENDED UNEXPECTEDLY: {ended}"
    if found["ended_early"] is not None:
        yield f"ENDED EARLY after {found['quiet_s']:.1f} s: {found['ended_early']}"
    yield f"checked in {found['checker_s']:.1f} s; repeat: {found['command']}"


def _points(calls: Sequence[RecordedCall]) -> list[RecordedCall]:
    """Return the calls that the timeline shows: evenly chosen ones that succeeded, and ones that did not."""
    found: list[RecordedCall] = []
    for succeeded in (True, False):
        chosen = [call for call in calls if (call.outcome == "ok") == succeeded]
        found += chosen[:: -(-len(chosen) // POINTS_MAX) or 1]
    return sorted(found, key=lambda call: call.start_ns)


def write_report(folder: Path, found: Mapping[str, Any], result: RunResult, history: RecordedHistory) -> Path:
    """Write the facts as `report.json` and `report.html` into the folder of the run; return the page's path."""
    (folder / "report.json").write_text(json.dumps(found, indent=1))
    points = {}
    for op, of_operation in _by_operation(history, result).items():
        points[op] = [
            [
                round((call.start_ns - result.began_ns) / 1e6),
                round((call.end_ns - call.start_ns) / 1e6, 2) if call.end_ns < NEVER_NS else None,
                0 if call.outcome == "ok" else 1 if _answered(call) else 2 if call.outcome == "fail" else 3,
            ]
            for call in _points(of_operation.calls)
        ]
    # Only "</" could end the script element early.
    data = json.dumps({"facts": found, "points": points}).replace("</", "<\\/")
    page = folder / "report.html"
    title = html.escape(f"Tidebook under faults: seed {result.seed}")
    page.write_text(PAGE.read_text().replace("{{title}}", title).replace("{{data}}", data))
    return page
