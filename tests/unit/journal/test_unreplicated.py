"""Offsets and records of the tail: what is found is whole, held within bounds, and dropped by stretches."""

from __future__ import annotations

import random

import pytest

from tidebook.journal.unreplicated import STRETCH_RECORDS_MAX, Unreplicated
from tidebook.log.port import Record


def record(offset: int) -> Record:
    return Record(offset, 0, b"k", b"x" * 10)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_found_is_all_there_is_or_nothing(seed: int) -> None:
    dice = random.Random(seed)
    held = Unreplicated(offsets_max=dice.choice([2, 40, 10**6]), bytes_max=dice.choice([1, 300, 10**9]))
    truth: dict[str, list[int]] = {"a": [], "b": []}
    for offset in range(300):
        id = dice.choice("ab")
        truth[id].append(offset)
        held.add(id, record(offset))
        if dice.random() < 0.02:
            held.drop_below(dice.randrange(offset + 1))
        after = dice.randrange(-1, offset)
        found = held.find(id, after, to := dice.randrange(after, offset + 1))
        if found is not None:
            assert [each.offset for each in found] == [each for each in truth[id] if after < each <= to]
        elif held.base == 0 and held._bytes_max == 10**9:
            raise AssertionError("all of it is held")


def test_so_many_offsets_and_bytes_are_held_and_no_more() -> None:
    held = Unreplicated(offsets_max=80, bytes_max=250)
    for offset in range(1000):
        held.add(f"k{offset}", record(offset))
    assert 900 < held.base <= 920
    assert len(held._records) == 25
    assert sum(len(offsets) for _, offsets in held._older) + len(held._newest) <= 90


def test_a_long_tail_is_dropped_a_stretch_at_a_time() -> None:
    held = Unreplicated(offsets_max=10**6, bytes_max=10**9)
    count = 3 * STRETCH_RECORDS_MAX
    for offset in range(count):
        held.add(f"k{offset}", record(offset))
    rounds = 1
    while held.drop_below(count):
        assert len(held._records) == count - rounds * STRETCH_RECORDS_MAX
        rounds += 1
    assert rounds == 3
    assert (held.base, held._bytes_held) == (count, 0)
    assert held.find("k0", -1, count) is None
    assert held.find("k0", count - 1, count) == []
