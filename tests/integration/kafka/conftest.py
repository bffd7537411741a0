"""A Kafka of one's own, to be killed and frozen; and logs on it."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from tidebook.core.metrics import Metrics
from tidebook.log.kafka import KafkaLog, KafkaSettings, open_kafka_log
from tidebook.testing.servers import Kafka

#: open_log(url, **options): a log that is closed at the end.
OpenKafkaLog = Callable[..., AbstractAsyncContextManager[KafkaLog]]


@pytest.fixture(scope="module")
def own_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kafka]:
    """A broker for one module; each test leaves it running."""
    kafka = Kafka(tmp_path_factory.mktemp("own-kafka"))
    with kafka:
        yield kafka


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def open_log(metrics: Metrics) -> OpenKafkaLog:
    @asynccontextmanager
    async def open_log(url: str, **options: Any) -> AsyncIterator[KafkaLog]:
        log = await open_kafka_log(KafkaSettings.read(url, options, environment={}), metrics=metrics)
        try:
            yield log
        finally:
            await log.close()

    return open_log


@pytest.fixture
def topic() -> str:
    """A name that nobody else uses."""
    return f"test-{uuid.uuid4().hex}"
