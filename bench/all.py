"""`python -m bench all`: run benchmarks one after another, keep their results, and write one report of all.

The last result of each benchmark is a JSON file in `docs/benchmarks/results`. The report is made from these files: as
the page `docs/benchmarks/all.md` of the documentation with its plots, and as one HTML file and one JSON file in
`build/bench`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from bench.plots import Bar, draw_bars

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks" / "all.md"
BUILD = ROOT / "build" / "bench"
#: The benchmarks, in the order in which they run: those without servers first, the longest last.
BENCHES = (
    "embedded", "journal", "domain", "server", "console", "queue", "outbox", "kafka", "cassandra", "tags", "wal",
    "pipeline",
)  # fmt: skip
#: A benchmark that takes longer is stopped and has no result.
LIMIT_S = 1200.0
LIMITS_S = {"pipeline": 2400.0}
#: After SIGINT, a benchmark may take this long to clean up.
STOP_S = 30.0
#: Ratios for which smaller values are better; for all others, greater values are.
AT_MOST = frozenset(
    (
        "append_confirmed_p50_vs_produce", "append_unconfirmed_p50_vs_produce", "batch_with_many_rows_vs_10k",
        "claim_churned_vs_fresh", "claim_many_vs_few", "first_byte_vs_first_event", "follow_p50_ms", "idle_cores",
        "idle_latency_p50_ms", "idle_mb", "idle_p50_vs_pgqueuer", "interactive_ms_max", "job_live_p50_ms",
        "keys_100k_vs_1k_time", "lease_gap_loaded_max_s", "lease_gap_loaded_p50_s", "lease_gap_loaded_p99_s",
        "lease_gap_max_s", "lease_gap_p50_s", "lease_gap_p99_s",
        "live_embedded_p50_ms", "live_p50_ms", "live_servers_p50_ms", "load_long_vs_short",
        "meta_bytes_per_1000", "page_p50_ms_max", "read_100k_vs_driver", "read_1k_in_100k_tail_vs_caught_up",
        "read_1k_vs_driver", "read_1m_memory_growth_mb", "recovery_2m_vs_100k", "sse_p50_ms", "start_beyond_session_s",
        "start_beyond_spark_s", "steady_follower_p50_s", "steady_p50_s", "steady_p99_s", "steady_stop_s",
        "timer_p50_ms", "timer_p99_ms", "typed_vs_raw_read", "up_first_event_s", "up_first_start_event_s", "up_stop_s",
    )
)  # fmt: skip
#: Prefixes of ratios that are measured on several stores.
STORES = ("embedded_", "cassandra_")
NO_RATIO = frozenset(("bench", "targets", "figures"))


class Ratio(NamedTuple):
    """A figure and its target."""

    bench: str
    name: str
    value: float
    target: float | None

    @property
    def at_most(self) -> bool:
        """Whether smaller figures are better."""
        plain = next((self.name.removeprefix(each) for each in STORES if self.name.startswith(each)), self.name)
        return self.name in AT_MOST or plain in AT_MOST

    @property
    def share(self) -> float | None:
        """The figure as a share of the target, at least 1 if the target is reached; None without a target."""
        if not self.target or self.value <= 0:
            return None
        return self.target / self.value if self.at_most else self.value / self.target


def main(argv: list[str]) -> int:
    """Run the named benchmarks, or all; then write the report. Return 1 if one of them failed."""
    parser = argparse.ArgumentParser(prog="bench all", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(BENCHES)}; default: all")
    parser.add_argument("--report", action="store_true", help="only write the report of the last results")
    parser.add_argument("--quick", action="store_true", help="a fraction of the work; the figures are rough")
    options = parser.parse_args(argv)
    if unknown := {*options.names} - {*BENCHES}:
        parser.error(f"there is no benchmark {', '.join(sorted(unknown))}")
    chosen = [] if options.report else [each for each in BENCHES if each in (options.names or BENCHES)]
    failed = []
    for number, name in enumerate(chosen, 1):
        print(f"bench {name} ({number} of {len(chosen)})", file=sys.stderr, flush=True)
        result = run(name, ["--quick"] if options.quick else [], LIMITS_S.get(name, LIMIT_S))
        if result is None:
            failed.append(name)
            continue
        RESULTS.mkdir(parents=True, exist_ok=True)
        (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    results = read_results(RESULTS)
    write_report(results, page=PAGE, build=BUILD)
    missed = [each for result in results for each in ratios(result) if each.share is not None and each.share < 1]
    print(f"the report is in {BUILD.relative_to(ROOT)}/report.html and {PAGE.relative_to(ROOT)}", file=sys.stderr)
    summary = {"bench": "all", "run": chosen, "failed": failed, "missed": [f"{r.bench}.{r.name}" for r in missed]}
    print(json.dumps(summary))
    return 1 if failed else 0


def run(name: str, arguments: list[str], limit_s: float) -> dict[str, Any] | None:
    """Run one benchmark as a process and return its result with the conditions; None if it failed or took too long."""
    load_before = os.getloadavg()[0]
    began_s = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "bench", name, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except BaseException as error:
        _stop(process)
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        print(f"bench {name}: ended after {limit_s:.0f} s", file=sys.stderr)
        return None
    if process.returncode != 0:
        print(f"bench {name}: ended with code {process.returncode}", file=sys.stderr)
        return None
    return {
        "command": " ".join(["./dev", "bench", name, *arguments]),
        "date": datetime.now(UTC).date().isoformat(),
        "seconds": round(time.monotonic() - began_s, 1),
        "load_before": round(load_before, 1),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "result": json.loads(output.splitlines()[-1]),
    }


def _stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.communicate(timeout=STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


def read_results(folder: Path) -> list[dict[str, Any]]:
    """Return the last results, in the order of the benchmarks."""
    return [json.loads((folder / f"{name}.json").read_text()) for name in BENCHES if (folder / f"{name}.json").exists()]


def ratios(result: Mapping[str, Any]) -> list[Ratio]:
    """Return the figures of a result, those with a target first."""
    found = result["result"]
    targets = found.get("targets", {})
    names = [name for name, value in found.items() if name not in NO_RATIO and isinstance(value, int | float)]
    ordered = sorted(names, key=lambda name: name not in targets)
    return [Ratio(found["bench"], name, float(found[name]), targets.get(name)) for name in ordered]


def write_report(results: list[dict[str, Any]], *, page: Path, build: Path) -> None:
    """Write the page of the documentation with its plots, and the report as HTML and JSON."""
    build.mkdir(parents=True, exist_ok=True)
    page.parent.mkdir(parents=True, exist_ok=True)
    plots = {result["result"]["bench"]: _plot(result) for result in results}
    images = page.parent / "results"
    images.mkdir(exist_ok=True)
    for name, plot in plots.items():
        (images / f"{name}.svg").write_text(plot)
    page.write_text(_markdown(results))
    (build / "report.html").write_text(_html(results, plots))
    (build / "report.json").write_text(json.dumps(results, indent=1) + "\n")


def _plot(result: Mapping[str, Any]) -> str:
    bars = [
        Bar(each.name, each.share, _figure(each)) for each in ratios(result) if each.share is not None
    ]  # fmt: skip
    return draw_bars(f"{result['result']['bench']}: each figure relative to its target", bars)


def _figure(ratio: Ratio) -> str:
    if ratio.target is None:
        return f"{ratio.value:g}"
    return f"{ratio.value:g} (target: at {'most' if ratio.at_most else 'least'} {ratio.target:g})"


def _conditions(result: Mapping[str, Any]) -> str:
    machine = f"{result['cores']} cores, Python {result['python']}, load {result['load_before']} before it began"
    return f"{result['date']}, {result['seconds']:g} s, {machine}"


_HEAD = """\
# All figures of the last runs

`./dev bench all` writes this page: it runs every benchmark, one after another, and draws each figure relative to its
target. A bar that reaches the line has reached the target, whether that is a minimum or a maximum. `./dev bench all
NAME` repeats one of them, and `./dev bench all --report` only redraws the report. A load of 1 or more before a run
means that other programs used the machine, and that its figures are rough; so are those of a command with `--quick`,
which does a fraction of the work.
"""


def _markdown(results: Sequence[Mapping[str, Any]]) -> str:
    parts = [_HEAD]
    for result in results:
        name = result["result"]["bench"]
        rows = "\n".join(f"| `{each.name}` | {_cell(each)} | {_target(each)} |" for each in ratios(result))
        parts.append(
            f"## {name}\n\n`{result['command']}`: {_conditions(result)}. Details: [{name}]({name}.md).\n\n"
            f"![Figures of {name} relative to their targets](results/{name}.svg)\n\n"
            f"| figure | value | target |\n|---|---|---|\n{rows}\n"
        )
    measured = {result["result"]["bench"] for result in results}
    if missing := [f"`{name}`" for name in BENCHES if name not in measured]:
        parts.append(
            f"## Without a result\n\nThese have not been run with `./dev bench all` yet: {', '.join(missing)}.\n"
        )
    return "\n".join(parts)


def _cell(ratio: Ratio) -> str:
    missed = ratio.share is not None and ratio.share < 1
    return f"**{ratio.value:g}**" if missed else f"{ratio.value:g}"


def _target(ratio: Ratio) -> str:
    return "" if ratio.target is None else f"at {'most' if ratio.at_most else 'least'} {ratio.target:g}"


def _html(results: Iterable[Mapping[str, Any]], plots: Mapping[str, str]) -> str:
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>Tidebook: benchmarks</title>",
        "<style>body{font:15px system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
        "td,th{text-align:left;padding:.2rem 1rem .2rem 0}.missed{color:#b42318;font-weight:600}</style>",
        "<h1>Tidebook: benchmarks</h1><p>Each figure relative to its target; 1 or more has reached it.</p>",
    ]
    for result in results:
        name = result["result"]["bench"]
        parts.append(
            f"<h2>{escape(name)}</h2><p><code>{escape(result['command'])}</code>: {escape(_conditions(result))}"
        )
        parts.append(plots[name])
        parts.append("<table><tr><th>figure<th>value<th>target")
        for each in ratios(result):
            missed = ' class="missed"' if each.share is not None and each.share < 1 else ""
            parts.append(f"<tr><td>{escape(each.name)}<td{missed}>{each.value:g}<td>{_target(each)}")
        parts.append("</table>")
    return "\n".join(parts) + "\n"
