"""A region while its Kafka broker, a separate server, is killed or frozen."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.integration.wal.base import contents, make_wal, state_of
from tidebook.core.errors import OutcomeUnknown, Unavailable
from tidebook.log.kafka import KafkaLog, KafkaSettings
from tidebook.runtime.metrics import Metrics
from tidebook.testing.servers.kafka import Kafka

pytestmark = pytest.mark.kafka


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kafka]:
    server = Kafka(tmp_path_factory.mktemp("kafka") / "kafka")
    with server:
        yield server
    server.kill9()


@asynccontextmanager
async def opened(kafka: Kafka, **settings: object) -> AsyncIterator[KafkaLog]:
    log = KafkaLog(KafkaSettings.read(kafka.url, settings), metrics=Metrics())
    try:
        yield log
    finally:
        await log.close()


async def test_rule_40_a_truncation_lost_by_a_killed_broker_restores_no_entries(kafka: Kafka, tmp_path: Path) -> None:
    async with opened(kafka) as log:
        region = await make_wal(log, "cut").open_region(7, create=True)
        for n in range(900):
            await region.write(1, [b"%d" % n])
        await region.mark_deleted(1, 901)
        await region.clean()
        await region.write(1, [b"kept"])
        before = state_of(region.meta)
        start = await log.start("wal.cut.7.data", 0)
        assert start > 900
    await asyncio.to_thread(kafka.kill9)
    await asyncio.to_thread(kafka.start)
    async with opened(kafka) as log:
        print(f"the log began at {start}, and after the kill at {await log.start('wal.cut.7.data', 0)}")
        again = await make_wal(log, "cut").open_region(7)
        assert await contents(again) == {1: [(901, b"kept")]}
        assert state_of(again.meta) == before
        await again.clean()
        assert await log.start("wal.cut.7.data", 0) >= start


async def test_writes_to_a_frozen_broker_are_written_once_or_reported_as_unknown(kafka: Kafka) -> None:
    reported: dict[int, bytes] = {}
    unknown: set[bytes] = set()
    async with opened(kafka, send_timeout_ms=1000, request_timeout_ms=3000) as log:
        wal = make_wal(log, "frozen")
        region = await wal.open_region(7, create=True)

        async def write(writer: int) -> None:
            for n in range(20):
                payload = b"%d-%d" % (writer, n)
                try:
                    reported[(await region.write(1, [payload])).first] = payload
                except (OutcomeUnknown, Unavailable):
                    unknown.add(payload)

        writing = asyncio.gather(*map(write, range(8)))
        await region.write(2, [b"under way"])
        kafka.pause()
        try:
            await asyncio.sleep(2.5)  # longer than the send timeout: the duration is the fault itself
        finally:
            kafka.resume()
        await writing
        await region.write(1, [b"last"])
        held = dict((await contents(region))[1])
        again = await make_wal(log, "frozen").open_region(7)
        assert dict((await contents(again))[1]) == held
    assert {seq: held[seq] for seq in reported} == reported
    extra = [payload for seq, payload in held.items() if seq not in reported and payload != b"last"]
    assert set(extra) <= unknown
    assert len(extra) == len(set(extra))
    assert sorted(held) == list(range(1, len(held) + 1))
