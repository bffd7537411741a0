"""Offsets and records of the tail: what is found is complete, kept within bounds, and dropped block by block."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from tidebook.journal.settings import JournalSettings
from tidebook.journal.unreplicated import BLOCK_RECORDS_MAX, RECORD_BYTES, Unreplicated
from tidebook.log.port import Record


def record(id: str, offset: int) -> Record:
    return Record(offset, 0, id.encode(), b"x" * 10)


#: What `record("a", 0)` weighs.
WEIGHT = RECORD_BYTES + 1 + 10


@pytest.mark.parametrize("seed", range(20))
def test_what_is_found_is_all_there_is_or_nothing(seed: int) -> None:
    dice = random.Random(seed)
    held = Unreplicated(offsets_max=dice.choice([2, 40, 10**6]), bytes_max=dice.choice([1, 30 * WEIGHT, 10**9]))
    truth: dict[str, list[int]] = {"a": [], "b": []}
    for offset in range(300):
        id = dice.choice("ab")
        truth[id].append(offset)
        held.add(id, record(id, offset))
        if dice.random() < 0.02:
            held.drop_below(dice.randrange(offset + 1))
        after = dice.randrange(-1, offset)
        found = held.find(id, after, to := dice.randrange(after, offset + 1))
        if found is not None:
            assert [each.offset for each in found] == [each for each in truth[id] if after < each <= to]
        elif held.base == 0 and held._bytes_max == 10**9:
            raise AssertionError("all of it is held")


def test_so_many_offsets_and_bytes_are_held_and_no_more() -> None:
    held = Unreplicated(offsets_max=80, bytes_max=25 * (WEIGHT + 3))
    for offset in range(1000):
        held.add(f"k{offset:03}", record(f"k{offset:03}", offset))
    assert 900 < held.base <= 920
    assert len(held._records) == 25
    assert sum(len(block.offsets) for block in held._older) + len(held._newest) <= 90


@pytest.mark.parametrize("offsets_max", [1, 3, 7, 15])
def test_a_small_bound_on_offsets_is_kept_exactly(offsets_max: int) -> None:
    held = Unreplicated(offsets_max=offsets_max, bytes_max=10**9)
    for offset in range(100):
        held.add("a", record("a", offset))
    assert held.base == 100 - offsets_max


def test_a_long_tail_is_dropped_a_block_at_a_time() -> None:
    held = Unreplicated(offsets_max=10**6, bytes_max=10**9)
    count = 3 * BLOCK_RECORDS_MAX
    for offset in range(count):
        held.add(f"k{offset}", record(f"k{offset}", offset))
    rounds = 1
    while held.drop_below(count):
        assert len(held._records) == count - rounds * BLOCK_RECORDS_MAX
        rounds += 1
    assert rounds == 3
    assert (held.base, held._bytes_held) == (count, 0)
    assert held.find("k0", -1, count) is None
    assert held.find("k0", count - 1, count) == []


@pytest.mark.parametrize(("id_bytes", "value_bytes"), [(10, 1), (900, 1), (40, 2000)])
def test_a_full_tail_takes_no_more_memory_than_its_bounds_say(id_bytes: int, value_bytes: int) -> None:
    """Most of the memory of a small record is overhead of Python, so the size of its value is no measure of it."""
    offsets_max, bytes_max = 3 * BLOCK_RECORDS_MAX, 2_000_000
    # Hashes and offsets, keys of the newest block with their offsets, and what the bounds leave to the last one.
    rest = 16 * (offsets_max + BLOCK_RECORDS_MAX) + BLOCK_RECORDS_MAX * (id_bytes + 300)
    tracemalloc.start()
    try:
        held = Unreplicated(offsets_max=offsets_max, bytes_max=bytes_max)
        for offset in range(10**6, 10**6 + offsets_max):
            id = f"{offset:0{id_bytes}}"
            held.add(id, Record(offset, 1_700_000_000_000 + offset, id.encode(), b"%0*d" % (value_bytes, offset)))
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 0.5 * bytes_max < used < 1.25 * bytes_max + rest


def test_the_default_bounds_of_a_partition_are_tens_of_megabytes() -> None:
    settings = JournalSettings()
    assert settings.cached_bytes_max + 16 * settings.cached_offsets_max <= 50_000_000


def test_keys_with_the_same_hash_are_distinguished() -> None:
    class Id(str):
        """An id with the same hash as all others."""

        __slots__ = ()

        def __hash__(self) -> int:
            return 7

    held = Unreplicated(offsets_max=80, bytes_max=10**9)
    ids = [Id("a"), Id("b"), Id("c\xff")]
    for offset in range(60):
        held.add(ids[offset % 3], record(ids[offset % 3], offset))
    for number, id in enumerate(ids):
        found = held.find(id, -1, 60)
        assert found is not None
        assert [each.offset for each in found] == list(range(number, 60, 3))


def test_offsets_whose_records_are_gone_are_dropped_a_block_at_a_time_too() -> None:
    held = Unreplicated(offsets_max=80, bytes_max=1)
    for offset in range(30):
        held.add("a", record("a", offset))
    assert [held.drop_below(30) for _ in range(3)] == [True, True, False]
    assert not held._older


@pytest.mark.parametrize(("key", "value", "size"), [(b"id", b"value", 7), (None, b"value", 5), (b"id", None, 2)])
def test_a_record_counts_with_its_key_and_its_value(key: bytes | None, value: bytes | None, size: int) -> None:
    held = Unreplicated(offsets_max=80, bytes_max=10**9)
    held.add("id", Record(0, 0, key, value))
    assert held._bytes_held == RECORD_BYTES + size
