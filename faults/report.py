"""The report of a run: JSON, and one HTML file that needs nothing else."""

from __future__ import annotations

import html
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import quantiles
from typing import Any

from faults.run import DoneFault, RunResult
from faults.schedule import ONE_DOWN
from tidebook.testing.histories.call import NEVER_NS, RecordedCall, RecordedHistory

PAGE = Path(__file__).with_name("report.html")
#: Errors that are answers: the book was available.
ANSWERS = {"Conflict", "RolledBack", "LeaseLost", "Truncated", "Fenced", "NotFound"}
#: After this time with one broker and one node down, calls succeed again.
AVAILABLE_AFTER_S = 8.0
#: How many calls of one operation the timeline shows.
POINTS_MAX = 4_000


def _calls(history: RecordedHistory, result: RunResult) -> dict[str, list[RecordedCall]]:
    """Return the calls of the workload by operation, without observations and the inspector."""
    found: dict[str, list[RecordedCall]] = defaultdict(list)
    for call in history.calls:
        if call.start_ns >= result.began_ns and call.start_ns != call.end_ns and "inspector" not in call.process:
            found[call.op].append(call)
    return found


def _answered(call: RecordedCall) -> bool:
    return call.outcome == "ok" or call.error in ANSWERS


def _latency_ms(calls: Sequence[RecordedCall]) -> dict[str, float]:
    took = sorted((call.end_ns - call.start_ns) / 1e6 for call in calls if call.end_ns < NEVER_NS)
    if len(took) < 2:
        return {}
    cuts = quantiles(took, n=100)
    return {"p50": round(cuts[49], 2), "p99": round(cuts[98], 2), "max": round(took[-1], 2)}


def _recovery_s(fault: DoneFault, history: RecordedHistory) -> float | None:
    """Return how long after the fault its target succeeded again; None if the target records nothing."""
    target = "remote-" if fault.target in ("http", "server") else f"{fault.target}."
    ends = [
        call.end_ns
        for call in history.calls
        if call.process.startswith(target) and call.outcome == "ok" and call.end_ns > fault.end_ns
    ]
    return round((min(ends) - fault.end_ns) / 1e9, 3) if ends else None


def _availability(calls: Mapping[str, Sequence[RecordedCall]]) -> dict[str, list[int]]:
    return {op: [sum(map(_answered, found)), len(found)] for op, found in sorted(calls.items()) if found}


def _after_pause(fault: DoneFault, calls: Mapping[str, Sequence[RecordedCall]]) -> dict[str, list[RecordedCall]]:
    """Return the calls that began while servers were down, after the pause in which the others take over."""
    if fault.kind != ONE_DOWN or fault.down_ns is None:
        return {}
    start_ns = fault.start_ns + int(AVAILABLE_AFTER_S * 1e9)
    return {op: [call for call in found if start_ns <= call.start_ns < fault.down_ns] for op, found in calls.items()}


def facts(result: RunResult, history: RecordedHistory) -> dict[str, Any]:
    """Return the report as data."""
    calls = _calls(history, result)
    operations = {
        op: {
            "calls": len(found),
            "ok": sum(call.outcome == "ok" for call in found),
            "answered": sum(map(_answered, found)),
            "unknown": sum(call.outcome == "unknown" for call in found),
            "latency_ms": _latency_ms(found),
        }
        for op, found in sorted(calls.items())
    }
    faults: list[dict[str, Any]] = []
    for fault in result.faults:
        during = {
            op: [call for call in found if fault.start_ns <= call.start_ns <= fault.end_ns]
            for op, found in calls.items()
        }
        faults.append(
            {
                "kind": fault.kind,
                "target": fault.target,
                "start_s": round((fault.start_ns - result.began_ns) / 1e9, 2),
                "end_s": round((fault.end_ns - result.began_ns) / 1e9, 2),
                "recovery_s": _recovery_s(fault, history),
                "availability": _availability(during),
                "available_after": _availability(_after_pause(fault, calls)),
            }
        )
    recoveries = sorted(fault["recovery_s"] for fault in faults if fault["recovery_s"] is not None)
    return {
        "ok": result.ok,
        "seed": result.seed,
        "command": result.command,
        "operations": operations,
        "calls": sum(len(found) for found in calls.values()),
        "faults": faults,
        "recovery_s": {"p50": recoveries[len(recoveries) // 2], "worst": recoveries[-1]} if recoveries else None,
        "recovered_s": result.recovered_s,
        "recovery_s_max": result.recovery_s_max,
        "restarts": result.restarts,
        "caught_up_s": result.caught_up_s,
        "lacking": result.lacking,
        "ended_badly": result.ended_badly,
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


def summarize(result: RunResult, history: RecordedHistory) -> Iterator[str]:
    """Yield the lines that the command prints."""
    found = facts(result, history)
    yield f"{found['calls']:,} calls, {len(found['faults'])} faults"
    for verdict in found["verdicts"]:
        yield f"  {'holds   ' if verdict['ok'] else 'VIOLATED'} {verdict['rule']} ({verdict['checked']:,} checked)"
        for violation in verdict["violations"][:5]:
            yield f"           {violation[:400]}"
    if found["recovery_s"] is not None:
        yield "recovery after a fault: p50 {p50:.2f} s, worst {worst:.2f} s".format(**found["recovery_s"])
    if found["caught_up_s"] is not None:
        yield f"caught up {found['caught_up_s']:.1f} s after the last write"
    for fault in found["faults"]:
        for op, (answered, calls) in fault["available_after"].items():
            if op in ("append", "read"):
                share = 100 * answered / calls
                yield f"{op} with one broker and one node down, after {AVAILABLE_AFTER_S:g} s: {share:.1f} % of {calls}"
    for name, count in found["restarts"].items():
        yield f"{name} ended {count} times because a server was unavailable, and was started again"
    for lacking in found["lacking"]:
        yield f"NOT CAUGHT UP: {lacking}"
    for ended in found["ended_badly"]:
        yield f"ENDED BY ITSELF: {ended}"
    yield f"checked in {found['checker_s']:.1f} s; repeat: {found['command']}"


def write_report(folder: Path, result: RunResult, history: RecordedHistory) -> Path:
    """Write `report.json` and `report.html` into the folder of the run; return the page's path."""
    found = facts(result, history)
    (folder / "report.json").write_text(json.dumps(found, indent=1))
    points = {}
    for op, calls in _calls(history, result).items():
        step = max(1, len(calls) // POINTS_MAX)
        points[op] = [
            [
                round((call.start_ns - result.began_ns) / 1e6),
                round((call.end_ns - call.start_ns) / 1e6, 2) if call.end_ns < NEVER_NS else None,
                0 if call.outcome == "ok" else 1 if _answered(call) else 2 if call.outcome == "fail" else 3,
            ]
            for call in calls[::step]
        ]
    # In a script element only "</" could end it early.
    data = json.dumps({"facts": found, "points": points}).replace("</", "<\\/")
    page = folder / "report.html"
    title = html.escape(f"Tidebook under faults: seed {result.seed}")
    page.write_text(PAGE.read_text().replace("{{title}}", title).replace("{{data}}", data))
    return page
