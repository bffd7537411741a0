"""`SeqOffsets` behaves like a dict from sequence numbers to offsets, and stores them by batch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidebook.core.errors import Corrupt
from tidebook.wal.mapping import PackedMapping, SeqOffsets

STEPS = st.lists(
    st.tuples(st.just("append"), st.integers(1, 5), st.integers(0, 3))
    | st.tuples(st.just("remove"), st.integers(0, 40), st.just(0)),
    max_size=30,
)


def build(steps: list[tuple[str, int, int]]) -> tuple[SeqOffsets, dict[int, int]]:
    mapping, model, following, offset = SeqOffsets(), dict[int, int](), 1, 0
    for kind, number, ahead in steps:
        if kind == "append":
            offset += ahead
            mapping.append(number, offset=offset)
            model |= {following + i: offset for i in range(number)}
            following += number
        else:
            mapping.remove_below(min(number, following))
            model = {seq: at for seq, at in model.items() if seq >= number}
    return mapping, model


@given(STEPS)
def test_the_mapping_equals_a_dict_of_all_numbers(steps: list[tuple[str, int, int]]) -> None:
    mapping, model = build(steps)
    assert dict(mapping) == model
    assert mapping == model
    assert len(mapping) == len(model)
    assert mapping.first_offset == (min(model.values()) if model else None)
    for seq in range(-1, 60):
        assert mapping.get(seq) == model.get(seq)


@given(STEPS)
def test_batches_contain_each_number_once(steps: list[tuple[str, int, int]]) -> None:
    mapping, model = build(steps)
    assert {seq: at for first, stop, at in mapping.batches() for seq in range(first, stop)} == model


def test_numbers_above_four_bytes_are_stored() -> None:
    mapping = SeqOffsets()
    mapping.append(1, offset=5)
    view = mapping.frozen()
    mapping.append(2**40, offset=6)
    mapping.append(1, offset=2**45)
    assert (mapping[1], mapping[2], mapping[2**40 + 2]) == (5, 6, 2**45)
    back = SeqOffsets.unpacked(mapping.packed())
    assert (back[2**40 + 2], back.stop) == (2**45, 2**40 + 3)
    assert dict(view) == {1: 5}


@given(STEPS, st.integers(0, 40), st.integers(0, 40), st.integers(0, 30), st.integers(0, 30))
def test_a_restricted_copy_contains_the_numbers_of_the_ranges(
    steps: list[tuple[str, int, int]], seq: int, seq_stop: int, offset: int, offset_stop: int
) -> None:
    mapping, model = build(steps)
    seqs, offsets = range(seq, seq_stop), range(offset, offset_stop)
    assert dict(mapping.within(seqs=seqs)) == {s: at for s, at in model.items() if s in seqs}
    assert dict(mapping.within(offsets=offsets)) == {s: at for s, at in model.items() if at in offsets}
    both = {s: at for s, at in model.items() if s in seqs and at in offsets}
    assert dict(mapping.within(seqs=seqs, offsets=offsets)) == both
    assert dict(mapping) == model


def test_a_mark_beyond_four_bytes_inside_a_batch_is_stored() -> None:
    mapping = SeqOffsets(2**32 - 10)
    mapping.append(100, offset=7)
    mapping.remove_below(2**32 + 5)
    assert mapping.start == 2**32 + 5
    assert mapping[2**32 + 5] == 7
    assert SeqOffsets.unpacked(mapping.packed()) == mapping


@given(STEPS)
def test_the_mapping_survives_packing_and_unpacking(steps: list[tuple[str, int, int]]) -> None:
    mapping, _ = build(steps)
    back = SeqOffsets.unpacked(mapping.packed())
    assert dict(back) == dict(mapping)
    assert back.stop == mapping.stop


@given(STEPS, STEPS)
def test_a_frozen_view_does_not_change(before: list[tuple[str, int, int]], after: list[tuple[str, int, int]]) -> None:
    mapping, model = build(before)
    view = mapping.frozen()
    offset = 1000
    for kind, number, ahead in after:
        if kind == "append":
            offset += ahead
            mapping.append(number, offset=offset)
        else:
            mapping.remove_below(min(number, mapping.stop))
    assert dict(view) == model


def test_a_thousand_records_in_batches_of_a_hundred_take_at_most_100_bytes() -> None:
    mapping = SeqOffsets()
    empty = mapping.size_bytes
    for batch in range(100_000):
        mapping.append(100, offset=batch)
    assert (mapping.size_bytes - empty) / (len(mapping) / 1000) <= 100


def test_arrays_of_different_lengths_are_corrupt() -> None:
    with pytest.raises(Corrupt):
        SeqOffsets.unpacked(PackedMapping(5, False, bytes(4), bytes(8)))


def test_a_mapping_past_the_next_number_is_corrupt() -> None:
    with pytest.raises(Corrupt):
        SeqOffsets.unpacked(PackedMapping(5, True, (5).to_bytes(8, "little"), bytes(8)))
