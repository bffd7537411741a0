"""Sends to Kafka: records beyond the limit in flight, a producer that is replaced, long headers, forks."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from tests.integration.kafka.conftest import OpenKafkaLog
from tidebook.core.errors import OutcomeUnknown, TidebookError, TooLarge
from tidebook.log.port import Acknowledged, Outgoing, read_all
from tidebook.runtime.metrics import Metrics

pytestmark = pytest.mark.kafka


async def test_records_beyond_the_limit_of_records_in_flight_wait_and_are_written_in_order(
    kafka_bootstrap: str, open_log: OpenKafkaLog, topic: str
) -> None:
    async with open_log(f"kafka://{kafka_bootstrap}", in_flight_records_max=50) as log:
        await log.create_topic(topic, 1)
        await asyncio.gather(*(log.append(Outgoing(topic, 0, b"k", b"%d" % i)) for i in range(3_000)))
        records = await read_all(log, topic, 0, start=0, stop=3_000)
        assert [int(r.value or b"") for r in records] == list(range(3_000))
        await log.delete_topic(topic)


async def test_a_failed_producer_is_replaced_and_every_record_is_resolved(
    kafka_bootstrap: str, open_log: OpenKafkaLog, topic: str, metrics: Metrics
) -> None:
    async with open_log(f"kafka://{kafka_bootstrap}") as log:
        await log.create_topic(topic, 1)
        results: list[Acknowledged | TidebookError] = []
        for i in range(500):
            log.send(Outgoing(topic, 0, b"k", b"%d" % i), results.append)
        await asyncio.sleep(0)
        (producer,) = log._producers.values()
        producer._replace(producer._client_number)  # as the client's error callback does
        sent = await log.append(Outgoing(topic, 0, b"k", b"after"))
        async with asyncio.timeout(60):
            while len(results) < 500:  # noqa: ASYNC110 - the callbacks are the test's own
                await asyncio.sleep(0.01)
        assert metrics.counted("kafka_producer_replaced") == 1
        assert all(isinstance(result, Acknowledged | OutcomeUnknown) for result in results)
        acknowledged = {result.offset for result in results if isinstance(result, Acknowledged)}
        found = await read_all(log, topic, 0, start=0, stop=sent.offset + 1)
        assert acknowledged <= {record.offset for record in found}
        assert len({record.value for record in found}) == len(found)
        await log.delete_topic(topic)


async def test_long_headers_are_refused_as_too_large(kafka_bootstrap: str, open_log: OpenKafkaLog, topic: str) -> None:
    async with open_log(f"kafka://{kafka_bootstrap}") as log:
        await log.create_topic(topic, 1)
        with pytest.raises(TooLarge, match="headers"):
            await log.append(Outgoing(topic, 0, b"k", b"v", (("h", b"x" * 5_000),)))
        await log.delete_topic(topic)


FORKED = """
import asyncio, os, sys
from tidebook.core.errors import InvalidInput
from tidebook.runtime.metrics import Metrics
from tidebook.log.kafka import KafkaLog, KafkaSettings
from tidebook.log.port import Outgoing

settings = KafkaSettings.read(sys.argv[1])
topic = sys.argv[2]

async def write(log, value):
    await log.create_topic(topic, 1)
    return await log.append(Outgoing(topic, 0, b"k", value))

async def main():
    log = KafkaLog(settings, metrics=Metrics())
    if os.fork() == 0:
        try:
            await write(log, b"wrong")
        except InvalidInput as error:
            print("refused" if "fork" in str(error) else error, flush=True)
        os._exit(0)
    os.wait()
    await write(log, b"parent")
    await log.close()

asyncio.run(main())
print("parent wrote", flush=True)
"""


def test_a_log_opened_before_a_fork_is_refused_in_the_child(kafka_bootstrap: str, topic: str) -> None:
    command = [sys.executable, "-c", FORKED, f"kafka://{kafka_bootstrap}", topic]
    reported = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert reported.stdout.split("\n")[:2] == ["refused", "parent wrote"], reported.stderr
