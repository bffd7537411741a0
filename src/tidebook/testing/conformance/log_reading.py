"""Test cases of a log: reading, truncating, waiting."""

from __future__ import annotations

import asyncio

import pytest

from tidebook.core.errors import LogLost
from tidebook.log.port import Log, RecordPage, read_all
from tidebook.testing.conformance.log_base import (
    CASE_TIMEOUT_S,
    PARTITIONS,
    LogBase,
    OpenLog,
    Sending,
    all_records,
    begin_wait,
    fill,
    outgoing,
)


class LogReadingCases(LogBase):
    """Test cases of reads: records arrive in order, and a lost range raises an error."""

    async def test_a_read_ends_at_stop(self, log: Log, topic: str) -> None:
        offsets = await fill(log, topic, 10)
        batch = await log.read(topic, 0, start=offsets[2], stop=offsets[7])
        assert [r.offset for r in batch.records] == offsets[2:7]
        assert batch.next_offset == offsets[7]

    async def test_an_empty_range_holds_nothing(self, log: Log, topic: str) -> None:
        offsets = await fill(log, topic, 3)
        assert await log.read(topic, 0, start=offsets[1], stop=offsets[1]) == RecordPage((), offsets[1])

    async def test_a_page_has_at_most_limit_records_and_the_next_continues_after_it(self, log: Log, topic: str) -> None:
        offsets = await fill(log, topic, 25)
        start, stop, pages = offsets[0], await log.end(topic, 0), []
        while start < stop:
            batch = await log.read(topic, 0, start=start, stop=stop, limit=10)
            assert 1 <= len(batch.records) <= 10
            assert batch.records[-1].offset < batch.next_offset <= stop
            pages += [r.offset for r in batch.records]
            start = batch.next_offset
        assert pages == offsets

    async def test_a_page_is_bounded_in_bytes_but_holds_at_least_one_record(self, log: Log, topic: str) -> None:
        offsets = await fill(log, topic, 6, size_bytes=1000)
        stop = await log.end(topic, 0)
        bounded = await log.read(topic, 0, start=offsets[0], stop=stop, limit_bytes=2500)
        assert 1 <= len(bounded.records) <= 3
        tiny = await log.read(topic, 0, start=offsets[0], stop=stop, limit_bytes=1)
        assert [r.offset for r in tiny.records] == offsets[:1]

    async def test_a_read_past_the_end_returns_existing_records_without_waiting(self, log: Log, topic: str) -> None:
        offsets = await fill(log, topic, 3)
        end = await log.end(topic, 0)
        batch = await log.read(topic, 0, start=offsets[0], stop=end + 1000)
        assert [r.offset for r in batch.records] == offsets
        assert batch.next_offset == end
        assert await log.read(topic, 0, start=end, stop=end + 1000) == RecordPage((), end)

    async def test_a_read_at_the_end_sees_the_next_append(self, log: Log, open_log: OpenLog, topic: str) -> None:
        async with open_log() as other:
            start = await log.end(topic, 0)
            for i in range(5):
                await other.append(outgoing(topic, b"%d" % i))
                batch = await log.read(topic, 0, start=start, stop=start + 1000)
                assert [r.value for r in batch.records] == [b"%d" % i]
                start = batch.next_offset

    async def test_reads_in_any_order_return_the_same_records(self, log: Log, topic: str) -> None:
        offsets = await fill(log, topic, 9)
        stop = await log.end(topic, 0)
        for start in (*reversed(offsets), offsets[0], offsets[0]):
            records = await read_all(log, topic, 0, start=start, stop=stop)
            assert [r.offset for r in records] == [o for o in offsets if o >= start]

    async def test_concurrent_reads_of_many_ranges_do_not_mix(self, log: Log, topic: str) -> None:
        sending = Sending(log)
        for i in range(900):
            sending.send(outgoing(topic, b"%d" % i, partition=i % PARTITIONS))
        await sending.results()
        reads = await asyncio.gather(*(all_records(log, topic, partition=i % PARTITIONS) for i in range(12)))
        for i, records in enumerate(reads):
            assert [int(r.value or b"") for r in records] == list(range(i % PARTITIONS, 900, PARTITIONS))

    async def test_a_cancelled_read_does_not_affect_others(self, log: Log, topic: str) -> None:
        offsets = await fill(log, topic, 50)
        for _ in range(5):
            reading = asyncio.create_task(all_records(log, topic))
            await asyncio.sleep(0)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        assert [r.offset for r in await all_records(log, topic)] == offsets

    async def test_a_read_by_key_returns_only_the_records_of_that_key(self, log: Log, topic: str) -> None:
        sending = Sending(log)
        for i in range(2500):
            sending.send(outgoing(topic, b"%d" % i, key=b"rare" if i % 500 == 7 else b"key %d" % (i % 7)))
        await sending.results()
        stop = await log.end(topic, 0)
        rare = await read_all(log, topic, 0, start=0, stop=stop, key=b"rare")
        assert [int(r.value or b"") for r in rare] == [7, 507, 1007, 1507, 2007]
        third = await read_all(log, topic, 0, start=0, stop=stop, key=b"key 3")
        assert [int(r.value or b"") for r in third] == [i for i in range(2500) if i % 7 == 3 and i % 500 != 7]
        assert await read_all(log, topic, 0, start=0, stop=stop, key=b"nobody") == []

    async def test_a_read_by_key_is_bounded_by_limit_and_by_stop(self, log: Log, topic: str) -> None:
        for i in range(20):
            await log.append(outgoing(topic, b"%d" % i, key=b"even" if i % 2 == 0 else b"odd"))
        stop = await log.end(topic, 0)
        batch = await log.read(topic, 0, start=0, stop=stop, key=b"even", limit=3)
        assert [r.value for r in batch.records] == [b"0", b"2", b"4"]
        assert batch.records[-1].offset < batch.next_offset < stop
        (last,) = (await read_all(log, topic, 0, start=0, stop=stop, key=b"even"))[-1:]
        before = await read_all(log, topic, 0, start=0, stop=last.offset, key=b"even")
        assert [int(r.value or b"") for r in before] == list(range(0, 18, 2))

    async def test_an_indexed_log_finds_a_key_in_one_call(self, log: Log, topic: str) -> None:
        if not self.indexed_by_key:
            pytest.skip("the log declares no index by key")
        await fill(log, topic, 3000)
        await log.append(outgoing(topic, b"found", key=b"last"))
        stop = await log.end(topic, 0)
        batch = await log.read(topic, 0, start=0, stop=stop, key=b"last", limit=10, limit_bytes=1000)
        assert ([r.value for r in batch.records], batch.next_offset) == ([b"found"], stop)

    async def test_truncate_moves_the_start_and_keeps_later_records(self, log: Log, topic: str) -> None:
        offsets = await fill(log, topic, 10)
        end = await log.end(topic, 0)
        await log.truncate(topic, 0, before=offsets[4])
        assert offsets[3] < await log.start(topic, 0) <= offsets[4]
        assert await log.end(topic, 0) == end
        assert [r.offset for r in await all_records(log, topic)] == offsets[4:]

    async def test_truncating_below_the_start_changes_nothing(self, log: Log, topic: str) -> None:
        offsets = await fill(log, topic, 10)
        await log.truncate(topic, 0, before=offsets[4])
        start = await log.start(topic, 0)
        await log.truncate(topic, 0, before=offsets[2])
        assert await log.start(topic, 0) == start

    async def test_truncating_everything_keeps_the_end(self, log: Log, topic: str) -> None:
        offsets = await fill(log, topic, 5)
        end = await log.end(topic, 0)
        await log.truncate(topic, 0, before=end)
        assert await log.start(topic, 0) == await log.end(topic, 0) == end
        assert (await log.append(outgoing(topic, b"next"))).offset > offsets[-1]

    async def test_reading_below_the_start_reports_the_lost_range(self, log: Log, topic: str) -> None:
        offsets = await fill(log, topic, 10)
        stop = await log.end(topic, 0)
        await log.read(topic, 0, start=offsets[0], stop=stop, limit=2)  # leaves a reader at this offset
        await log.truncate(topic, 0, before=offsets[5])
        for key in (None, b"key"):
            with pytest.raises(LogLost) as caught:
                await log.read(topic, 0, start=offsets[2], stop=stop, key=key)
            lost = caught.value
            assert (lost.topic, lost.partition, lost.first) == (topic, 0, offsets[2])
            assert lost.last == await log.start(topic, 0) - 1

    async def test_a_reader_overtaken_by_truncation_raises_and_never_skips(
        self, log: Log, open_log: OpenLog, topic: str
    ) -> None:
        offsets = await fill(log, topic, 10)
        stop = await log.end(topic, 0)
        async with open_log() as other:
            batch = await other.read(topic, 0, start=offsets[0], stop=stop, limit=2)
            await log.truncate(topic, 0, before=offsets[8])
            lost, rest = None, None
            try:
                rest = await read_all(other, topic, 0, start=batch.next_offset, stop=stop)
            except LogLost as error:
                lost = error
            if lost is not None:
                assert lost.first <= offsets[7] == lost.last
            if rest is not None:  # the records were prefetched
                assert [r.offset for r in (*batch.records, *rest)] == offsets

    async def test_waiting_for_an_existing_record_returns_immediately(self, log: Log, topic: str) -> None:
        sent = await log.append(outgoing(topic, b"x"))
        assert await log.wait(topic, 0, offset=sent.offset, timeout_s=CASE_TIMEOUT_S)
        assert await log.wait(topic, 0, offset=sent.offset)

    async def test_a_wait_ends_at_its_timeout(self, log: Log, topic: str) -> None:
        end = await log.end(topic, 0)
        assert not await log.wait(topic, 0, offset=end, timeout_s=0)
        assert not await log.wait(topic, 0, offset=end, timeout_s=0.05)

    async def test_a_wait_wakes_on_an_append_of_this_instance(self, log: Log, topic: str) -> None:
        waiting = await begin_wait(log, topic)
        await log.append(outgoing(topic, b"news"))
        assert await waiting

    async def test_a_wait_wakes_on_an_append_of_another_instance(self, log: Log, open_log: OpenLog, topic: str) -> None:
        async with open_log() as other:
            for _ in range(10):
                waiting = await begin_wait(log, topic)
                sent = await other.append(outgoing(topic, b"news"))
                assert await waiting
                assert await log.end(topic, 0) > sent.offset

    async def test_a_wait_does_not_wake_for_another_partition(self, log: Log, topic: str) -> None:
        end = await log.end(topic, 0)
        waiting = asyncio.create_task(log.wait(topic, 0, offset=end, timeout_s=0.2))
        await log.append(outgoing(topic, b"elsewhere", partition=1))
        assert not await waiting

    async def test_many_wait_at_once_for_different_offsets(self, log: Log, topic: str) -> None:
        first = await log.end(topic, 0)
        waits = [asyncio.create_task(log.wait(topic, 0, offset=first + i, timeout_s=CASE_TIMEOUT_S)) for i in range(20)]
        while not all(task.done() for task in waits):
            await log.append(outgoing(topic, b"news"))
        assert all(await asyncio.gather(*waits))

    async def test_a_cancelled_wait_does_not_affect_others(self, log: Log, topic: str) -> None:
        cancelled, kept = await begin_wait(log, topic), await begin_wait(log, topic)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        await log.append(outgoing(topic, b"news"))
        assert await kept
