"""The behaviour of a region, tested on every log."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from tests.integration.wal.base import RegionBase, contents, entries, held_records, make_wal, state_of
from tests.integration.wal.overtaken_cases import OvertakenCases
from tidebook.core.errors import Corrupt, Fenced, InvalidInput, LogLost, NotFound, TooLarge, Truncated
from tidebook.log.port import Log, Outgoing
from tidebook.wal.meta import Pinned
from tidebook.wal.record import WalEntry
from tidebook.wal.region import Region
from tidebook.wal.wal import Wal


class WritingCases(RegionBase):
    async def test_a_write_returns_its_numbers_and_its_offset(self, region: Region) -> None:
        first = await region.write(table=1, payloads=[b"a", b"b"])
        second = await region.write(table=1, payloads=[b"c"])
        assert (first.first, first.last) == (1, 2)
        assert (second.first, second.last) == (3, 3)
        assert second.offset > first.offset
        table = region.meta.tables[1]
        assert table.next_seq_num == 4
        assert table.current_high_watermark == second.offset + 1
        assert dict(table.mapping) == {1: first.offset, 2: first.offset, 3: second.offset}

    async def test_payloads_are_read_with_the_type_that_was_written(self, region: Region) -> None:
        payloads: list[Any] = [b"bytes", "text", {"json": [1, None]}, b""]
        await region.write(1, payloads)
        assert [payload for _, _, payload in await entries(region.read())] == payloads

    async def test_many_tables_in_one_call_are_one_record_in_order(self, region: Region) -> None:
        written = await region.write_many([(1, [b"a"]), (2, [b"b", b"c"]), (1, [b"d"])])
        assert [(w.first, w.last) for w in written] == [(1, 1), (1, 2), (2, 2)]
        assert len({w.offset for w in written}) == 1
        assert [w.first for w in await region.write_many({1: [b"e"], 3: [b"f"]})] == [3, 1]
        assert (await entries(region.read()))[:4] == [(1, 1, b"a"), (2, 1, b"b"), (2, 2, b"c"), (1, 2, b"d")]

    async def test_calls_that_share_a_record_keep_their_order(self, region: Region) -> None:
        written = await asyncio.gather(
            region.write(1, [b"a"]),
            region.write_many([(1, [b"b"]), (2, [b"c"])]),
            region.write(1, [b"d"]),
            region.write(2, [b"e", "text"]),
            region.write_many({2: [b"f"]}),
            region.write(1, [b"g"]),
        )
        assert len({each.offset for w in written for each in (w if isinstance(w, list) else [w])}) == 1
        assert await entries(region.read()) == [
            (1, 1, b"a"),
            (1, 2, b"b"),
            (2, 1, b"c"),
            (1, 3, b"d"),
            (2, 2, b"e"),
            (2, 3, "text"),
            (2, 4, b"f"),
            (1, 4, b"g"),
        ]
        firsts = [[each.first for each in w] if isinstance(w, list) else w.first for w in written]
        assert firsts == [1, [2, 1], 3, 2, [4], 4]

    async def test_concurrent_writes_share_records(self, region: Region) -> None:
        written = await asyncio.gather(*(region.write(n % 4, [b"x" * 10]) for n in range(100)))
        assert len({w.offset for w in written}) < 20
        assert {t: meta.next_seq_num for t, meta in region.meta.tables.items()} == dict.fromkeys(range(4), 26)

    async def test_numbers_of_a_table_have_no_gaps_with_concurrent_writers(self, region: Region) -> None:
        async def one(writer: int) -> list[tuple[int, int]]:
            return [((w := await region.write(1, [b"x"] * (1 + writer % 3))).first, w.last) for _ in range(10)]

        ranges = sorted(pair for pairs in await asyncio.gather(*map(one, range(8))) for pair in pairs)
        assert ranges[0][0] == 1
        assert all(later[0] == earlier[1] + 1 for earlier, later in pairwise(ranges))

    async def test_a_cancelled_write_leaves_no_gap(self, region: Region) -> None:
        doomed = asyncio.create_task(region.write(1, [b"doomed"]))
        await asyncio.sleep(0)
        doomed.cancel()
        await asyncio.gather(doomed, return_exceptions=True)
        written = await region.write(1, [b"kept"])
        assert [seq for _, seq, _ in await entries(region.read_table(1))] == list(range(1, written.last + 1))

    async def test_a_second_open_returns_the_same_region(self, wal: Wal, region: Region) -> None:
        assert await wal.open_region(7) is region

    async def test_regions_of_a_namespace_are_listed(self, wal: Wal, region: Region) -> None:
        await wal.open_region(3, create=True)
        assert await wal.regions() == [3, 7]


class BadInputCases(RegionBase):
    async def test_an_unknown_region_without_create_is_not_found(self, wal: Wal) -> None:
        with pytest.raises(NotFound, match="create=True"):
            await wal.open_region(99)

    @pytest.mark.parametrize("bad", [-1, 1.5, "7", True, 2**53])
    async def test_a_region_id_is_an_integer(self, wal: Wal, bad: Any) -> None:
        with pytest.raises(InvalidInput):
            await wal.open_region(bad)

    async def test_a_flush_callback_must_be_callable(self, wal: Wal) -> None:
        with pytest.raises(InvalidInput, match="on_pinned"):
            await wal.open_region(7, create=True, on_pinned=5)  # type: ignore[arg-type]

    async def test_a_write_over_the_limit_names_the_limit_and_writes_nothing(self, wal: Wal, region: Region) -> None:
        with pytest.raises(TooLarge, match="1,000,000") as raised:
            await region.write(1, [b"x" * 600_000, b"y" * 600_000])
        assert raised.value.limit_bytes == 1_000_000
        assert region.meta.tables == {}
        assert (await region.write(1, [b"x"])).first == 1

    async def test_the_largest_write_within_the_limit_is_accepted(self, region: Region) -> None:
        with pytest.raises(TooLarge) as raised:
            await region.write(1, [b"x" * 1_000_000])
        most = 1_000_000 - (raised.value.size_bytes - 1_000_000)
        await region.write(1, [b"x" * most])
        assert len((await entries(region.read()))[0][2]) == most

    @pytest.mark.parametrize("payloads", [[], b"one", "text", [object()], None, 5, {"n": 1}, {b"a"}])
    async def test_invalid_payloads_are_rejected(self, region: Region, payloads: Any) -> None:
        with pytest.raises(InvalidInput):
            await region.write(1, payloads)

    @pytest.mark.parametrize(
        "writes", [[], {}, None, 5, "ab", [5], [(1,)], ["ab"], [(1, None)], [("1", [b"x"])], {1: 5}]
    )
    async def test_invalid_writes_are_rejected(self, region: Region, writes: Any) -> None:
        with pytest.raises(InvalidInput):
            await region.write_many(writes)
        assert region.meta.tables == {}

    @pytest.mark.parametrize("bad", ["x", None, -1, 1.5, True])
    async def test_the_start_of_a_read_is_an_integer(self, region: Region, bad: Any) -> None:
        await region.write(1, [b"a"])
        for reading in (region.read(from_offset=bad), region.read_table(1, start=bad), region.read_table(bad)):
            with pytest.raises(InvalidInput):
                await anext(reading)

    @pytest.mark.parametrize("handlers", [None, 5, [1], {1: None}, {"1": print}])
    async def test_invalid_handlers_are_rejected(self, region: Region, handlers: Any) -> None:
        with pytest.raises(InvalidInput):
            await region.replay(handlers)
        for bad in ({"other": 5}, {"progress": 5}):
            with pytest.raises(InvalidInput, match=next(iter(bad))):
                await region.replay({}, **bad)  # type: ignore[arg-type]

    async def test_a_mark_beyond_the_last_entry_is_refused(self, region: Region) -> None:
        await region.write(1, [b"a", b"b"])
        with pytest.raises(InvalidInput, match="mark up to 3"):
            await region.mark_deleted(1, 4)

    async def test_a_mark_below_the_current_one_is_refused(self, region: Region) -> None:
        await region.write(1, [b"a", b"b"])
        await region.mark_deleted(1, 3)
        with pytest.raises(InvalidInput, match="a mark must be at least"):
            await region.mark_deleted(1, 2)
        await region.mark_deleted(1, 3)

    async def test_a_mark_or_drop_of_an_unknown_table_is_not_found(self, region: Region) -> None:
        with pytest.raises(NotFound):
            await region.mark_deleted(5, 1)
        with pytest.raises(NotFound):
            await region.drop_table(5)

    async def test_a_region_opened_for_reading_refuses_writes(self, wal: Wal, region: Region) -> None:
        reader = await wal.open_region(7, writable=False)
        with pytest.raises(InvalidInput, match="writable=False"):
            await reader.write(1, [b"x"])

    async def test_foreign_bytes_in_the_data_topic_are_skipped(
        self, log: Log, other: Wal, region: Region, namespace: str
    ) -> None:
        await region.write(1, [b"a"])
        await log.append(Outgoing(f"wal.{namespace}.7.data", 0, None, b"not of Tidebook"))
        await region.write(1, [b"b"])
        again = await other.open_region(7)
        assert await contents(again) == {1: [(1, b"a"), (2, b"b")]}


class ReadingCases(RegionBase):
    async def test_a_region_reads_all_tables_in_the_order_of_the_log(self, region: Region) -> None:
        for n in range(30):
            await region.write(n % 3, [b"%d" % n])
        assert [payload for _, _, payload in await entries(region.read())] == [b"%d" % n for n in range(30)]

    async def test_one_table_is_read_from_a_given_number_on(self, region: Region) -> None:
        for n in range(1, 31):
            await region.write_many([(1, [b"%d" % n, b"+"]), (2, [b"other"])])
        assert [seq for _, seq, _ in await entries(region.read_table(1, start=20))] == list(range(20, 61))
        assert await entries(region.read_table(1, start=61)) == []
        assert await entries(region.read_table(9)) == []

    async def test_a_replay_splits_by_table_in_one_pass(self, region: Region) -> None:
        for n in range(20):
            await region.write(n % 4, [b"%d" % n])
        got: dict[int, list[WalEntry]] = {0: [], 1: []}
        rest: list[WalEntry] = []

        async def one(entry: WalEntry) -> None:
            got[1].append(entry)

        steps: list[tuple[int, int]] = []
        counts = await region.replay(
            {0: got[0].append, 1: one}, other=rest.append, progress=lambda *step: steps.append(step)
        )
        assert counts == dict.fromkeys(range(4), 5)
        assert [e.payload for e in got[1]] == [b"1", b"5", b"9", b"13", b"17"]
        assert len(rest) == 10
        assert steps[-1][0] == steps[-1][1]

    async def test_the_progress_of_a_replay_ends_at_the_total(self, region: Region) -> None:
        for n in range(5):
            await region.write(n, [b"x"])
        await region.mark_deleted(4, 2)
        await region.mark_deleted(3, 2)
        steps: list[tuple[int, int]] = []
        await region.replay({}, progress=lambda *step: steps.append(step))
        assert steps[-1][0] == steps[-1][1] > 0
        await region.drop_table(0)
        for n in range(1, 3):
            await region.mark_deleted(n, 2)
        steps.clear()
        assert await region.replay({}, progress=lambda *step: steps.append(step)) == {}
        assert steps == [(0, 0)]

    async def test_a_read_returns_the_state_at_its_start(self, region: Region) -> None:
        await region.write(1, [b"a", b"b"])
        reading = region.read()
        first = await anext(reading)
        await region.write(1, [b"late"])
        await region.mark_deleted(1, 3)
        rest = await entries(reading)
        assert [(first.table, first.seq, first.payload), *rest] == [(1, 1, b"a"), (1, 2, b"b")]

    async def test_a_reader_sees_earlier_writes_of_the_owner(self, other: Wal, region: Region) -> None:
        reader = await other.open_region(7, writable=False)
        await region.write(1, [b"a"])
        assert await contents(reader) == {1: [(1, b"a")]}
        await region.write(1, [b"b"])
        assert await contents(reader) == {1: [(1, b"a"), (2, b"b")]}

    async def test_one_reader_may_be_refreshed_concurrently(self, other: Wal, region: Region) -> None:
        reader = await other.open_region(7, writable=False)
        await region.write(1, [b"a", b"b"])
        looks = await asyncio.gather(*(contents(reader) for _ in range(5)), *(reader.refresh() for _ in range(5)))
        assert looks[:5] == [{1: [(1, b"a"), (2, b"b")]}] * 5

    async def test_a_reopened_reader_is_up_to_date(self, other: Wal, region: Region) -> None:
        reader = await other.open_region(7, writable=False)
        await region.write(1, [b"a"])
        assert await other.open_region(7, writable=False) is reader
        assert reader.meta.tables[1].next_seq_num == 2

    async def test_opening_for_reading_claims_nothing(self, other: Wal, region: Region) -> None:
        await region.write(1, [b"a"])
        reader = await other.open_region(7, writable=False)
        assert reader.meta.term == region.meta.term
        await region.write(1, [b"b"])
        assert region.meta.tables[1].next_seq_num == 3


class DeletingCases(RegionBase):
    async def test_a_mark_deletes_only_the_entries_below_its_number(self, region: Region) -> None:
        await region.write(1, [b"a", b"b", b"c"])
        await region.mark_deleted(table=1, seq=2)
        assert await entries(region.read()) == [(1, 2, b"b"), (1, 3, b"c")]
        assert region.meta.tables[1].latest_marked_deleted == 2

    async def test_a_mark_at_the_next_number_deletes_all_entries(self, region: Region) -> None:
        await region.write(1, [b"a", b"b"])
        await region.mark_deleted(1, 3)
        assert await entries(region.read()) == []
        cleaned = await region.clean()
        assert cleaned.pinned_by is None
        assert (await region.write(1, [b"c"])).first == 3

    async def test_a_dropped_table_is_removed_and_restarts_at_1(self, other: Wal, region: Region) -> None:
        await region.write_many([(1, [b"a"]), (2, [b"b"])])
        await region.drop_table(1)
        assert list(region.meta.tables) == [2]
        reader = await other.open_region(7, writable=False)
        assert list(reader.meta.tables) == [2]
        assert (await region.write(1, [b"new"])).first == 1
        assert await contents(region) == {1: [(1, b"new")], 2: [(1, b"b")]}

    async def test_marks_and_drops_by_a_reader_reach_the_owner(self, other: Wal, region: Region) -> None:
        await region.write_many([(1, [b"a", b"b"]), (2, [b"c"])])
        reader = await other.open_region(7, writable=False)
        await reader.mark_deleted(1, 2)
        await reader.drop_table(2)
        assert (await region.write(1, [b"d"])).first == 3
        assert (await region.write(2, [b"e"])).first == 1
        assert await contents(region) == {1: [(2, b"b"), (3, b"d")], 2: [(1, b"e")]}
        assert state_of(reader.meta).keys() == {1}

    async def test_cleaning_removes_records_that_no_table_needs(self, log: Log, region: Region, namespace: str) -> None:
        last = [await region.write_many([(1, [b"x" * 100]), (2, [b"y" * 100])]) for _ in range(10)][-1]
        await region.mark_deleted(1, 11)
        cleaned = await region.clean()
        assert cleaned.pinned_by == 2
        first = region.meta.tables[2].mapping[1]
        assert (await held_records(log, f"wal.{namespace}.7.data"))[0].offset == first
        await region.mark_deleted(2, 11)
        assert (await region.clean()).pinned_by is None
        assert await log.start(f"wal.{namespace}.7.data", 0) > last[0].offset

    async def test_cleaning_keeps_two_snapshots(self, log: Log, wal: Wal, region: Region, namespace: str) -> None:
        meta_topic = f"wal.{namespace}.7.meta"
        for _ in range(6):
            written = await region.write(1, [b"x"])
            await region.mark_deleted(1, written.last + 1)
            await region.clean()
        assert len(await held_records(log, meta_topic)) == 2

    async def test_an_idle_table_that_pins_the_log_is_passed_to_the_flush_callback(
        self, log: Log, namespace: str, wal: Wal
    ) -> None:
        offered: list[Pinned] = []
        small = make_wal(log, namespace, force_flush_bytes=5_000)

        async def flush(pinned: Pinned) -> None:
            offered.append(pinned)
            await region.mark_deleted(pinned.table, region.meta.tables[pinned.table].next_seq_num)

        region = await small.open_region(8, create=True, on_pinned=flush)
        await region.write(1, [b"idle"])
        for _ in range(10):
            written = await region.write(2, [b"x" * 1000])
            await region.mark_deleted(2, written.last + 1)
        assert region.pinned()[0].table == 1
        cleaned = await region.clean()
        assert [(p.table, p.first_seq) for p in offered] == [(1, 1)]
        assert offered[0].held_bytes > 5_000
        assert cleaned.pinned_by is None
        await small.close()

    async def test_a_requested_flush_reaches_the_owner_and_frees_the_log(
        self, log: Log, namespace: str, wal: Wal
    ) -> None:
        flushed: list[int] = []

        async def flush(pinned: Pinned) -> None:
            flushed.append(pinned.table)
            await owned.mark_deleted(pinned.table, owned.meta.tables[pinned.table].next_seq_num)

        owner = make_wal(log, namespace, force_flush_bytes=0)
        owned = await owner.open_region(8, create=True, on_pinned=flush)
        await owned.write(1, [b"a", b"b"])
        await owned.write(2, [b"c"])
        await owned.clean()
        assert flushed == []
        asking = await wal.open_region(8, writable=False)
        assert await asking.request_flush(1) == [1]
        assert [table for table, meta in asking.meta.tables.items() if meta.awaits_flush] == [1]
        cleaned = await owned.clean()
        assert (flushed, cleaned.pinned_by) == ([1], 2)
        await owned.clean()
        assert flushed == [1]
        await asking.refresh()
        assert [table for table, meta in asking.meta.tables.items() if meta.awaits_flush] == []
        assert await asking.request_flush() == [2]
        assert (await owned.clean()).pinned_by is None
        assert await asking.request_flush() == []
        await owner.close()

    async def test_a_requested_flush_outlives_a_snapshot_and_its_owner(
        self, log: Log, namespace: str, wal: Wal
    ) -> None:
        first = make_wal(log, namespace)
        region = await first.open_region(8, create=True)
        await region.write(1, [b"a"])
        await region.request_flush(1)
        await region.write(1, [b"b"])
        await region.snapshot()
        await first.close()
        second = make_wal(log, namespace)
        again = await second.open_region(8)
        assert again.meta.tables[1].flush_requested == 2
        await again.mark_deleted(1, 2)
        assert not again.meta.tables[1].awaits_flush
        with pytest.raises(NotFound):
            await again.request_flush(9)
        await second.close()

    async def test_a_read_overtaken_by_the_cleaner_raises_truncated(
        self, monkeypatch: pytest.MonkeyPatch, region: Region
    ) -> None:
        for n in range(5):
            await region.write(1, [b"%d" % n])
        monkeypatch.setattr("tidebook.wal.reading.FETCH_MAX", 2)
        reading = region.read()
        assert (await anext(reading)).payload == b"0"
        await region.mark_deleted(1, 6)
        await region.clean()
        with pytest.raises(Truncated):
            await entries(reading)


class RecoveryCases(RegionBase):
    async def test_a_region_opened_again_has_the_same_state(self, other: Wal, region: Region) -> None:
        for n in range(20):
            await region.write_many([(n % 3, [b"%d" % n, b"+"]), (5, [b"z"])])
        await region.mark_deleted(1, 4)
        await region.drop_table(2)
        again = await other.open_region(7)
        assert state_of(again.meta) == state_of(region.meta)
        assert await contents(again) == await contents(region)

    async def test_recovery_scans_only_records_after_the_snapshot(
        self, open_log: Any, namespace: str, region: Region
    ) -> None:
        for _ in range(10):
            await region.write(1, [b"x"])
        snapshot = await region.snapshot()
        for _ in range(3):
            await region.write(1, [b"y"])
        async with open_log() as log:
            starts: list[int] = []
            read = log.read

            async def counted(topic: str, partition: int, **named: Any) -> Any:
                if topic.endswith(".data"):
                    starts.append(named["start"])
                return await read(topic, partition, **named)

            log.read = counted
            again = make_wal(log, namespace)
            assert state_of((await again.open_region(7)).meta) == state_of(region.meta)
            assert min(starts) == snapshot.data_offset
            await again.close()

    async def test_an_empty_meta_topic_means_a_full_scan(self, other: Wal, region: Region) -> None:
        await region.write(1, [b"a"])
        again = await other.open_region(7)
        assert state_of(again.meta) == state_of(region.meta)

    async def test_a_missing_meta_topic_means_a_full_scan(
        self, log: Log, other: Wal, region: Region, namespace: str
    ) -> None:
        await region.write(1, [b"a"])
        await region.snapshot()
        await log.delete_topic(f"wal.{namespace}.7.meta")
        again = await other.open_region(7)
        assert state_of(again.meta) == state_of(region.meta)
        await again.snapshot()

    async def test_a_truncated_meta_topic_means_a_full_scan(
        self, log: Log, other: Wal, region: Region, namespace: str
    ) -> None:
        await region.write(1, [b"a"])
        await region.snapshot()
        meta_topic = f"wal.{namespace}.7.meta"
        await log.truncate(meta_topic, 0, before=await log.end(meta_topic, 0))
        assert state_of((await other.open_region(7)).meta) == state_of(region.meta)

    async def test_a_lost_meta_topic_and_a_truncated_log_raise_log_lost_with_the_range(
        self, log: Log, other: Wal, region: Region, namespace: str
    ) -> None:
        written = await region.write(1, [b"a"])
        await region.mark_deleted(1, 2)
        await region.clean()
        meta_topic = f"wal.{namespace}.7.meta"
        await log.truncate(meta_topic, 0, before=await log.end(meta_topic, 0))
        with pytest.raises(LogLost) as raised:
            await other.open_region(7)
        assert raised.value.first == 0
        assert raised.value.last >= written.offset

    async def test_a_log_start_past_an_entry_that_is_needed_raises_log_lost(
        self, log: Log, other: Wal, region: Region, namespace: str
    ) -> None:
        await region.write(1, [b"a"])
        second = await region.write(1, [b"b"])
        await region.snapshot()
        await log.truncate(f"wal.{namespace}.7.data", 0, before=second.offset)
        with pytest.raises(LogLost) as raised:
            await other.open_region(7)
        assert raised.value.first == region.meta.tables[1].mapping[1]
        assert raised.value.last < second.offset

    async def test_a_log_start_past_the_snapshot_raises_log_lost(
        self, log: Log, other: Wal, region: Region, namespace: str
    ) -> None:
        await region.write(1, [b"a"])
        snapshot = await region.snapshot()
        last = await region.write(1, [b"b"])
        await log.truncate(f"wal.{namespace}.7.data", 0, before=last.offset + 1)
        with pytest.raises(LogLost) as raised:
            await other.open_region(7)
        assert raised.value.first == snapshot.data_offset
        assert raised.value.last >= last.offset

    async def test_a_data_topic_created_again_raises_log_lost(
        self, log: Log, other: Wal, wal: Wal, region: Region, namespace: str
    ) -> None:
        await region.write(1, [b"a"])
        await region.snapshot()
        await log.delete_topic(f"wal.{namespace}.7.data")
        await log.create_topic(f"wal.{namespace}.7.data", 1, keep_forever=True)
        with pytest.raises(LogLost, match="created again"):
            await other.open_region(7)

    @pytest.mark.parametrize("damage", ["torn", "bent", "foreign"])
    async def test_a_damaged_snapshot_falls_back_to_the_one_before(
        self, log: Log, other: Wal, region: Region, namespace: str, damage: str
    ) -> None:
        await region.write(1, [b"a"])
        await region.snapshot()
        await region.write(1, [b"b"])
        meta_topic = f"wal.{namespace}.7.meta"
        good = (await held_records(log, meta_topic))[0].value or b""
        bad = {"torn": good[:-3], "bent": good[:-1] + bytes([good[-1] ^ 1]), "foreign": b"hello"}[damage]
        await log.append(Outgoing(meta_topic, 0, None, bad))
        again = await other.open_region(7)
        assert state_of(again.meta) == state_of(region.meta)
        await again.mark_deleted(1, 3)
        await again.clean()
        assert (await again.write(1, [b"c"])).first == 3

    async def test_a_record_missing_from_the_middle_is_detected(self, region: Region) -> None:
        await region.write(1, [b"a"])
        second = await region.write(1, [b"b"])
        meta = region.meta
        meta.tables[1].mapping._offsets[0] = second.offset + 5  # as if the log had lost it
        with pytest.raises(Corrupt):
            await contents(region)


class FencingCases(RegionBase):
    async def test_a_second_writer_fences_the_first(self, other: Wal, region: Region) -> None:
        await region.write(1, [b"a"])
        second = await other.open_region(7)
        assert second.meta.term == 2
        await second.write(1, [b"b"])
        with pytest.raises(Fenced, match="open the region again"):
            await region.write(1, [b"late"])
        with pytest.raises(Fenced):
            await region.write(1, [b"later still"])
        assert await contents(second) == {1: [(1, b"a"), (2, b"b")]}

    async def test_a_former_owner_is_fenced_even_if_the_log_acknowledged_its_write(
        self, log: Log, other: Wal, region: Region, namespace: str
    ) -> None:
        await region.write(1, [b"a"])
        second = await other.open_region(7)
        end = await log.end(f"wal.{namespace}.7.data", 0)
        with pytest.raises(Fenced):
            await region.write(1, [b"late"])
        assert await log.end(f"wal.{namespace}.7.data", 0) > end
        assert await contents(second) == {1: [(1, b"a")]}
        assert (await second.write(1, [b"b"])).first == 2

    async def test_a_fenced_region_opens_again_from_the_same_wal(self, wal: Wal, other: Wal, region: Region) -> None:
        second = await other.open_region(7)
        with pytest.raises(Fenced):
            await region.write(1, [b"x"])
        again = await wal.open_region(7)
        assert again is not region
        assert (await again.write(1, [b"mine"])).first == 1
        with pytest.raises(Fenced):
            await second.write(1, [b"x"])

    async def test_two_writers_at_once_never_fork_a_table(self, wal: Wal, other: Wal, region: Region) -> None:
        kept: list[tuple[int, bytes]] = []

        async def write_until_fenced(region: Region, name: bytes) -> None:
            try:
                for n in range(50):
                    payload = b"%s%d" % (name, n)
                    written = await region.write(1, [payload])
                    kept.append((written.first, payload))
            except Fenced:
                pass

        first = asyncio.create_task(write_until_fenced(region, b"a"))
        await region.write(2, [b"under way"])
        second = await other.open_region(7)
        await asyncio.gather(first, write_until_fenced(second, b"b"))
        held = (await contents(second))[1]
        assert dict(held) == dict(kept)
        assert len(held) == len(kept)

    async def test_a_late_snapshot_of_a_former_owner_is_not_used(self, log: Log, other: Wal, region: Region) -> None:
        await region.write(1, [b"a"])
        second = await other.open_region(7)
        for _ in range(3):
            written = await second.write(1, [b"b"])
            await second.mark_deleted(1, written.last + 1)
            await second.clean()
        await region.snapshot()  # of an outdated state
        await region.snapshot()
        third = await make_wal(log, other.namespace).open_region(7)
        assert state_of(third.meta) == state_of(second.meta)


class RegionCases(
    WritingCases, BadInputCases, ReadingCases, DeletingCases, RecoveryCases, FencingCases, OvertakenCases
):
    """All cases of a region; subclasses choose the log."""
