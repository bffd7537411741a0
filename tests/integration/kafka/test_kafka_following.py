"""Readers and followers beside writers: each sees every record once, in order."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.integration.kafka.conftest import OpenKafkaLog
from tidebook.core.errors import NotFound
from tidebook.log.kafka import KafkaLog
from tidebook.log.port import Outgoing, Record

pytestmark = pytest.mark.kafka


async def follow(log: KafkaLog, topic: str, count: int) -> list[int]:
    """Follow a partition as a head cache does: wait for records, ask for the end, read up to it."""
    at = 0
    found: list[int] = []
    async with asyncio.timeout(60):
        while len(found) < count:
            assert await log.wait(topic, 0, offset=at, timeout_s=60)
            end = await log.end(topic, 0)
            while at < end:
                batch = await log.read(topic, 0, start=at, stop=end)
                found += [int(record.value or b"") for record in batch.records]
                at = batch.next_offset
    return found


@pytest.mark.parametrize("tail_bytes_max", [4_000_000, 20_000])
async def test_a_follower_sees_every_record_of_many_writers_in_order(
    kafka_bootstrap: str, open_log: OpenKafkaLog, topic: str, tail_bytes_max: int
) -> None:
    url, count = f"kafka://{kafka_bootstrap}", 6_000
    async with open_log(url, tail_bytes_max=tail_bytes_max) as log, open_log(url) as one, open_log(url) as two:
        await log.create_topic(topic, 1)
        offsets: dict[int, int] = {}

        async def write(writer: KafkaLog, numbers: range) -> None:
            for number in numbers:
                offsets[number] = (await writer.append(Outgoing(topic, 0, b"k", b"%d" % number))).offset

        following = asyncio.create_task(follow(log, topic, count))
        parts = [range(start, count, 40) for start in range(40)]
        await asyncio.gather(*(write((one, two)[i % 2], part) for i, part in enumerate(parts)))
        assert await following == sorted(offsets, key=offsets.__getitem__)
        await log.delete_topic(topic)


async def test_any_slice_read_by_anyone_is_what_the_log_holds(
    kafka_bootstrap: str, open_log: OpenKafkaLog, topic: str
) -> None:
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    async with open_log(f"kafka://{kafka_bootstrap}", consumers_max=3) as log:
        await log.create_topic(topic, 1)
        held: list[Record] = []

        async def write(rounds: int) -> None:
            for _ in range(rounds):
                size = chance.choice([0, 10, 100, 5_000])
                keys = [chance.choice([b"a", b"b", None]) for _ in range(40)]
                sent = await asyncio.gather(*(log.append(Outgoing(topic, 0, key, b"x" * size)) for key in keys))
                held.extend(
                    Record(s.offset, s.timestamp_ms, key, b"x" * size) for s, key in zip(sent, keys, strict=True)
                )

        async def read() -> None:
            for _ in range(40):
                end = len(held)
                start = chance.randint(0, end)
                stop = chance.randint(start, end)
                key = chance.choice([None, b"a", b"b", b"nobody"])
                limit, limit_bytes = chance.choice([1, 7, 1000]), chance.choice([1, 6_000, 4_000_000])
                at = start
                found: list[Record] = []
                while at < stop:
                    batch = await log.read(topic, 0, start=at, stop=stop, key=key, limit=limit, limit_bytes=limit_bytes)
                    assert len(batch.records) <= limit
                    assert at < batch.next_offset <= stop
                    found += batch.records
                    at = batch.next_offset
                    if chance.random() < 0.1:
                        break
                wanted = [r for r in held[start:at] if key is None or r.key == key]
                assert found == wanted, f"seed {seed}"

        async def follow_on() -> None:
            for _ in range(60):
                await log.wait(topic, 0, offset=len(held), timeout_s=0.05)

        await write(10)
        await asyncio.gather(write(20), *(read() for _ in range(6)), follow_on())
        await log.delete_topic(topic)


async def test_a_wait_for_a_topic_that_somebody_deletes_is_not_found(
    kafka_bootstrap: str, open_log: OpenKafkaLog, topic: str
) -> None:
    url = f"kafka://{kafka_bootstrap}"
    async with open_log(url) as log, open_log(url) as other:
        await log.create_topic(topic, 1)
        assert not await log.wait(topic, 0, offset=0, timeout_s=0.2)
        waiting = asyncio.create_task(log.wait(topic, 0, offset=0, timeout_s=60))
        await asyncio.sleep(0)
        await other.delete_topic(topic)
        with pytest.raises(NotFound):
            await waiting
        with pytest.raises(NotFound):
            await log.append(Outgoing(topic, 0, b"k", b"v"))
