"""Regions on a real Kafka: the same cases."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.integration.wal.base import OpenLog
from tests.integration.wal.region_cases import RegionCases
from tidebook.core.metrics import Metrics
from tidebook.log.kafka import KafkaLog, KafkaSettings, open_kafka_log

pytestmark = pytest.mark.kafka


class TestKafkaRegion(RegionCases):
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
