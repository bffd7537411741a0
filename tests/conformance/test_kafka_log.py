"""The log's contract on a real Kafka."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tidebook.log.kafka import KafkaLog, KafkaSettings, open_kafka_log
from tidebook.runtime.metrics import Metrics
from tidebook.testing.conformance.log import LogContract, OpenLog

pytestmark = pytest.mark.kafka


class TestKafkaLog(LogContract):
    indexed_by_key = False
    end_is_linearizable = False

    @pytest.fixture
    def open_log(self, kafka_bootstrap: str) -> OpenLog:
        settings = KafkaSettings.read(f"kafka://{kafka_bootstrap}")

        @asynccontextmanager
        async def open_log() -> AsyncIterator[KafkaLog]:
            log = await open_kafka_log(settings, metrics=Metrics())
            try:
                yield log
            finally:
                await log.close()

        return open_log
