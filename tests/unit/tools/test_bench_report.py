"""The report of all benchmarks: every target has a direction, and the last results become one page."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from bench import all as bench_all
from bench.all import AT_MOST, BENCHES, keep, last_runs, main, ratios, read_results, run, write_report
from bench.conditions import begin
from bench.timing import report

BENCH = Path(__file__).resolve().parents[3] / "bench"
#: Ratios of which greater is better. Every ratio is in this list or in `AT_MOST`.
AT_LEAST = {
    "append_many_vs_produce_loop", "append_vs_empty_post", "appends_256_beside_load_vs_best_async_client",
    "appends_256_vs_best_async_client",
    "apply_rows_vs_bare_sqlite", "batch_100_vs_eventsourcing", "batch_vs_append_many", "cassandra_vs_bare",
    "catch_up_vs_bare_loop", "catch_up_vs_driver", "drain_vs_bare", "drain_vs_pgmq", "drain_vs_pgqueuer",
    "drain_vs_procrastinate", "embedded_vs_bare", "embedded_vs_huey", "execute_vs_eventsourcing",
    "job_tagged_vs_plain", "journals_vs_bare", "publish_vs_bare_insert", "put_vs_pgqueuer", "queue_vs_in_process",
    "read_vs_in_process", "relay_vs_bare_loop", "relay_vs_row_by_row", "replay_10k_replicated_vs_eventsourcing",
    "replay_10k_vs_eventsourcing", "replay_vs_bare_consumer", "sends_64_vs_bare_sqlite", "singles_vs_pgqueuer",
    "slice_one_journal_vs_driver", "source_cassandra_vs_kafka", "source_embedded_vs_kafka", "ten_events_vs_single",
    "write_10_vs_perf_tool", "write_1_vs_one_at_a_time", "write_1_vs_perf_tool", "writers_64_vs_bare_sqlite",
    "writers_64_vs_eventsourcing",
}  # fmt: skip


def result(name: str, *, command: str = "", date: str = "2026-11-18 10:00", **figures: Any) -> dict[str, Any]:
    conditions = {
        "command": command or f"./dev bench {name}", "date": date, "seconds": 12.5, "load_before": 0.1, "cores": 2,
        "python": "3.11.7",
    }  # fmt: skip
    return {"bench": name, "targets": {}, "figures": {}, **figures, "conditions": conditions}


def targets_of(name: str) -> set[str]:
    """Return the names in the targets of a benchmark, without importing the drivers that it needs."""
    found: set[str] = set()
    for file in (BENCH / f"{name}.py", *(BENCH / f"{name}_parts").glob("*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.Assign) and "TARGETS" in getattr(node.targets[0], "id", ""):
                keys = getattr(node.value, "keys", [])
                found |= {str(each.value) for each in keys if isinstance(each, ast.Constant)}
    return found


@pytest.mark.parametrize("name", BENCHES)
def test_every_target_is_at_most_or_at_least(name: str) -> None:
    targets = targets_of(name)
    assert targets
    assert targets - AT_MOST - AT_LEAST == set()
    assert set() == AT_MOST & AT_LEAST


def test_a_target_is_an_upper_or_a_lower_bound() -> None:
    found = ratios(result("queue", drain_vs_pgqueuer=6.0, timer_p50_ms=20.0, other=1.0, targets={
        "drain_vs_pgqueuer": 3.0, "timer_p50_ms": 10.0,
    }))  # fmt: skip
    assert [(each.name, each.share) for each in found] == [
        ("drain_vs_pgqueuer", 2.0),
        ("timer_p50_ms", 0.5),
        ("other", None),
    ]


def test_the_last_results_become_a_page_plots_and_one_json_file(tmp_path: Path) -> None:
    results = tmp_path / "results"
    for name, value in (("queue", 2.0), ("embedded", 0.5)):
        figure = {"queue": "drain_vs_pgqueuer", "embedded": "sends_64_vs_bare_sqlite"}[name]
        target = {"queue": 3.0, "embedded": 0.25}[name]
        keep({**result(name, targets={figure: target}), figure: value}, results)
    page = tmp_path / "docs" / "all.md"
    write_report(read_results(results), page=page, build=tmp_path / "build")
    text = page.read_text()
    assert text.index("## embedded") < text.index("## queue")
    assert "| `drain_vs_pgqueuer` | **2** | at least 3 | 1 |" in text
    assert "| `sends_64_vs_bare_sqlite` | 0.5 | at least 0.25 | 1 |" in text
    missing = text.partition("## Without a result")[2]
    assert "`kafka`" in missing
    assert "`queue`" not in missing
    for name in ("queue", "embedded"):
        ElementTree.parse(page.parent / "results" / f"{name}.svg")
    assert len(json.loads((tmp_path / "build" / "report.json").read_text())) == 2
    assert "drain_vs_pgqueuer" in (tmp_path / "build" / "report.html").read_text()


def test_a_page_says_of_each_figure_when_and_at_which_load_it_was_measured(tmp_path: Path) -> None:
    keep(result("queue", command="./dev bench queue --quick", date="2026-11-18 10:00", a=1.0, b=2.0), tmp_path)
    keep(result("queue", command="./dev bench queue --part b", date="2026-11-19 11:30", b=3.0), tmp_path)
    page = tmp_path / "docs" / "all.md"
    write_report(read_results(tmp_path), page=page, build=tmp_path / "build")
    text = page.read_text()
    where = "12.5 s, 2 cores, Python 3.11.7, load 0.1 before it"
    assert f"1. `./dev bench queue --quick`: 2026-11-18 10:00 UTC, {where}" in text
    assert f"2. `./dev bench queue --part b`: 2026-11-19 11:30 UTC, {where}" in text
    assert "| `a` | 1 |  | 1 |\n| `b` | 3 |  | 2 |" in text


def test_the_last_run_has_each_figure_in_whatever_order_runs_are_added() -> None:
    old = result("queue", date="2026-11-17 10:00", a=1.0, targets={"a": 2.0})
    whole = result("queue", date="2026-11-18 10:00", a=2.0, b=2.0, targets={"a": 2.0, "b": 1.0})
    part = result("queue", date="2026-11-19 10:00", b=3.0, targets={"b": 1.0})
    for runs in ([old, whole, part], [part, whole, old], [whole, part, old]):
        first, second = last_runs(runs)
        assert [(each.name, each.value, each.target) for each in ratios(first)] == [("a", 2.0, 2.0)]
        assert [(each.name, each.value, each.target) for each in ratios(second)] == [("b", 3.0, 1.0)]
        assert first["targets"] == {"a": 2.0}


def test_the_output_of_one_benchmark_is_added_to_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(["outbox", "--quick"])
    report("outbox", {"relay_vs_bare_loop": 0.81234}, {"relay_per_s": 1.0}, {"relay_vs_bare_loop": 0.5})
    file = tmp_path / "outbox.json"
    file.write_text("progress\n" + capsys.readouterr().out)
    for name, path in (("RESULTS", "results"), ("PAGE", "all.md"), ("BUILD", "build"), ("ROOT", "")):
        monkeypatch.setattr(bench_all, name, tmp_path / path)
    assert main(["--add", str(file)]) == 0
    assert "1. `./dev bench outbox --quick`: 20" in (tmp_path / "all.md").read_text()
    [[added]] = read_results(tmp_path / "results")
    assert (added["relay_vs_bare_loop"], added["figures"]) == (0.812, {"relay_per_s": 1.0})
    assert added["conditions"]["seconds"] >= 0
    assert json.loads(capsys.readouterr().out)["run"] == []


def test_the_stored_results_and_the_page_fit_together(tmp_path: Path) -> None:
    write_report(read_results(bench_all.RESULTS), page=tmp_path / "all.md", build=tmp_path / "build")
    assert bench_all.PAGE.read_text() == (tmp_path / "all.md").read_text(), "run: ./dev bench all --report"


def test_a_benchmark_that_takes_too_long_is_stopped_and_has_no_result(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("embedded", [], limit_s=0.1) is None
    assert "ended after 0 s" in capfd.readouterr().err
