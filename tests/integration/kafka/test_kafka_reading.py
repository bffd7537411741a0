"""Reads from Kafka: catching up, gaps in the offsets, the consumer pool, the cached tail, and lost records."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest
from confluent_kafka import Producer

from tests.integration.kafka.conftest import OpenKafkaLog, kafka_clients
from tidebook.core.errors import LogLost, TidebookError, Unavailable
from tidebook.log.kafka import KafkaLog
from tidebook.log.kafka.consumer_pool import LogSlice, SliceReader
from tidebook.log.port import Acknowledged, Outgoing, Record, read_all, read_page
from tidebook.runtime.metrics import Metrics

pytestmark = pytest.mark.kafka

#: Otherwise the idle sweep would close a consumer in the middle of a slow test.
KEEP = {"consumer_idle_ms": 600_000}


async def send_all(log: KafkaLog, topic: str, count: int) -> list[int]:
    """Send numbers to partition 0, and return their offsets."""
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    offsets: list[int] = []

    def on_sent(result: Acknowledged | TidebookError) -> None:
        assert isinstance(result, Acknowledged), result
        offsets.append(result.offset)
        if len(offsets) == count:
            done.set_result(None)

    for number in range(count):
        log.send(Outgoing(topic, 0, b"key %d" % (number % 100), b"%d" % number), on_sent)
    await done
    return offsets


async def test_a_reader_catches_up_over_100_000_records(
    kafka_bootstrap: str, open_log: OpenKafkaLog, topic: str, metrics: Metrics
) -> None:
    async with open_log(f"kafka://{kafka_bootstrap}", **KEEP) as log:
        await log.create_topic(topic, 1)
        offsets = await send_all(log, topic, 100_000)
        end = await log.end(topic, 0)
        at, found = 0, 0
        while at < end:
            batch = await log.read(topic, 0, start=at, stop=end)
            assert [r.offset for r in batch.records] == offsets[found : found + len(batch.records)]
            found += len(batch.records)
            at = batch.next_offset
        assert found == 100_000
        assert metrics.counted("kafka_consumer_opened") == 1
        # The next page continues with the same consumer at its position.
        costs = [metrics.timing(f"kafka_consumer_{cost}") for cost in ("init", "seek", "poll")]
        assert [cost.count for cost in costs[:2]] == [1, 1]
        assert costs[2].count >= 1  # at least the first page has to be waited for
        assert all(cost.total_s > 0 for cost in costs)
        by_key = await read_all(log, topic, 0, start=0, stop=end, key=b"key 7")
        assert [int(r.value or b"") for r in by_key] == list(range(7, 100_000, 100))
        await log.delete_topic(topic)


async def test_holes_that_transactions_leave_are_skipped(
    kafka_bootstrap: str, open_log: OpenKafkaLog, topic: str
) -> None:
    async with open_log(f"kafka://{kafka_bootstrap}") as log:
        await log.create_topic(topic, 1)
        producer = Producer({"bootstrap.servers": kafka_bootstrap, "transactional.id": topic})
        producer.init_transactions(30)
        for number in range(4):
            producer.begin_transaction()
            producer.produce(topic, b"%d" % number, partition=0)
            producer.commit_transaction(30)
        end = await log.end(topic, 0)
        assert end == 8  # each commit takes a separate offset
        records = await read_all(log, topic, 0, start=0, stop=end)
        assert [(r.offset, r.value) for r in records] == [(0, b"0"), (2, b"1"), (4, b"2"), (6, b"3")]
        for start in range(8):
            rest = await read_all(log, topic, 0, start=start, stop=end)
            assert [r.offset for r in rest] == [o for o in (0, 2, 4, 6) if o >= start]
        assert await log.wait(topic, 0, offset=7, timeout_s=0)
        await log.delete_topic(topic)


async def test_many_readers_share_a_bounded_number_of_consumers(
    kafka_bootstrap: str, open_log: OpenKafkaLog, topic: str, metrics: Metrics
) -> None:
    async with open_log(f"kafka://{kafka_bootstrap}", consumers_max=3, **KEEP) as log:
        await log.create_topic(topic, 4)
        for partition in range(4):
            for number in range(5):
                await log.append(Outgoing(topic, partition, b"k", b"%d" % number))
        for _ in range(3):
            reads = await asyncio.gather(*(read_all(log, topic, i % 4, start=0, stop=5) for i in range(20)))
            assert all([r.value for r in each] == [b"0", b"1", b"2", b"3", b"4"] for each in reads)
        assert metrics.counted("kafka_consumer_opened") <= 3
        await log.delete_topic(topic)
    assert metrics.counted("kafka_consumer_closed") == metrics.counted("kafka_consumer_opened")


async def test_closing_leaves_no_thread(kafka_bootstrap: str, open_log: OpenKafkaLog, topic: str) -> None:
    for _ in range(3):
        async with open_log(f"kafka://{kafka_bootstrap}") as log:
            await log.create_topic(topic, 1)
            sent = await log.append(Outgoing(topic, 0, b"k", b"v"))
            await log.read(topic, 0, start=0, stop=sent.offset + 1)
            await log.wait(topic, 0, offset=sent.offset + 1, timeout_s=0.01)
            await log.delete_topic(topic)
    assert [t.name for t in threading.enumerate() if t.name.startswith("tidebook-kafka")] == []


async def test_closing_ends_every_client_without_waiting_for_garbage_collection(
    kafka_bootstrap: str, open_log: OpenKafkaLog, topic: str
) -> None:
    """A consumer that is not closed keeps connecting to its brokers, and logs errors when they are gone."""
    before = kafka_clients()
    gc.disable()
    try:
        async with open_log(f"kafka://{kafka_bootstrap}") as log:
            await log.create_topic(topic, 1)
            sent = await log.append(Outgoing(topic, 0, b"k", b"v"))
            await log.read(topic, 0, start=0, stop=sent.offset + 1)
            await log.wait(topic, 0, offset=sent.offset + 1, timeout_s=0.01)
            await log.delete_topic(topic)
            assert kafka_clients() > before
        assert kafka_clients() == before
    finally:
        gc.enable()


async def test_an_idle_consumer_is_closed(
    kafka_bootstrap: str, open_log: OpenKafkaLog, topic: str, metrics: Metrics
) -> None:
    async with open_log(f"kafka://{kafka_bootstrap}", consumer_idle_ms=100) as log:
        await log.create_topic(topic, 1)
        await log.append(Outgoing(topic, 0, b"k", b"v"))
        await log.read(topic, 0, start=0, stop=1)
        async with asyncio.timeout(30):
            while metrics.counted("kafka_consumer_closed") < 1:  # noqa: ASYNC110 - the sweep reports to nothing else
                await asyncio.sleep(0.05)
        assert [r.value for r in (await log.read(topic, 0, start=0, stop=1)).records] == [b"v"]
        await log.delete_topic(topic)


async def test_a_followed_partition_is_read_from_memory(
    kafka_bootstrap: str, open_log: OpenKafkaLog, topic: str, metrics: Metrics
) -> None:
    async with open_log(f"kafka://{kafka_bootstrap}") as log, open_log(f"kafka://{kafka_bootstrap}") as writer:
        await log.create_topic(topic, 1)
        at = await log.end(topic, 0)
        for number in range(20):
            waiting = asyncio.create_task(log.wait(topic, 0, offset=at, timeout_s=60))
            await writer.append(Outgoing(topic, 0, b"k", b"%d" % number))
            assert await waiting
            batch = await log.read(topic, 0, start=at, stop=at + 1)
            assert [r.value for r in batch.records] == [b"%d" % number]
            at = batch.next_offset
        assert metrics.counted("kafka_consumer_opened", kind="tail") == 1
        assert metrics.counted("kafka_consumer_opened", kind="read") <= 1
        assert metrics.counted("kafka_tail_read") >= 19
        await log.delete_topic(topic)


async def test_a_tail_that_is_too_long_for_memory_is_read_through_the_pool(
    kafka_bootstrap: str, open_log: OpenKafkaLog, topic: str
) -> None:
    async with open_log(f"kafka://{kafka_bootstrap}", tail_bytes_max=10_000) as log:
        await log.create_topic(topic, 1)
        assert not await log.wait(topic, 0, offset=0, timeout_s=0.01)  # followed from here on
        await send_all(log, topic, 5_000)
        assert await log.wait(topic, 0, offset=4_999, timeout_s=60)
        records = await read_all(log, topic, 0, start=0, stop=5_000)
        assert [int(r.value or b"") for r in records] == list(range(5_000))
        assert [int(r.value or b"") for r in await last_of(log, topic, 10)] == list(range(4_990, 5_000))
        await log.delete_topic(topic)


async def last_of(log: KafkaLog, topic: str, count: int) -> list[Record]:
    end = await log.end(topic, 0)
    return list(await read_all(log, topic, 0, start=end - count, stop=end))


async def test_waits_work_in_the_next_incarnation_of_a_topic(
    kafka_bootstrap: str, open_log: OpenKafkaLog, topic: str
) -> None:
    async with open_log(f"kafka://{kafka_bootstrap}") as log:
        await log.create_topic(topic, 1)
        for _ in range(3):
            await log.append(Outgoing(topic, 0, b"k", b"first incarnation"))
        assert not await log.wait(topic, 0, offset=3, timeout_s=0.05)
        await log.delete_topic(topic)
        await log.create_topic(topic, 1)
        waiting = asyncio.create_task(log.wait(topic, 0, offset=0, timeout_s=60))
        await log.append(Outgoing(topic, 0, b"k", b"second incarnation"))
        assert await waiting
        assert [r.value for r in (await log.read(topic, 0, start=0, stop=1)).records] == [b"second incarnation"]
        await log.delete_topic(topic)


async def test_a_read_after_the_end_of_a_shorter_incarnation_reports_the_loss(
    kafka_bootstrap: str, open_log: OpenKafkaLog, topic: str
) -> None:
    async with open_log(f"kafka://{kafka_bootstrap}") as log, open_log(f"kafka://{kafka_bootstrap}") as other:
        await log.create_topic(topic, 1)
        for _ in range(5):
            await log.append(Outgoing(topic, 0, b"k", b"first incarnation"))
        assert await log.end(topic, 0) == 5
        await other.delete_topic(topic)
        await other.create_topic(topic, 1)
        await other.append(Outgoing(topic, 0, b"k", b"second incarnation"))
        assert await log.end(topic, 0) == 1
        with pytest.raises(LogLost) as caught:
            await log.read(topic, 0, start=5, stop=6)
        assert (caught.value.first, caught.value.last) == (1, 4)
        await other.delete_topic(topic)


async def test_an_out_of_range_event_of_an_earlier_position_does_not_affect_the_current_one(
    kafka_bootstrap: str, open_log: OpenKafkaLog, topic: str, metrics: Metrics
) -> None:
    """The client queues an out-of-range event for a position, and the consumer then moves to another one."""
    async with open_log(f"kafka://{kafka_bootstrap}") as log:
        await log.create_topic(topic, 1)
        await send_all(log, topic, 20)
        await log.truncate(topic, 0, before=15)
        reader = SliceReader(log.settings, metrics)
        wanted = LogSlice(topic, 0, 15, 20, None, 100, 1_000_000)
        tries = 0
        while not metrics.counted("kafka_consumer_reassigned"):
            tries += 1
            assert tries <= 100, "the client sent no such event"
            reader._assign(LogSlice(topic, 0, 0, 20, None, 100, 1_000_000), 0)
            await asyncio.sleep(0.01 * tries)  # the broker's answer must arrive before the consumer is moved
            batch = await asyncio.to_thread(reader.read, wanted)
            assert [record.offset for record in batch.records] == list(range(15, 20))
        await asyncio.to_thread(reader.close)
        await log.delete_topic(topic)


async def test_a_log_that_became_shorter_than_an_end_seen_before_is_a_loss_and_not_an_empty_page(
    kafka_bootstrap: str, open_log: OpenKafkaLog, topic: str
) -> None:
    async with open_log(f"kafka://{kafka_bootstrap}") as log, open_log(f"kafka://{kafka_bootstrap}") as other:
        await log.create_topic(topic, 1)
        await send_all(log, topic, 5)
        assert await log.end(topic, 0) == 5
        await other.delete_topic(topic)
        await other.create_topic(topic, 1)
        await send_all(other, topic, 2)
        with pytest.raises(LogLost) as caught:
            await read_all(log, topic, 0, start=0, stop=5)
        assert (caught.value.first, caught.value.last) == (2, 4)
        await other.delete_topic(topic)


async def test_an_end_below_one_that_was_seen_before_is_no_loss_while_the_topic_is_the_same(
    kafka_bootstrap: str, open_log: OpenKafkaLog, topic: str
) -> None:
    """A leader that is cut off, or was elected just now, may report an earlier end for some time."""
    async with open_log(f"kafka://{kafka_bootstrap}") as log:
        await log.create_topic(topic, 1)
        await send_all(log, topic, 5)
        for start, held in ((5, 7), (6, 5)):
            log._ends[topic, 0] = 8
            with pytest.raises(Unavailable, match=f"the log ends at 5, but it contained offset {held} before"):
                await read_page(log, topic, 0, start=start, stop=8)
            log._ends.clear()
        with pytest.raises(Unavailable, match="the log ends at 5, but it contained offset 7 before"):
            await read_page(log, topic, 0, start=5, stop=8)
        await send_all(log, topic, 3)
        assert len(await read_all(log, topic, 0, start=5, stop=8)) == 3
        await log.delete_topic(topic)
