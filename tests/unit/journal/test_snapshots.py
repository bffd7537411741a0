"""Snapshots belong to the folded incarnation of a journal, replicated or not (rule 23)."""

from __future__ import annotations

from tests.unit.journal.rig import Rig


async def loaded(rig: Rig, **how: int) -> object:
    found = await rig.journal.load_snapshot("a", **how)
    return None if found is None else found.payload


async def test_a_snapshot_of_a_purged_incarnation_is_not_loaded_before_replication(rig: Rig) -> None:
    await rig.append("a", 1, 2, 3)
    await rig.journal.save_snapshot("a", seq_nr=1, payload="old")
    await rig.replicate()
    await rig.journal.purge("a")
    await rig.append("a", 4, 5)
    assert await loaded(rig) is None
    await rig.journal.save_snapshot("a", seq_nr=2, payload="new")
    assert await loaded(rig) == "new"
    assert await loaded(rig, to=1) is None
    await rig.replicate()
    assert await loaded(rig) == "new"


async def test_a_snapshot_is_loaded_after_later_appends_and_deletes(rig: Rig) -> None:
    await rig.append("a", 1, 2)
    await rig.append("a", 3)
    await rig.journal.save_snapshot("a", seq_nr=2, payload="two")
    await rig.append("a", 4)
    assert await loaded(rig) == "two"
    await rig.replicate()
    await rig.journal.delete("a", to=2)
    await rig.append("a", 5)
    assert await loaded(rig) == "two"
    await rig.replicate()
    assert await loaded(rig) == "two"
