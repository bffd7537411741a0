"""A log on three brokers continues without one of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tidebook.core.errors import TidebookError
from tidebook.kafka.settings import KafkaSettings
from tidebook.log.kafka.log import KafkaLog
from tidebook.log.port import Outgoing
from tidebook.runtime.metrics import Metrics
from tidebook.testing.servers.cluster import KafkaCluster

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(300)]
TOPIC, PARTITIONS = "ledger", 3
#: Brokers elect leaders in some seconds; a client that asks only the dead broker never gets an answer.
BOUND_S = 45.0


@pytest.fixture
def cluster(kafka_bootstrap: str, tmp_path: Path) -> Iterator[KafkaCluster]:
    made = KafkaCluster(tmp_path / "kafka")
    try:
        made.start()
        yield made
    finally:
        made.kill9()
        made.remove()


async def test_a_log_describes_its_topic_appends_and_reads_ends_while_the_known_controller_is_down(
    cluster: KafkaCluster,
) -> None:
    settings = KafkaSettings(servers=tuple(cluster.address.split(",")), send_timeout_ms=4000, request_timeout_ms=2000)
    log = KafkaLog(settings, metrics=Metrics())
    try:
        await log.create_topic(TOPIC, PARTITIONS)
        for partition in range(PARTITIONS):  # so that the clients know every leader
            await log.append(Outgoing(TOPIC, partition, None, b"first"))
            await log.end(TOPIC, partition)
        # The metadata names one broker as the controller, to which the admin client then sends its requests.
        metadata = await asyncio.to_thread(log._topics._client.list_topics)
        cluster.nodes[metadata.controller_id - 1].kill9()
        deadline_s = time.monotonic() + BOUND_S
        assert await _eventually(lambda: log.topic(TOPIC), deadline_s) is not None
        for partition in range(PARTITIONS):
            await _eventually(lambda p=partition: log.append(Outgoing(TOPIC, p, None, b"second")), deadline_s)
            assert await _eventually(lambda p=partition: log.end(TOPIC, p), deadline_s) >= 2
    finally:
        await log.close()


async def _eventually(call: Any, deadline_s: float) -> Any:
    """Return the result of the call, which is retried after an error until the deadline."""
    while True:
        try:
            return await call()
        except TidebookError:
            if time.monotonic() > deadline_s:
                raise
