"""Writers use the fixed part of the history of bucket sizes, which is fixed once despite concurrent writers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tidebook.core.buckets import FIXED_AHEAD_MS, Buckets, decode_buckets, encode_buckets
from tidebook.core.errors import OutcomeUnknown, Unavailable
from tidebook.store.cassandra.tag_views import TagBuckets

NOW_MS = 10**12


class Setting:
    """A store with one setting, and a callback just before it is set."""

    def __init__(self) -> None:
        self.text: str | None = None
        self.reads = self.sets = 0
        self.before_set: Callable[[], None] = lambda: None

    async def setting(self, name: str) -> str | None:
        self.reads += 1
        await asyncio.sleep(0)
        return self.text

    async def set_setting(self, name: str, value: str, *, expected: str | None) -> bool:
        self.sets += 1
        await asyncio.sleep(0)
        self.before_set()
        if self.text != expected:
            return False
        self.text = value
        return True

    @property
    def history(self) -> Buckets:
        assert self.text is not None
        return decode_buckets(self.text)


class Row:
    def __init__(self, *columns: Any) -> None:
        self.as_tuple = lambda: columns


class Listed:
    """A session in which a tag has these buckets."""

    def __init__(self, *buckets: int) -> None:
        self.buckets = buckets
        self.requested = 0

    async def read(self, query: str, values: list[Any]) -> list[Row]:
        self.requested += 1
        return [Row(each) for each in sorted(self.buckets, reverse=True) if each <= values[1]][:1]


def buckets_of(setting: Setting, session: Any = None) -> TagBuckets:
    return TagBuckets(session, setting)


async def test_concurrent_slices_fix_the_history_once_and_it_is_not_read_again() -> None:
    setting = Setting()
    buckets = buckets_of(setting)
    await asyncio.gather(*(buckets.fixed_at(NOW_MS + n) for n in range(20)))
    await buckets.fixed_at(NOW_MS + FIXED_AHEAD_MS - 1)
    assert (setting.reads, setting.sets) == (1, 1)
    await buckets.fixed_at(NOW_MS + FIXED_AHEAD_MS)
    assert setting.sets == 2


async def test_a_writer_that_finds_the_history_fixed_by_another_sets_nothing() -> None:
    setting = Setting()
    await buckets_of(setting).fixed_at(NOW_MS)
    await buckets_of(setting).fixed_at(NOW_MS + 1)
    assert setting.sets == 1


async def test_a_concurrent_change_is_seen_before_rows_are_assigned_to_buckets() -> None:
    setting = Setting()

    def change() -> None:
        setting.before_set = lambda: None
        setting.text = encode_buckets(Buckets().changed("minute", from_ms=NOW_MS - 5))

    setting.before_set = change
    found = await buckets_of(setting).fixed_at(NOW_MS)
    assert found.start(NOW_MS) == found.start(NOW_MS - 1) == NOW_MS - 5
    assert setting.history == found


async def test_after_an_unknown_outcome_of_a_set_the_history_is_read_again() -> None:
    setting = Setting()

    def fail() -> None:
        setting.before_set = lambda: None
        setting.text = encode_buckets(Buckets().fixed(NOW_MS))
        raise OutcomeUnknown("a compare-and-set")

    setting.before_set = fail
    assert (await buckets_of(setting).fixed_at(NOW_MS)).fixed_ms == NOW_MS + FIXED_AHEAD_MS
    assert setting.sets == 1


async def test_the_slice_is_retried_if_others_change_it_every_time() -> None:
    setting = Setting()
    sizes = iter(range(1, 100))

    def change() -> None:
        setting.text = encode_buckets(Buckets().changed("minute", from_ms=next(sizes)))

    setting.before_set = change
    with pytest.raises(Unavailable):
        await buckets_of(setting).fixed_at(NOW_MS)


async def test_a_reader_after_the_fixed_part_starts_at_a_stored_bucket() -> None:
    setting, session = Setting(), Listed(NOW_MS - 50, NOW_MS - 7, NOW_MS + 1)
    buckets = buckets_of(setting, session)
    assert await buckets.bucket_start("paid", NOW_MS) == NOW_MS - 7
    assert await buckets.bucket_start("paid", NOW_MS - 51) == -1
    assert (setting.sets, setting.reads) == (0, 1), "it fixes nothing, and reads the history only rarely"


async def test_a_reader_within_the_fixed_part_queries_no_buckets() -> None:
    setting, session = Setting(), Listed()
    await buckets_of(setting).fixed_at(NOW_MS)
    reader = buckets_of(setting, session)
    assert await reader.bucket_start("paid", NOW_MS) == Buckets().start(NOW_MS)
    assert await reader.bucket_start("paid", NOW_MS + 1) == Buckets().start(NOW_MS)
    assert (session.requested, setting.reads) == (0, 2), "one read is the writer's"
