"""A log that is recreated while a process uses it: an acknowledgement at an offset already seen proves it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tests.unit.journal.rig import TOPIC, Rig
from tidebook.core.errors import Corrupt
from tidebook.core.event import Event

OpenRig = Callable[..., Rig]
Act = Callable[[Rig], Awaitable[object]]


async def recreate_topic(rig: Rig) -> None:
    """Delete the topic and create it again, as another process would."""
    await rig.log.delete_topic(TOPIC)
    await rig.log.create_topic(TOPIC, rig.settings.partitions)


async def many(rig: Rig, *, confirm: bool) -> None:
    for outcome in await rig.journal.append_many([("a", [Event("void")]), ("b", [Event("void")])], confirm=confirm):
        if isinstance(outcome, Exception):
            raise outcome


WRITES: dict[str, Act] = {
    "expected": lambda rig: rig.append("a", "void", expected=3),
    "next": lambda rig: rig.append("a", "void"),
    "unconfirmed": lambda rig: rig.append("a", "void", confirm=False),
    "many": lambda rig: many(rig, confirm=True),
    "many unconfirmed": lambda rig: many(rig, confirm=False),
    "purge": lambda rig: rig.journal.purge("a"),
    "delete": lambda rig: rig.journal.delete("a", to=1),
}
READS: dict[str, Act] = {
    "read": lambda rig: rig.read("a"),
    "pointer": lambda rig: rig.journal.pointer("a"),
    "snapshot": lambda rig: rig.journal.load_snapshot("a"),
}


@pytest.mark.parametrize("act", [*WRITES, *READS])
async def test_a_recreated_log_is_reported_and_nothing_is_confirmed(open_rig: OpenRig, act: str) -> None:
    rig, other = open_rig(), open_rig()
    for number in range(1, 4):
        assert (await rig.append("a", number)).last == number
    await recreate_topic(other)
    with pytest.raises(Corrupt, match="created again"):
        await {**WRITES, **READS}[act](rig)


@pytest.mark.parametrize("confirm", [True, False])
async def test_an_acknowledgement_at_an_offset_that_was_already_seen_proves_a_recreated_log(
    open_rig: OpenRig, confirm: bool
) -> None:
    rig, other = open_rig(), open_rig()
    for number in range(3):
        assert (await rig.append("a", number)).offset == rig.first_offset + number
    await recreate_topic(other)
    last = rig.first_offset + 2
    for _ in range(last):
        await rig.write_raw(b"b", b"of the next log")
    with pytest.raises(Corrupt, match=f"offset {last}, after offset {last}"):
        await rig.append("a", "void", confirm=confirm)


async def test_a_process_that_wrote_nothing_knows_the_end_of_the_log_at_opening(open_rig: OpenRig) -> None:
    rig, late = open_rig(), open_rig()
    for number in range(3):
        await rig.append("a", number)
    await late.journal.topic_config()
    await recreate_topic(rig)
    with pytest.raises(Corrupt, match="created again"):
        await late.append("a", "void", confirm=False)


async def test_a_recreated_log_is_reported_until_the_journal_is_opened_again(open_rig: OpenRig) -> None:
    """The new log grows beyond all offsets that were seen of the old one, and then looks like a continuation."""
    rig, other = open_rig(), open_rig()
    for number in range(3):
        await rig.append("a", number)
    await recreate_topic(other)
    with pytest.raises(Corrupt):
        await rig.append("a", "void")
    for _ in range(10):
        await rig.write_raw(b"a", b"of the next log")
    for act in (*WRITES.values(), *READS.values()):
        with pytest.raises(Corrupt, match="created again"):
            await act(rig)
    await rig.journal.close()
    with pytest.raises(Corrupt, match="adopt"):
        await rig.append("a", "void")
    await rig.journal.adopt()
    assert (await rig.append("a", "counts", expected=0)).last == 1
    assert await rig.read("a") == ["counts"]


async def test_appends_in_flight_when_the_log_is_found_recreated_are_not_confirmed(open_rig: OpenRig) -> None:
    rig, other = open_rig(), open_rig()
    for number in range(3):
        await rig.append("a", number)
    held = rig.log_faults.hold("send")
    late = asyncio.create_task(rig.append("a", "late"))
    await held.reached()
    await recreate_topic(other)
    with pytest.raises(Corrupt):
        await rig.append("a", "void")
    for _ in range(10):
        await rig.write_raw(b"a", b"of the next log")
    held.release()
    with pytest.raises(Corrupt, match="created again"):
        await late


@pytest.mark.parametrize("act", [name for name in (*WRITES, *READS) if name not in ("expected", "purge", "delete")])
async def test_a_recreated_log_that_outgrew_the_old_one_is_detected_by_its_id(
    open_rig: OpenRig, act: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidebook.journal.topic.CHECK_INTERVAL_S", 0.0)
    rig, other = open_rig(), open_rig()
    await rig.append("a", 1)
    await recreate_topic(other)
    for _ in range(10):
        await rig.write_raw(b"b", b"of the next log")

    async def keep_calling() -> None:
        for _ in range(100):
            await {**WRITES, **READS}[act](rig)
            await asyncio.sleep(0)

    with pytest.raises(Corrupt, match="another incarnation"):
        await keep_calling()


async def test_reading_the_own_record_before_its_acknowledgement_does_not_prove_a_recreated_log(
    open_rig: OpenRig,
) -> None:
    rig, other = open_rig(), open_rig()
    await rig.append("a", 1)
    held = rig.log_faults.hold("send", after=True)
    mine = asyncio.create_task(rig.append("a", 2))
    await held.reached()
    await other.append("a", 3)
    assert await rig.read("a") == [1, 2, 3]
    held.release()
    assert (await mine).last == 2
