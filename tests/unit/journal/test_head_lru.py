"""The LRU cache of heads is bounded by number and bytes, whatever is folded onto them."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from tidebook.core.action import Action, Append, Delete, Purge
from tidebook.core.fold import fold
from tidebook.core.head import Head, Jump, RecentAppend
from tidebook.core.position import Position
from tidebook.core.topic_config import TopicConfig
from tidebook.journal.head_cache import HeadLru, _memory_bytes

CONFIG = TopicConfig(topic_id="id", partitions=1, segment_size=10)
MANY = 10**9


def head(*, recent: int = 1, jumps: int = 0, tags: int = 0, tag_chars: int = 10, at: int = 1000) -> Head:
    return Head(
        True, at, 0, Position(1, at), Position(1, at + 300), 1000, None, 10**12 + at,
        tuple(RecentAppend((at + n).to_bytes(16, "big"), at + n, at + n, Position(1, at + n)) for n in range(recent)),
        Position(1, at + 600),
        tuple(Jump(at + 1000 * n, at + 1000 * n + 500) for n in range(jumps)),
        {f"{at} {n}".rjust(tag_chars): at + n for n in range(tags)},
    )  # fmt: skip


def test_the_least_recently_used_heads_are_evicted_when_the_bytes_exceed_the_bound() -> None:
    large = head(tags=100)
    heads = HeadLru(count_max=MANY, bytes_max=5 * (_memory_bytes(large) + 1))
    for id in "abcde":
        heads.keep(id, large)
    heads.move_to_end("a")  # as a read of it does
    heads.keep("f", large)
    assert list(heads) == ["c", "d", "e", "a", "f"]


def test_a_head_that_grows_evicts_others() -> None:
    heads = HeadLru(count_max=MANY, bytes_max=20_000)
    for id in "abc":
        heads.keep(id, head())
    heads.keep("a", head(tags=1000))
    assert list(heads) == ["a"]


def test_long_ids_count() -> None:
    heads = HeadLru(count_max=MANY, bytes_max=100_000)
    for number in range(200):
        heads.keep(f"{number}".rjust(1000), None)
    assert 50 < len(heads) < 100


def test_the_number_of_heads_is_bounded_too() -> None:
    heads = HeadLru(count_max=3, bytes_max=MANY)
    for id in "abcde":
        heads.keep(id, None)
    assert list(heads) == ["c", "d", "e"]


def test_the_newest_head_is_kept_however_large_it_is() -> None:
    heads = HeadLru(count_max=1, bytes_max=1)
    for id in "ab":
        heads.keep(id, head(tags=10))
        assert list(heads) == [id]


@pytest.mark.parametrize("seed", range(20))
def test_the_counted_bytes_are_exact_whatever_was_folded(seed: int) -> None:
    dice = random.Random(seed)
    heads = HeadLru(count_max=4, bytes_max=dice.choice([15_000, MANY]))
    for offset in range(400):
        id = dice.choice("abcdef")
        tagged = tuple((f"tag {dice.randrange(30)}", 1) for _ in range(dice.randrange(3)))
        at = (heads.get(id) or head()).seq_nr + 100 if dice.random() < 0.2 else None
        append = Append(
            epoch=1, count=1, append_id=dice.randbytes(16), tagged=tuple(dict(tagged).items()), body=b"", at=at
        )
        actions: list[Action] = [*[append] * 8, Purge(epoch=1), Delete(epoch=1, to=5)]
        after, _ = fold(heads.get(id), dice.choice(actions), Position(1, offset), offset, CONFIG)
        heads.keep(id, after)
        assert heads.bytes_held == sum(len(each) + _memory_bytes(kept) for each, kept in heads.items())
    heads.clear()
    assert heads.bytes_held == 0


@pytest.mark.parametrize(
    "parts",
    [{"recent": 1}, {"recent": 16}, {"jumps": 64}, {"tags": 20}, {"tags": 1000}, {"tags": 100, "tag_chars": 300}],
    ids=str,
)
def test_the_counted_bytes_are_close_to_the_memory_used(parts: dict[str, int]) -> None:
    count = 100
    heads = HeadLru(count_max=MANY, bytes_max=MANY)
    tracemalloc.start()
    try:
        for number in range(count):
            heads.keep(f"journal {number}", head(**parts, at=1_000_000 * (number + 1)))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.7 < heads.bytes_held / held < 1.4


def test_a_replaced_head_no_longer_counts() -> None:
    heads = HeadLru(count_max=MANY, bytes_max=MANY)
    few, many = head(recent=2, jumps=1, tags=3), head(recent=5, jumps=7, tags=20)
    for each in (None, few, many, None, many, few, few, head(recent=3, jumps=4, tags=3)):
        heads.keep("id", each)
        assert heads.bytes_held == len("id") + _memory_bytes(each)
    heads.clear()
    assert (len(heads), heads.bytes_held) == (0, 0)
