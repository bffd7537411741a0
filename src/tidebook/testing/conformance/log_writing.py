"""Test cases of a log: appending, sizes, durability."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tidebook.core.errors import NotFound, TooLarge
from tidebook.log.port import Acknowledged, Log, Outgoing, Record, RecordColumns
from tidebook.testing.conformance.log_base import (
    PARTITIONS,
    LogBase,
    OpenLog,
    Sending,
    all_records,
    new_topic,
    outgoing,
)


class WritingCases(LogBase):
    """Test cases of writes: each record is stored once and in order, or its sender gets an error."""

    async def test_an_empty_partition_starts_and_ends_at_the_same_offset(self, log: Log, topic: str) -> None:
        assert await log.start(topic, 0) == await log.end(topic, 0)

    async def test_offsets_grow_and_the_end_is_after_them(self, log: Log, topic: str) -> None:
        offsets = [(await log.append(outgoing(topic, b"%d" % i))).offset for i in range(5)]
        assert offsets == sorted(set(offsets))
        assert await log.start(topic, 0) <= offsets[0]
        assert await log.end(topic, 0) > offsets[-1]

    async def test_an_acknowledged_record_is_below_the_end_that_another_instance_sees(
        self, log: Log, open_log: OpenLog, topic: str
    ) -> None:
        async with open_log() as other:
            for i in range(5):
                sent = await log.append(outgoing(topic, b"%d" % i))
                assert await other.end(topic, 0) > sent.offset

    async def test_a_record_is_read_as_it_was_sent(self, log: Log, topic: str) -> None:
        headers = (("a", b"1"), ("b", b""), ("a", b"\x00\xff"))
        sent = await log.append(Outgoing(topic, 1, "kéy".encode(), b"\x00value\xff", headers))
        (record,) = await all_records(log, topic, partition=1)
        assert record == Record(sent.offset, sent.timestamp_ms, "kéy".encode(), b"\x00value\xff", headers)
        assert sent.partition == 1
        assert sent.timestamp_ms > 1_600_000_000_000

    async def test_a_missing_key_and_an_empty_one_are_distinct(self, log: Log, topic: str) -> None:
        await log.append(Outgoing(topic, 0, None, b"none"))
        await log.append(Outgoing(topic, 0, b"", b"empty"))
        await log.append(Outgoing(topic, 0, b"k", b""))
        records = await all_records(log, topic)
        assert [(r.key, r.value, r.headers) for r in records] == [
            (None, b"none", ()),
            (b"", b"empty", ()),
            (b"k", b"", ()),
        ]

    async def test_partitions_are_separate(self, log: Log, topic: str) -> None:
        await log.append(outgoing(topic, b"in 0"))
        await log.append(outgoing(topic, b"in 2", partition=2))
        assert [[r.value for r in await all_records(log, topic, partition=p)] for p in range(3)] == [
            [b"in 0"],
            [],
            [b"in 2"],
        ]

    async def test_records_sent_without_waiting_keep_their_order(self, log: Log, topic: str) -> None:
        sending = Sending(log)
        for i in range(300):
            sending.send(outgoing(topic, b"%d" % i, partition=i % PARTITIONS))
        await sending.results()
        for partition in range(PARTITIONS):
            values = [int(r.value or b"") for r in await all_records(log, topic, partition=partition)]
            assert values == list(range(partition, 300, PARTITIONS))

    async def test_records_of_one_batch_keep_their_order_and_their_own_results(self, log: Log, topic: str) -> None:
        sending = Sending(log)
        sending.send_many(RecordColumns(topic, [], [], []))
        sending.send(outgoing(topic, b"0"))
        numbers = range(1, 2500)
        partitions, keys = [number % PARTITIONS for number in numbers], [b"key"] * len(numbers)
        sending.send_many(RecordColumns(topic, partitions, keys, [b"%d" % number for number in numbers]))
        sending.send(outgoing(topic, b"2500", partition=2500 % PARTITIONS))
        results = dict(zip(sending.order, await sending.results(), strict=True))
        for partition in range(PARTITIONS):
            records = await all_records(log, topic, partition=partition)
            values = [int(record.value or b"") for record in records]
            assert values == list(range(partition, 2501, PARTITIONS))
            for number, record in zip(values, records, strict=True):
                assert results[number] == Acknowledged(partition, record.offset, record.timestamp_ms)

    async def test_a_refused_record_of_a_batch_does_not_affect_the_others(self, log: Log, topic: str) -> None:
        sending = Sending(log)
        sending.send_many(RecordColumns(topic, [0, PARTITIONS, 0], [b"key"] * 3, [b"a", b"b", b"c"]))
        sending.send_many(RecordColumns(new_topic(), [0], [b"key"], [b"d"]))
        results = dict(zip(sending.order, await sending.results(), strict=True))
        assert [type(results[place]) for place in range(4)] == [Acknowledged, NotFound, Acknowledged, NotFound]
        assert [record.value for record in await all_records(log, topic)] == [b"a", b"c"]

    async def test_callbacks_are_called_in_offset_order_in_the_loop_s_thread(self, log: Log, topic: str) -> None:
        sending = Sending(log)
        for i in range(600):
            sending.send(outgoing(topic, b"%d" % i, partition=i % PARTITIONS))
            if i % 100 == 0:
                await asyncio.sleep(0)
        results = await sending.results()
        assert sending.threads == {threading.get_ident()}
        for partition in range(PARTITIONS):
            sent = [
                (r.offset, n)
                for n, r in zip(sending.order, results, strict=True)
                if isinstance(r, Acknowledged) and r.partition == partition
            ]
            assert len(sent) == 200
            assert sent == sorted(sent)

    async def test_the_callback_is_never_called_within_send(self, log: Log, topic: str) -> None:
        sending = Sending(log)
        sending.send(outgoing(topic, b"x"))
        sending.send(outgoing(new_topic(), b"x"))
        assert sending.order == []
        await sending.results()

    async def test_a_thousand_concurrent_appends_are_there_once_each(
        self, log: Log, open_log: OpenLog, topic: str
    ) -> None:
        async with open_log() as other:
            sent = await asyncio.gather(
                *(
                    logs.append(outgoing(topic, b"%d" % i, partition=i % PARTITIONS))
                    for i, logs in enumerate([log, other] * 500)
                )
            )
        found = {}
        for partition in range(PARTITIONS):
            for record in await all_records(log, topic, partition=partition):
                found[int(record.value or b"")] = (partition, record.offset)
        assert found == {i: (s.partition, s.offset) for i, s in enumerate(sent)}

    async def test_a_failed_record_does_not_affect_its_neighbours(self, log: Log) -> None:
        name = new_topic()
        await log.create_topic(name, 1, limit_bytes=10_000)
        sending = Sending(log)
        for i in range(20):
            sending.send(outgoing(name, b"x" * (20_000 if i == 7 else 10)))
        results = await sending.results()
        by_number = dict(zip(sending.order, results, strict=True))
        assert [n for n, r in sorted(by_number.items()) if not isinstance(r, Acknowledged)] == [7]
        assert len(await all_records(log, name)) == 19
        await log.delete_topic(name)

    async def test_a_record_over_the_topic_s_limit_is_too_large(self, log: Log, open_log: OpenLog) -> None:
        name = new_topic()
        await log.create_topic(name, 1, limit_bytes=10_000)
        async with open_log() as other:
            for each in (log, other):
                await each.append(outgoing(name, b"x" * 10_000))
                with pytest.raises(TooLarge) as caught:
                    await each.append(outgoing(name, b"x" * 10_001))
                assert caught.value.limit_bytes == 10_000
                assert caught.value.size_bytes > 10_000
        assert len(await all_records(log, name)) == 2
        await log.delete_topic(name)

    async def test_many_records_near_the_limit_can_be_sent_at_once(self, log: Log) -> None:
        name = new_topic()
        await log.create_topic(name, 1, limit_bytes=10_000)
        await asyncio.gather(*(log.append(outgoing(name, b"x" * 9_000, key=b"k" * 1000)) for _ in range(50)))
        assert len(await all_records(log, name)) == 50
        await log.delete_topic(name)

    async def test_a_topic_may_allow_records_of_several_megabytes(self, log: Log) -> None:
        name = new_topic()
        await log.create_topic(name, 1, limit_bytes=3_000_000)
        value = b"x" * 3_000_000
        await log.append(outgoing(name, value))
        await log.append(outgoing(name, b"after"))
        assert [r.value == value for r in await all_records(log, name)] == [True, False]
        await log.delete_topic(name)

    async def test_appended_records_are_there_after_closing_and_opening(self, open_log: OpenLog) -> None:
        name = new_topic()
        async with open_log() as log:
            state = await log.create_topic(name, PARTITIONS, keep_forever=True)
            sent = [await log.append(outgoing(name, b"%d" % i)) for i in range(3)]
        async with open_log() as log:
            assert await log.topic(name) == state
            assert [r.offset for r in await all_records(log, name)] == [s.offset for s in sent]
            later = await log.append(outgoing(name, b"later"))
            assert later.offset > sent[-1].offset
            await log.delete_topic(name)

    async def test_close_waits_for_records_in_flight(self, open_log: OpenLog) -> None:
        name = new_topic()
        async with open_log() as log:
            await log.create_topic(name, 1)
            sending = Sending(log)
            for i in range(500):
                sending.send(outgoing(name, b"%d" % i))
        assert len(sending.done) == 500
        assert all(isinstance(result, Acknowledged) for result in sending.done)
        async with open_log() as log:
            assert len(await all_records(log, name)) == 500
            await log.delete_topic(name)

    async def test_closing_twice_is_allowed(self, open_log: OpenLog) -> None:
        async with open_log() as log:
            await log.close()
