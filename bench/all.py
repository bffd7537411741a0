"""`python -m bench all`: run benchmarks one after another, keep their results, and write one report of all.

`docs/benchmarks/results` has a JSON file for each benchmark, with the runs from which its last figures come: a run of
some parts replaces only the figures of these parts. The report is made from these files: as `docs/benchmarks/all.md`
with its plots, which the documentation shows, and as one HTML file and one JSON file in `build/bench`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
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
NO_RATIO = frozenset(("bench", "targets", "figures", "conditions"))
#: The line that a benchmark prints: its ratios by name, their targets, the figures, and the conditions of the run.
Result = dict[str, Any]


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
    parser.add_argument(
        "--add", action="append", metavar="FILE", default=[],
        help="only add the result in this file, the output of ./dev bench NAME; may be repeated",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="a fraction of the work; the figures are rough")
    options = parser.parse_args(argv)
    if unknown := {*options.names} - {*BENCHES}:
        parser.error(f"there is no benchmark {', '.join(sorted(unknown))}")
    for file in options.add:
        keep(json.loads(Path(file).read_text().splitlines()[-1]), RESULTS)
    chosen = [] if options.report or options.add else [each for each in BENCHES if each in (options.names or BENCHES)]
    failed = []
    for number, name in enumerate(chosen, 1):
        print(f"bench {name} ({number} of {len(chosen)})", file=sys.stderr, flush=True)
        result = run(name, ["--quick"] if options.quick else [], LIMITS_S.get(name, LIMIT_S))
        if result is None:
            failed.append(name)
            continue
        keep(result, RESULTS)
    results = read_results(RESULTS)
    write_report(results, page=PAGE, build=BUILD)
    every = [each for runs in results for one in runs for each in ratios(one)]
    missed = [each for each in every if each.share is not None and each.share < 1]
    print(f"the report is in {BUILD.relative_to(ROOT)}/report.html and {PAGE.relative_to(ROOT)}", file=sys.stderr)
    summary = {"bench": "all", "run": chosen, "failed": failed, "missed": [f"{r.bench}.{r.name}" for r in missed]}
    print(json.dumps(summary))
    return 1 if failed else 0


def run(name: str, arguments: list[str], limit_s: float) -> Result | None:
    """Run one benchmark as a process and return its result; None if it failed or took too long."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bench", name, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
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
    result: Result = json.loads(output.splitlines()[-1])
    return result


def _stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.communicate(timeout=STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # also the processes that it has started
        process.communicate()


def keep(result: Result, folder: Path) -> None:
    """Add a result to the runs of its benchmark; its ratios replace the same ones of earlier runs."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{result['bench']}.json"
    runs = json.loads(file.read_text()) if file.exists() else []
    file.write_text(json.dumps(last_runs([*runs, result]), indent=1) + "\n")


def last_runs(runs: Iterable[Result]) -> list[Result]:
    """Return the runs, oldest first, each without the ratios of later runs; runs without a ratio are left out."""
    found: list[Result] = []
    later: set[str] = set()
    for each in sorted(runs, key=lambda each: str(each["conditions"]["date"]), reverse=True):
        names = {ratio.name for ratio in ratios(each)}
        if names - later:
            left = {name: value for name, value in each.items() if name not in names & later}
            targets = {name: target for name, target in each["targets"].items() if name not in later}
            found.insert(0, left | {"targets": targets})
        later |= names
    return found


def read_results(folder: Path) -> list[list[Result]]:
    """Return the last runs of each benchmark, in the order of the benchmarks."""
    return [json.loads((folder / f"{name}.json").read_text()) for name in BENCHES if (folder / f"{name}.json").exists()]


def ratios(result: Mapping[str, Any]) -> list[Ratio]:
    """Return the ratios of a result, those with a target first."""
    targets = result["targets"]
    names = [name for name, value in result.items() if name not in NO_RATIO and isinstance(value, int | float)]
    ordered = sorted(names, key=lambda name: name not in targets)
    return [Ratio(result["bench"], name, float(result[name]), targets.get(name)) for name in ordered]


def write_report(results: list[list[Result]], *, page: Path, build: Path) -> None:
    """Write the page of the documentation with its plots, and the report as HTML and JSON."""
    build.mkdir(parents=True, exist_ok=True)
    page.parent.mkdir(parents=True, exist_ok=True)
    plots = {runs[0]["bench"]: _plot(runs) for runs in results}
    images = page.parent / "results"
    images.mkdir(exist_ok=True)
    for name, plot in plots.items():
        (images / f"{name}.svg").write_text(plot)
    page.write_text(_markdown(results))
    (build / "report.html").write_text(_html(results, plots))
    (build / "report.json").write_text(json.dumps(results, indent=1) + "\n")


def _plot(runs: Sequence[Result]) -> str:
    every = [each for one in runs for each in ratios(one)]
    bars = [Bar(each.name, each.share, _figure(each)) for each in every if each.share is not None]
    return draw_bars(f"{runs[0]['bench']}: each figure relative to its target", bars)


def _figure(ratio: Ratio) -> str:
    if ratio.target is None:
        return f"{ratio.value:g}"
    return f"{ratio.value:g} (target: at {'most' if ratio.at_most else 'least'} {ratio.target:g})"


def _conditions(result: Result) -> str:
    """Return the date, duration, machine and load of a run as text."""
    found = result["conditions"]
    load = "load not recorded" if found["load_before"] is None else f"load {found['load_before']:g} before it"
    machine = f"{found['cores']} cores, Python {found['python']}"
    return f"{found['date']} UTC, {found['seconds']:g} s, {machine}, {load}"


_HEAD = """\
# All figures of the last runs

`./dev bench all` writes this page: it runs every benchmark, one after another, and draws each figure relative to its
target. A bar that reaches the line has reached the target, whether that is a minimum or a maximum. A figure in bold
misses it.

`./dev bench all NAME` repeats one of them. `./dev bench all --add FILE` adds the output of a single
`./dev bench NAME …`, which may be a run of some parts: its figures replace those of the same name. The figures of one
benchmark may therefore come from several runs; the last column is the number of the run. `./dev bench all --report`
only redraws the report.

The load is the average of the minute before a run, in which the servers of the benchmark may have started. A load of 1
or more without servers means that other programs used the machine, and that the figures are rough; at loads of 10 and
more, a figure can be off by several times. Figures of a command with `--quick`, which does a fraction of the work, are
rough too.
"""


def _markdown(results: Sequence[Sequence[Result]]) -> str:
    parts = [_HEAD]
    for runs in results:
        name = runs[0]["bench"]
        listed = "\n".join(
            f"{number}. `{one['conditions']['command']}`: {_conditions(one)}" for number, one in enumerate(runs, 1)
        )
        rows = "\n".join(
            f"| `{each.name}` | {_cell(each)} | {_target(each)} | {number} |"
            for number, one in enumerate(runs, 1)
            for each in ratios(one)
        )
        parts.append(
            f"## {name}\n\n{listed}\n\nDetails: [{name}]({name}.md).\n\n"
            f"![Figures of {name} relative to their targets](results/{name}.svg)\n\n"
            f"| figure | value | target | run |\n|---|---|---|---|\n{rows}\n"
        )
    measured = {runs[0]["bench"] for runs in results}
    if missing := [f"`{name}`" for name in BENCHES if name not in measured]:
        parts.append(f"## Without a result\n\nThese have no result yet: {', '.join(missing)}.\n")
    return "\n".join(parts)


def _cell(ratio: Ratio) -> str:
    missed = ratio.share is not None and ratio.share < 1
    return f"**{ratio.value:g}**" if missed else f"{ratio.value:g}"


def _target(ratio: Ratio) -> str:
    return "" if ratio.target is None else f"at {'most' if ratio.at_most else 'least'} {ratio.target:g}"


def _html(results: Iterable[Sequence[Result]], plots: Mapping[str, str]) -> str:
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>Tidebook: benchmarks</title>",
        "<style>body{font:15px system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
        "td,th{text-align:left;padding:.2rem 1rem .2rem 0}.missed{color:#b42318;font-weight:600}</style>",
        "<h1>Tidebook: benchmarks</h1><p>Each figure relative to its target; 1 or more has reached it.</p>",
    ]
    for runs in results:
        name = runs[0]["bench"]
        parts.append(f"<h2>{escape(name)}</h2><ol>")
        for one in runs:
            parts.append(f"<li><code>{escape(one['conditions']['command'])}</code>: {escape(_conditions(one))}")
        parts.append(f"</ol>{plots[name]}<table><tr><th>figure<th>value<th>target<th>run")
        for number, one in enumerate(runs, 1):
            for each in ratios(one):
                missed = ' class="missed"' if each.share is not None and each.share < 1 else ""
                cells = f"<td>{escape(each.name)}<td{missed}>{each.value:g}<td>{_target(each)}<td>{number}"
                parts.append(f"<tr>{cells}")
        parts.append("</table>")
    return "\n".join(parts) + "\n"
