"""The options with which Spark's Kafka source reads the log."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("confluent_kafka")

from tidebook.wiring.settings import read_settings
from tidebook.wiring.spark import kafka_client_options


def test_reading_creates_no_topic_and_skips_no_record(tmp_path: Path) -> None:
    toml = tmp_path / "tidebook.toml"
    toml.write_text('[log]\nurl = "kafka://one:9092,two:9092"\n')
    options = kafka_client_options(read_settings(toml))
    assert options["bootstrap.servers"] == "one:9092,two:9092"
    assert options["allow.auto.create.topics"] == "false"
    assert options["isolation.level"] == "read_uncommitted"
