"""A region whose position in the log was truncated by another process recovers from a snapshot, or raises `Fenced`."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.integration.wal.base import RegionBase, contents, entries, make_wal, state_of
from tidebook.core.errors import Fenced, InvalidInput, LogLost, NotFound
from tidebook.log.port import Log
from tidebook.wal.region import Region
from tidebook.wal.wal import Wal


async def overtake(region: Region, *, tables: tuple[int, ...] = (1,), rounds: int = 3) -> None:
    """Write, mark everything deleted, and clean, so that the records after the position of others are gone."""
    for _ in range(rounds):
        for table in tables:
            written = await region.write(table, [b"flushed"])
            await region.mark_deleted(table, written.last + 1)
        await region.clean()


async def flush_all(reader: Region) -> None:
    """Mark everything deleted and clean without a claim, repeatedly, so that the marks are truncated too."""
    for _ in range(3):
        await reader.refresh()
        for table, held in list(reader.meta.tables.items()):
            if held.latest_marked_deleted < held.next_seq_num:
                await reader.mark_deleted(table, held.next_seq_num)
        await reader.clean()


class OvertakenCases(RegionBase):
    async def test_an_overtaken_reader_recovers_from_a_snapshot(
        self, log: Log, other: Wal, region: Region, namespace: str
    ) -> None:
        await region.write(1, [b"a"])
        reader = await other.open_region(7, writable=False)
        await overtake(region)
        last = await region.write(2, [b"kept"])
        assert await log.start(f"wal.{namespace}.7.data", 0) > 3
        assert await contents(reader) == {2: [(1, b"kept")]}
        assert state_of(reader.meta) == state_of(region.meta)
        await reader.mark_deleted(2, last.last + 1)
        await reader.drop_table(1)
        await reader.clean()
        assert (await reader.status()).tables == 1

    async def test_a_reader_of_a_log_that_was_emptied_reads_nothing(self, other: Wal, region: Region) -> None:
        await region.write(1, [b"a"])
        reader = await other.open_region(7, writable=False)
        await overtake(region)
        await region.clean()
        assert await contents(reader) == {}
        assert (await region.write(1, [b"b"])).first == 5
        assert await contents(reader) == {1: [(5, b"b")]}

    async def test_an_overtaken_reader_that_is_reopened_is_up_to_date(self, other: Wal, region: Region) -> None:
        await region.write(1, [b"a"])
        reader = await other.open_region(7, writable=False)
        await overtake(region)
        assert await other.open_region(7, writable=False) is reader
        assert state_of(reader.meta) == state_of(region.meta)

    async def test_an_overtaken_former_owner_is_fenced_when_it_writes(
        self, wal: Wal, other: Wal, region: Region
    ) -> None:
        await region.write(1, [b"a"])
        second = await other.open_region(7)
        await overtake(second)
        await second.write(2, [b"kept"])
        with pytest.raises(Fenced):
            await region.write(1, [b"late"])
        with pytest.raises(Fenced):
            await region.write_many([(2, [b"late"])])
        with pytest.raises(Fenced):
            await region.mark_deleted(1, 2)
        assert await contents(second) == {2: [(1, b"kept")]}
        again = await wal.open_region(7)
        assert state_of(again.meta) == state_of(second.meta)

    async def test_an_overtaken_former_owner_is_fenced_when_it_refreshes(self, other: Wal, region: Region) -> None:
        await region.write(1, [b"a"])
        await overtake(await other.open_region(7))
        with pytest.raises(Fenced):
            await region.refresh()
        assert not region.writable

    async def test_a_former_owner_gets_fenced_rather_than_an_error_about_its_marks(
        self, other: Wal, region: Region
    ) -> None:
        await region.write(1, [b"a"])
        second = await other.open_region(7)
        await second.write_many([(1, [b"b", b"c"]), (2, [b"d"])])
        with pytest.raises(Fenced):
            await region.mark_deleted(1, 4)
        with pytest.raises(Fenced):
            await region.drop_table(2)

    async def test_a_former_owner_reads_the_current_entries(self, other: Wal, region: Region) -> None:
        await region.write(1, [b"a"])
        second = await other.open_region(7)
        await overtake(second)
        await second.write(2, [b"kept"])
        assert await contents(region) == {2: [(1, b"kept")]}
        assert not region.writable

    @pytest.mark.parametrize("look", [False, True])
    async def test_an_owner_whose_log_another_process_cleaned_continues_writing(
        self, other: Wal, region: Region, look: bool
    ) -> None:
        await region.write_many([(1, [b"a", b"b"]), (2, [b"c"])])
        reader = await other.open_region(7, writable=False)
        await flush_all(reader)
        if look:
            await region.refresh()
        written = await asyncio.gather(region.write(1, [b"d"]), region.write(2, [b"e"]), region.write(3, [b"f"]))
        assert [w.first for w in written] == [3, 2, 1]
        assert await contents(region) == {1: [(3, b"d")], 2: [(2, b"e")], 3: [(1, b"f")]}
        assert region.meta.term == 1
        assert state_of((await other.open_region(7)).meta) == state_of(region.meta)

    async def test_an_owner_does_not_read_entries_that_others_marked(self, other: Wal, region: Region) -> None:
        await region.write(1, [b"a", b"b"])
        reader = await other.open_region(7, writable=False)
        await reader.mark_deleted(1, 2)
        assert await contents(region) == {1: [(2, b"b")]}

    async def test_an_owner_reads_after_another_process_cleaned_its_log(self, other: Wal, region: Region) -> None:
        await region.write(1, [b"a", b"b"])
        await region.write(2, [b"c"])
        reader = await other.open_region(7, writable=False)
        await flush_all(reader)
        assert await contents(region) == {}
        assert await entries(region.read_table(1)) == []
        assert await region.replay({}, other=lambda _: None) == {}

    async def test_missing_entries_that_were_not_marked_raise_log_lost_in_an_open_region(
        self, log: Log, other: Wal, region: Region, namespace: str
    ) -> None:
        await region.write(1, [b"a"])
        second = await region.write(1, [b"b"])
        reader = await other.open_region(7, writable=False)
        await log.truncate(f"wal.{namespace}.7.data", 0, before=second.offset)
        for held in (region, reader):
            with pytest.raises(LogLost) as raised:
                await contents(held)
            assert raised.value.first <= raised.value.last < second.offset

    async def test_a_region_deleted_and_created_again_is_not_found_by_its_open_objects(
        self, wal: Wal, other: Wal, region: Region
    ) -> None:
        await region.write_many([(1, [b"a"]), (2, [b"b"])])
        reader = await other.open_region(7, writable=False)
        await other.delete_region(7)
        again = await other.open_region(7, create=True)
        await again.write(3, [b"new"])
        await again.write(3, [b"newer"])
        with pytest.raises(NotFound, match="created again"):
            await contents(reader)
        with pytest.raises(Fenced, match="created again"):
            await region.write(1, [b"late"])
        assert (await again.write(3, [b"newest"])).first == 3
        assert await contents(await other.open_region(7, writable=False)) == await contents(again)
        mine = await wal.open_region(7)
        assert mine is not region
        assert (await mine.write(3, [b"mine"])).first == 4

    async def test_a_region_deleted_by_another_process_can_be_created_again(
        self, wal: Wal, other: Wal, region: Region
    ) -> None:
        await region.write(1, [b"a"])
        await other.delete_region(7)
        with pytest.raises(NotFound):
            await wal.open_region(7)
        again = await wal.open_region(7, create=True)
        assert (await again.write(1, [b"new"])).first == 1

    async def test_topics_with_several_partitions_are_rejected(self, log: Log, wal: Wal, namespace: str) -> None:
        await log.create_topic(f"wal.{namespace}.8.data", 2, keep_forever=True)
        with pytest.raises(InvalidInput, match="2 partitions"):
            await wal.open_region(8, create=True)

    async def test_opening_during_continuous_cleaning_loses_nothing(
        self, open_log: Any, namespace: str, region: Region
    ) -> None:
        stop = asyncio.Event()

        async def clean_on() -> None:
            while not stop.is_set():
                await overtake(region, rounds=1)

        cleaning = asyncio.create_task(clean_on())
        try:
            async with open_log() as log:
                for _ in range(15):
                    opened = await make_wal(log, namespace).open_region(7, writable=False)
                    await opened.refresh()
        finally:
            stop.set()
            await cleaning

    async def test_alternating_owners_and_a_cleaning_flusher_lose_and_duplicate_nothing(
        self, open_log: Any, namespace: str, wal: Wal
    ) -> None:
        reported: dict[tuple[int, int], bytes] = {}
        flushed: list[tuple[int, int, bytes]] = []
        over, turn = asyncio.Event(), asyncio.Lock()

        async def write(name: bytes) -> None:
            async with open_log() as log:
                mine = make_wal(log, namespace)
                async with turn:  # a claim in the turn of the other owner could fence it twice in a row
                    region = await mine.open_region(7, create=True)
                for n in range(0, 60, 10):
                    async with turn:  # the other owner claimed it meanwhile, so this one is fenced
                        for m in range(n, n + 10):
                            table, payload = m % 3, b"%s%d" % (name, m)
                            try:
                                written = await region.write(table, [payload])
                            except Fenced:
                                region = await mine.open_region(7)
                                written = await region.write(table, [payload])
                            reported[table, written.first] = payload
                await mine.close()

        async def flush() -> None:
            async with open_log() as log:
                reader = await make_wal(log, namespace).open_region(7, create=True, writable=False)
                while not over.is_set():
                    held = await entries(reader.read())
                    for table, seq in {table: seq for table, seq, _ in held}.items():
                        await reader.mark_deleted(table, seq + 1)
                    flushed.extend(held)
                    await reader.clean()
                    await asyncio.sleep(0)  # embedded reads never wait

        flushing = asyncio.create_task(flush())
        await asyncio.gather(write(b"a"), write(b"b"))
        over.set()
        await flushing
        left = await entries((await wal.open_region(7, writable=False)).read())
        assert {(table, seq): payload for table, seq, payload in [*flushed, *left]} == reported
        assert len(flushed) + len(left) == len(reported) == 120
