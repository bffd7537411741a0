"""Reads that start from a recently read pointer, and heads from the store that are past the tail."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from tests.unit.journal.rig import TOPIC, Rig
from tidebook.core.key import Key

OpenRig = Callable[..., Rig]


async def test_a_long_tail_is_read_after_a_truncation_past_the_cached_pointer(open_rig: OpenRig) -> None:
    """The tail exceeds the memory limit, so it is read again from the log, which no longer begins at that pointer."""
    rig = open_rig(tail_bytes_max=10)
    await rig.append("a", "first")
    await rig.replicate()
    assert await rig.read("a") == ["first"]
    for number in range(5):
        await rig.append("b", number)
    await rig.replicate()
    await rig.truncate()
    await rig.append("a", "second", "third")
    await rig.append("a", "fourth" * 10)
    assert await rig.read("a") == ["first", "second", "third", "fourth" * 10]


async def test_a_purge_is_decided_on_a_head_from_the_store_that_is_past_the_tail(open_rig: OpenRig) -> None:
    rig, other = open_rig(), open_rig()
    await rig.append("b", 1)  # begins the tail
    await other.append("a", 0, expire_after=timedelta(milliseconds=1))
    for number in range(
        1, 17
    ):  # more than the head remembers, so it has evicted the first append, which would be folded twice
        await other.append("a", number, expected=number)
    await other.replicate()
    head = await rig.store.head(Key(TOPIC, "a"))
    assert head is not None
    assert await rig.journal.purge_expired("a", head) is True
    assert await rig.read("a") == []
