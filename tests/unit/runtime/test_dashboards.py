"""The dashboard and the alert rules name metrics and labels that exist."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tidebook.runtime.metrics import COUNTERS, DURATIONS, GAUGES

FOLDER = Path(__file__).resolve().parents[3] / "dashboards"
#: The labels that Prometheus adds to every series.
ADDED = {"job", "instance"}
EXPORTED = {
    **{f"tidebook_{name}_total": {*labels} for name, (_, *labels) in COUNTERS.items()},
    **{f"tidebook_{name}": {*labels} for name, (_, *labels) in GAUGES.items()},
    **{
        f"tidebook_{name}_seconds_{suffix}": {*labels, *(["le"] if suffix == "bucket" else [])}
        for name, (_, *labels) in DURATIONS.items()
        for suffix in ("bucket", "count", "sum")
    },
}


def expressions() -> Iterator[tuple[str, str]]:
    """Yield the title of each rule and panel with its expressions."""
    for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]
    for panel in json.loads((FOLDER / "tidebook.json").read_text())["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


@pytest.mark.parametrize(("title", "expression"), list(expressions()))
def test_every_metric_and_label_exists(title: str, expression: str) -> None:
    named = re.findall(r"tidebook_\w+", expression)
    assert named
    assert [name for name in named if name not in EXPORTED] == []
    labels = {label for names in re.findall(r"\b(?:by|on) ?\(([^)]*)\)", expression) for label in names.split(", ")}
    labels |= {
        label for matchers in re.findall(r"\{([^}]*)\}", expression) for label in re.findall(r"(\w+)=", matchers)
    }
    assert labels - ADDED <= set.intersection(*(EXPORTED[name] for name in named))


def test_the_texts_of_alerts_use_labels_of_their_expression() -> None:
    for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            kept = re.search(r"\bby \(([^)]*)\)", rule["expr"])
            named = re.findall(r"tidebook_\w+", rule["expr"])
            known = set(kept[1].split(", ")) if kept else EXPORTED[named[0]]
            used = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
            assert used <= known, rule["alert"]


def test_every_state_that_needs_an_operator_has_an_alert() -> None:
    text = (FOLDER / "alerts.yml").read_text()
    for name in (
        "tidebook_pipeline_lag_seconds",
        "tidebook_outbox_oldest_seconds",
        "tidebook_queue_dead_letters_announced_total",
        "tidebook_wal_pinned_by_table",
        "tidebook_pipeline_stopped_partitions",
    ):
        assert name in text
