"""Deletes, snapshots and reads that were planned on an older head and complete late: they keep to that head."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.unit.journal.rig import TOPIC, Rig
from tidebook.core.action import Delete
from tidebook.core.errors import LogLost
from tidebook.core.record import decode_record
from tidebook.log.port import Outgoing

OpenRig = Callable[..., Rig]


def is_delete(record: Outgoing, *_: object) -> bool:
    return isinstance(decode_record(record.value), Delete)


@pytest.mark.parametrize("replicated", [False, True])
@pytest.mark.parametrize("next_incarnation", [[], ["new", "newer"]], ids=["purged", "created again"])
async def test_a_delete_that_arrives_after_a_purge_is_ignored(
    open_rig: OpenRig, next_incarnation: list[str], replicated: bool
) -> None:
    """A late delete carries the incarnation that its sender saw, so that it cannot affect the next one."""
    rig, other = open_rig(), open_rig()
    await rig.append("a", 1, 2, 3)
    held = rig.log_faults.hold("send", where=is_delete)
    deleting = asyncio.create_task(rig.journal.delete("a", to=1))
    await held.reached()
    await other.journal.purge("a")
    if next_incarnation:
        await other.append("a", *next_incarnation)
    held.release()
    await deleting
    if replicated:
        await rig.replicate()
    for reader in (rig, other, open_rig()):
        assert await reader.read("a") == next_incarnation
        assert await reader.journal.pointer("a") == (len(next_incarnation) or None)


async def test_a_snapshot_that_is_saved_after_a_purge_is_not_one_of_the_next_incarnation(open_rig: OpenRig) -> None:
    rig, other = open_rig(), open_rig()
    await rig.append("a", 1, 2, 3)
    held = rig.store_faults.hold("save_snapshot")
    saving = asyncio.create_task(rig.journal.save_snapshot("a", seq_nr=3, payload="of the old one"))
    await held.reached()
    await other.journal.purge("a")
    await other.append("a", *range(5))
    held.release()
    await saving
    for _ in range(2):
        assert await rig.journal.load_snapshot("a") is None
        assert await other.journal.load_snapshot("a") is None
        await other.replicate()


@pytest.mark.parametrize("purged", [False, True])
async def test_a_read_that_plans_again_takes_nothing_newer_than_its_first_plan(open_rig: OpenRig, purged: bool) -> None:
    """All pages of a read are as of one position: otherwise they would show a journal that never existed."""
    rig, other = open_rig(tail_bytes_max=1), open_rig()
    await rig.append("a", 1, 2)
    await rig.replicate()
    await rig.append("a", 3)
    await rig.append("a", 4)
    reading = rig.journal.read("a")
    assert [(await anext(reading)).payload for _ in range(2)] == [1, 2]
    await other.append("a", 5, 6)
    lost = LogLost(topic=TOPIC, partition=0, first=0, last=3)
    rig.log_faults.fail("read", lost, where=lambda *_, key=None, **__: key == b"a")
    assert [event.payload async for event in reading] == [3, 4]
    assert rig.metrics.counted("read_replanned") == 1
    if purged:
        await other.journal.purge("a")
    assert await rig.read("a") == ([] if purged else [1, 2, 3, 4, 5, 6])
