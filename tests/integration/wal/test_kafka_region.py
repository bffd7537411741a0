"""The cases that every WAL region must pass, on a real Kafka, and two that only Kafka has."""

from __future__ import annotations

import asyncio

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
)

from tests.integration.wal.base import OpenLog, contents, state_of
from tests.integration.wal.region_cases import RegionCases
from tests.open_adapters import kafka_logs
from tidebook.core.errors import InvalidInput
from tidebook.log.kafka import KafkaLog
from tidebook.wal.region import Region
from tidebook.wal.wal import Wal

pytestmark = pytest.mark.kafka


class TestKafkaRegion(RegionCases):
    @pytest.fixture
    def open_log(self, kafka_bootstrap: str) -> OpenLog:
        return kafka_logs(kafka_bootstrap)

    async def test_offset_gaps_of_foreign_transactions_are_no_loss(
        self, log: KafkaLog, other: Wal, region: Region, namespace: str, kafka_bootstrap: str
    ) -> None:
        await region.write(1, [b"a"])
        producer = Producer({"bootstrap.servers": kafka_bootstrap, "transactional.id": namespace})
        await asyncio.to_thread(producer.init_transactions, 30)
        for _ in range(3):
            producer.begin_transaction()
            producer.produce(f"wal.{namespace}.7.data", b"never committed", partition=0)
            await asyncio.to_thread(producer.flush, 30)
            await asyncio.to_thread(producer.abort_transaction, 30)
            await region.write(1, [b"b"])
        assert [seq for seq, _ in (await contents(region))[1]] == [1, 2, 3, 4]
        offsets = list(region.meta.tables[1].mapping.values())
        assert offsets[-1] - offsets[0] > 3
        again = await other.open_region(7)
        assert state_of(again.meta) == state_of(region.meta)

    async def test_a_topic_with_time_based_retention_is_rejected(
        self, log: KafkaLog, other: Wal, region: Region, namespace: str, kafka_bootstrap: str
    ) -> None:
        await region.write(1, [b"a"])
        entry = ConfigEntry("retention.ms", "1000", incremental_operation=AlterConfigOpType.SET)
        topic = ConfigResource(ConfigResource.Type.TOPIC, f"wal.{namespace}.7.data", incremental_configs=[entry])
        admin = AdminClient({"bootstrap.servers": kafka_bootstrap})
        for done in admin.incremental_alter_configs([topic]).values():
            await asyncio.to_thread(done.result, 30)
        with pytest.raises(InvalidInput, match="forever"):
            await other.open_region(7)
