"""Run the log's conformance suite on a real Kafka."""

from __future__ import annotations

import pytest

from tests.open_adapters import kafka_logs
from tidebook.testing.conformance.log import LogContract, OpenLog

pytestmark = pytest.mark.kafka


class TestKafkaLog(LogContract):
    indexed_by_key = False
    end_is_linearizable = False

    @pytest.fixture
    def open_log(self, kafka_bootstrap: str) -> OpenLog:
        return kafka_logs(kafka_bootstrap)
