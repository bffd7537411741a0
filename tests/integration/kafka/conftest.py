"""Fixtures: a separate Kafka broker, which tests may kill and pause, and logs on it."""

from __future__ import annotations

import gc
import os
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tidebook.log.kafka import KafkaLog, KafkaSettings
from tidebook.runtime.metrics import Metrics
from tidebook.testing.servers import Kafka

#: open_log(url, **options) returns a log that is closed at the end.
OpenKafkaLog = Callable[..., AbstractAsyncContextManager[KafkaLog]]


def kafka_clients() -> int:
    """Return how many librdkafka clients this process has: each has one main thread, which Python does not list."""
    names = [Path(f"/proc/self/task/{id}/comm") for id in os.listdir("/proc/self/task")]
    return sum(name.read_text().startswith("rdk:main") for name in names if name.exists())


@pytest.fixture(scope="module", autouse=True)
def no_client_is_left() -> Iterator[None]:
    """Fail if a module leaves a client open: it would keep connecting to its broker for the rest of the run."""
    before = kafka_clients()
    yield
    gc.collect()
    assert kafka_clients() <= before


@pytest.fixture(scope="module")
def own_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kafka]:
    """Start a broker for one module; each test leaves it running."""
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
        log = KafkaLog(KafkaSettings.read(url, options, environment={}), metrics=metrics)
        try:
            yield log
        finally:
            await log.close()

    return open_log


@pytest.fixture
def topic() -> str:
    """Return a unique name."""
    return f"test-{uuid.uuid4().hex}"
