"""A broker that is killed, paused or missing: every record is correctly reported as acknowledged, failed or unknown."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator

import pytest

from tests.integration.kafka.conftest import OpenKafkaLog
from tidebook.core.errors import NotFound, OutcomeUnknown, TidebookError, Unavailable
from tidebook.log.kafka import KafkaLog
from tidebook.log.port import Acknowledged, Outgoing, Record, read_all
from tidebook.runtime.metrics import Metrics
from tidebook.testing.servers import Kafka

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(300)]

SHORT = {"send_timeout_ms": 3_000, "request_timeout_ms": 2_000}
CASE_TIMEOUT_S = 120


class Appending:
    """Appends consecutive numbers in several tasks until it is stopped."""

    def __init__(self, log: KafkaLog, topic: str) -> None:
        self._log = log
        self._topic = topic
        self._numbers: Iterator[int] = itertools.count()
        self._stopped = False
        self._changed = asyncio.Event()
        self._tasks = [asyncio.create_task(self._append()) for _ in range(16)]
        self.sent: dict[int, Acknowledged] = {}
        self.failed: set[int] = set()
        self.unknown: set[int] = set()

    async def _append(self) -> None:
        while not self._stopped:
            number = next(self._numbers)
            try:
                self.sent[number] = await self._log.append(Outgoing(self._topic, number % 2, b"key", b"%d" % number))
            except OutcomeUnknown:
                self.unknown.add(number)
            except Unavailable:
                self.failed.add(number)
            self._changed.set()

    async def until_sent(self, count: int) -> None:
        """Wait for this many more acknowledgements."""
        wanted = len(self.sent) + count
        async with asyncio.timeout(CASE_TIMEOUT_S):
            while len(self.sent) < wanted:
                self._changed.clear()
                await self._changed.wait()

    async def stop(self) -> None:
        self._stopped = True
        await asyncio.gather(*self._tasks)

    async def check(self, reader: KafkaLog) -> None:
        """Check that each acknowledged record is in the log once, at its reported offset, and no failed one is."""
        found: dict[int, list[tuple[int, int]]] = {}
        for partition in range(2):
            end = await reader.end(self._topic, partition)
            for record in await read_all(reader, self._topic, partition, start=0, stop=end):
                found.setdefault(int(record.value or b""), []).append((partition, record.offset))
        assert [number for number, places in found.items() if len(places) > 1] == []
        assert {n: [(s.partition, s.offset)] for n, s in self.sent.items()}.items() <= found.items()
        assert not self.failed & found.keys()


async def test_a_broker_killed_while_records_are_sent_loses_and_duplicates_none(
    own_kafka: Kafka, open_log: OpenKafkaLog, topic: str
) -> None:
    async with open_log(own_kafka.url) as log:
        await log.create_topic(topic, 2)
        appending = Appending(log, topic)
        for _ in range(2):
            await appending.until_sent(300)
            await asyncio.to_thread(own_kafka.kill9)
            await asyncio.to_thread(own_kafka.start)
        await appending.until_sent(300)
        await appending.stop()
        async with open_log(own_kafka.url, request_timeout_ms=60_000) as reader:
            await appending.check(reader)


async def test_a_long_outage_fails_the_records_sent_during_it_and_recovery_is_automatic(
    own_kafka: Kafka, open_log: OpenKafkaLog, topic: str
) -> None:
    async with open_log(own_kafka.url) as patient:
        await patient.create_topic(topic, 2)
    async with open_log(own_kafka.url, **SHORT) as log:
        appending = Appending(log, topic)
        await appending.until_sent(100)
        await asyncio.to_thread(own_kafka.kill9)
        async with asyncio.timeout(CASE_TIMEOUT_S):
            while not appending.failed:
                appending._changed.clear()
                await appending._changed.wait()
        await asyncio.to_thread(own_kafka.start)
        await appending.until_sent(100)
        await appending.stop()
        async with open_log(own_kafka.url, request_timeout_ms=60_000) as reader:
            await appending.check(reader)


async def test_records_for_a_frozen_broker_are_resolved_within_the_timeout(
    own_kafka: Kafka, open_log: OpenKafkaLog, topic: str
) -> None:
    async with open_log(own_kafka.url) as patient:
        await patient.create_topic(topic, 1)
    async with open_log(own_kafka.url, **SHORT) as log:
        await until_it_works(log, Outgoing(topic, 0, b"k", b"before"))
        own_kafka.pause()
        try:
            async with asyncio.timeout(30):  # takes seconds on an idle machine
                with pytest.raises((OutcomeUnknown, Unavailable)) as caught:
                    await log.append(Outgoing(topic, 0, b"k", b"during"))
                with pytest.raises(Unavailable):
                    await log.end(topic, 0)
                with pytest.raises(Unavailable):
                    await log.read(topic, 0, start=0, stop=1)
        finally:
            own_kafka.resume()
        await until_it_works(log, Outgoing(topic, 0, b"k", b"after"))
        values = [r.value for r in await everything(log, topic)]
        assert values[0] == b"before"
        assert values[-1] == b"after"
        assert values.count(b"during") <= isinstance(caught.value, OutcomeUnknown)


async def everything(log: KafkaLog, topic: str) -> list[Record]:
    """Read all of partition 0, from a broker that may still be starting."""
    async with asyncio.timeout(CASE_TIMEOUT_S):
        while True:
            try:
                return list(await read_all(log, topic, 0, start=0, stop=await log.end(topic, 0)))
            except (Unavailable, NotFound):  # until the broker has rejoined its cluster, it may not know its topics
                continue


async def until_it_works(log: KafkaLog, record: Outgoing) -> Acknowledged:
    async with asyncio.timeout(CASE_TIMEOUT_S):
        while True:
            try:
                return await log.append(record)
            except (OutcomeUnknown, Unavailable):
                continue


async def test_without_a_broker_a_send_is_unavailable_and_nothing_is_written_later(
    own_kafka: Kafka, open_log: OpenKafkaLog, topic: str, metrics: Metrics
) -> None:
    async with open_log(own_kafka.url) as patient:
        await patient.create_topic(topic, 1)
    async with open_log(own_kafka.url, **SHORT) as log:
        await until_it_works(log, Outgoing(topic, 0, b"k", b"before"))
        await asyncio.to_thread(own_kafka.kill9)
        try:
            # The client may have accepted the first record before it noticed the outage.
            outcomes = [await outcome(log, Outgoing(topic, 0, b"k", b"during %d" % i)) for i in range(3)]
        finally:
            await asyncio.to_thread(own_kafka.start)
        assert isinstance(outcomes[-1], Unavailable)
        assert "nothing was written" in str(outcomes[-1])
        await until_it_works(log, Outgoing(topic, 0, b"k", b"after"))
        values = [r.value for r in await everything(log, topic)]
        assert b"during 2" not in values
        assert metrics.counted("kafka_send_failed", error="Unavailable") >= 1


async def outcome(log: KafkaLog, record: Outgoing) -> Acknowledged | TidebookError:
    try:
        return await log.append(record)
    except TidebookError as error:
        return error


async def test_a_short_outage_only_delays_records(own_kafka: Kafka, open_log: OpenKafkaLog, topic: str) -> None:
    async with open_log(own_kafka.url, send_timeout_ms=60_000) as log:
        await log.create_topic(topic, 1)
        await log.append(Outgoing(topic, 0, b"k", b"0"))
        await asyncio.to_thread(own_kafka.kill9)
        appends = [asyncio.create_task(log.append(Outgoing(topic, 0, b"k", b"%d" % i))) for i in range(1, 200)]
        await asyncio.to_thread(own_kafka.start)
        await asyncio.gather(*appends)
        values = [int(r.value or b"") for r in await read_all(log, topic, 0, start=0, stop=await log.end(topic, 0))]
        assert values == list(range(200))


async def test_reads_and_waits_continue_after_a_restart(own_kafka: Kafka, open_log: OpenKafkaLog, topic: str) -> None:
    async with (
        open_log(own_kafka.url, request_timeout_ms=60_000) as log,
        open_log(own_kafka.url, send_timeout_ms=60_000) as writer,
    ):
        await log.create_topic(topic, 1)
        for i in range(10):
            await writer.append(Outgoing(topic, 0, b"k", b"%d" % i))
        assert len((await log.read(topic, 0, start=0, stop=10, limit=5)).records) == 5
        waiting = asyncio.create_task(log.wait(topic, 0, offset=10, timeout_s=CASE_TIMEOUT_S))
        assert not await log.wait(topic, 0, offset=10, timeout_s=0.2)
        await asyncio.to_thread(own_kafka.kill9)
        reading = asyncio.create_task(log.read(topic, 0, start=5, stop=10, limit=5))
        again = asyncio.create_task(log.read(topic, 0, start=0, stop=10))
        await asyncio.to_thread(own_kafka.start)
        assert len((await reading).records) == 5
        assert len((await again).records) == 10
        await writer.append(Outgoing(topic, 0, b"k", b"10"))
        assert await waiting
        assert [r.value for r in (await log.read(topic, 0, start=10, stop=11)).records] == [b"10"]


async def test_closing_without_a_broker_ends_in_time_and_resolves_every_record(
    own_kafka: Kafka, open_log: OpenKafkaLog, topic: str
) -> None:
    results: list[Acknowledged | TidebookError] = []
    try:
        async with open_log(own_kafka.url) as patient:
            await patient.create_topic(topic, 1)
        async with asyncio.timeout(CASE_TIMEOUT_S), open_log(own_kafka.url, **SHORT) as log:
            await until_it_works(log, Outgoing(topic, 0, b"k", b"before"))
            await asyncio.to_thread(own_kafka.kill9)
            for _ in range(10):
                log.send(Outgoing(topic, 0, b"k", b"during"), results.append)
    finally:
        await asyncio.to_thread(own_kafka.start)
    assert len(results) == 10
    assert all(isinstance(result, OutcomeUnknown | Unavailable) for result in results)
