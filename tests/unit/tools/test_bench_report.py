"""The report of all benchmarks: every target has a direction, and the last results become one page."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from bench.all import AT_MOST, BENCHES, ratios, read_results, run, write_report

BENCH = Path(__file__).resolve().parents[3] / "bench"
#: Ratios that are better if they are greater. A name is in this list or in `AT_MOST`.
AT_LEAST = {
    "append_many_vs_produce_loop", "append_vs_empty_post", "appends_256_vs_best_async_client",
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


def result(name: str, **figures: Any) -> dict[str, Any]:
    return {
        "command": f"./dev bench {name}", "date": "2026-11-18", "seconds": 12.5, "load_before": 0.1, "cores": 2,
        "python": "3.11.7", "result": {"bench": name, **figures},
    }  # fmt: skip


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


def test_a_target_is_reached_from_its_side() -> None:
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
    results.mkdir()
    for name, value in (("queue", 2.0), ("embedded", 0.5)):
        figure = {"queue": "drain_vs_pgqueuer", "embedded": "sends_64_vs_bare_sqlite"}[name]
        target = {"queue": 3.0, "embedded": 0.25}[name]
        (results / f"{name}.json").write_text(json.dumps(result(name, **{figure: value}, targets={figure: target})))
    page = tmp_path / "docs" / "all.md"
    write_report(read_results(results), page=page, build=tmp_path / "build")
    text = page.read_text()
    assert text.index("## embedded") < text.index("## queue")
    assert "| `drain_vs_pgqueuer` | **2** | at least 3 |" in text
    assert "| `sends_64_vs_bare_sqlite` | 0.5 | at least 0.25 |" in text
    missing = text.partition("## Without a result")[2]
    assert "`kafka`" in missing
    assert "`queue`" not in missing
    for name in ("queue", "embedded"):
        ElementTree.parse(page.parent / "results" / f"{name}.svg")
    assert len(json.loads((tmp_path / "build" / "report.json").read_text())) == 2
    assert "drain_vs_pgqueuer" in (tmp_path / "build" / "report.html").read_text()


def test_a_benchmark_that_takes_too_long_is_ended_and_has_no_result(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("embedded", [], limit_s=0.1) is None
    assert "ended after 0 s" in capfd.readouterr().err
