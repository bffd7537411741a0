"""Counters, gauges and durations, and the page that lists them."""

from __future__ import annotations

import ast
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from prometheus_client import generate_latest

from tidebook.core.errors import InvalidInput, Unavailable
from tidebook.runtime.metrics import COUNTERS, DURATIONS, GAUGES, Metrics, Sample, serve_metrics

ROOT = Path(__file__).resolve().parents[3]
SOURCE = ROOT / "src" / "tidebook"
KINDS = {"count": COUNTERS, "gauge": GAUGES, "time": DURATIONS}
CHANGE = re.compile(rf"metrics\s*\.\s*({'|'.join(KINDS)})|\._count\b")


def calls() -> Iterator[tuple[str, str, str, set[str] | None]]:
    """Yield where a metric is changed, how, its name, and its labels (None: passed as a mapping)."""
    for file in sorted(SOURCE.rglob("*.py")):
        source = file.read_text()
        if CHANGE.search(source) is None:
            continue
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
                continue
            if isinstance(node.args[0], ast.Name):  # `_count` passes its arguments on; its calls are checked instead
                continue
            through = node.func.attr == "_count"
            if through or (node.func.attr in KINDS and ast.unparse(node.func.value).endswith("metrics")):
                where = f"{file.relative_to(SOURCE)}:{node.lineno}"
                names = {keyword.arg for keyword in node.keywords}
                labels = None if through or None in names else {name for name in names if name is not None}
                yield where, node.func.attr.lstrip("_"), ast.unparse(node.args[0]), labels


def test_every_metric_that_is_changed_is_declared_with_its_labels() -> None:
    for where, kind, name, labels in calls():
        declared = KINDS[kind].get(ast.literal_eval(name))
        assert declared is not None, f"{where}: {name} is not declared in runtime/metrics.py"
        assert labels is None or labels == set(declared[1:]), where


def test_every_declared_metric_is_changed_somewhere() -> None:
    source = "".join(file.read_text() for file in SOURCE.rglob("*.py") if file.name != "metrics.py")
    assert [name for kind in KINDS.values() for name in kind if f'"{name}"' not in source] == []


def test_the_reference_lists_every_metric() -> None:
    rows = [
        f"| `{prefix}{name}{suffix}` | {kind} | {', '.join(labels)} | {text} |"
        for kind, prefix, suffix, table in (
            ("counter", "tidebook_", "_total", COUNTERS),
            ("gauge", "tidebook_", "", GAUGES),
            ("histogram", "tidebook_", "_seconds", DURATIONS),
        )
        for name, (text, *labels) in table.items()
    ]
    page = (ROOT / "docs/reference/metrics.md").read_text()
    found = [line for line in page.splitlines() if line.startswith("| `")]
    assert found == rows, "expected these rows:\n" + "\n".join(rows)


def test_counters_add_up_by_their_labels() -> None:
    metrics = Metrics()
    metrics.count("outbox_at_least_once", topic="a", cause="lost")
    metrics.count("outbox_at_least_once", 2, topic="a", cause="lost")
    metrics.count("outbox_at_least_once", topic="b", cause="weak")
    assert metrics.counted("outbox_at_least_once", topic="a") == 3
    assert metrics.counted("outbox_at_least_once") == 4
    assert metrics.counted("outbox_at_least_once", topic="c") == 0
    assert metrics.counted("outbox_sent") == 0


def test_the_order_of_labels_does_not_matter() -> None:
    metrics = Metrics()
    metrics.count("pipeline_records", topic="a", partition=2)
    metrics.count("pipeline_records", partition=2, topic="a")
    assert list(metrics.samples()) == [Sample("pipeline_records_total", (("topic", "a"), ("partition", "2")), 2)]


def test_a_gauge_has_the_value_last_set() -> None:
    metrics = Metrics()
    metrics.gauge("kafka_brokers_down", 5)
    metrics.gauge("kafka_brokers_down", 3)
    assert list(metrics.samples()) == [Sample("kafka_brokers_down", (), 3)]


def test_durations_have_a_count_and_a_sum() -> None:
    metrics = Metrics()
    for seconds in (0.5, 0.25, 0.0):
        metrics.time("pipeline_batch", seconds, step="addBatch")
    timing = metrics.timing("pipeline_batch", step="addBatch")
    assert (timing.count, timing.total_s) == (3, 0.75)
    assert metrics.timing("pipeline_batch", step="getBatch").count == 0


def test_a_duration_is_exported_as_a_histogram() -> None:
    metrics = Metrics()
    metrics.time("cassandra_read", 0.03)
    found = {(sample.name, sample.labels): sample.value for sample in metrics.samples()}
    assert found["cassandra_read_seconds_count", ()] == 1
    assert found["cassandra_read_seconds_sum", ()] == 0.03
    assert found["cassandra_read_seconds_bucket", (("le", "0.025"),)] == 0
    assert found["cassandra_read_seconds_bucket", (("le", "0.05"),)] == 1


def test_a_duration_that_was_never_recorded_is_0() -> None:
    assert Metrics().timing("cassandra_read").count == 0


def test_the_registry_is_exported_by_the_client_library() -> None:
    metrics = Metrics()
    metrics.count("outbox_sent", 2, topic="orders")
    text = generate_latest(metrics.registry).decode()
    assert 'tidebook_outbox_sent_total{topic="orders"} 2.0' in text
    assert "# HELP tidebook_outbox_sent_total Messages that the target acknowledged." in text


@pytest.mark.parametrize("labels", [{}, {"queue": "a"}, {"topic": "a", "queue": "b"}])
def test_other_labels_than_declared_are_refused(labels: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="label"):
        Metrics().count("outbox_sent", **labels)


def test_no_count_is_lost_between_threads() -> None:
    metrics = Metrics()

    def count() -> None:
        for _ in range(2000):
            metrics.count("kafka_sent")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert metrics.counted("kafka_sent") == 8000


def test_metrics_are_served_over_http_and_the_port_is_free_again() -> None:
    metrics = Metrics()
    metrics.gauge("kafka_brokers_down", 1)
    with serve_metrics(metrics, "127.0.0.1:0") as port:
        with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            assert "tidebook_kafka_brokers_down 1.0" in answer.read().decode()
        with pytest.raises(Unavailable, match="cannot be served"), serve_metrics(metrics, f"127.0.0.1:{port}"):
            pass
    with serve_metrics(metrics, f"127.0.0.1:{port}"):
        pass


@pytest.mark.parametrize("address", ["", "9401x", "127.0.0.1", "127.0.0.1:70000", ":-1"])
def test_an_invalid_address_is_refused(address: str) -> None:
    with pytest.raises(InvalidInput, match="HOST:PORT"), serve_metrics(Metrics(), address):
        pass
