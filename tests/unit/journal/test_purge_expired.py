"""`purge_expired`: a fresh append always wins, and the result says whether the journal was purged."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta

import pytest

from tests.unit.journal.rig import TOPIC, Rig
from tidebook.core.action import Purge
from tidebook.core.errors import OutcomeUnknown
from tidebook.core.head import Head
from tidebook.core.key import Key
from tidebook.core.record import decode_record
from tidebook.log.port import Outgoing

OpenRig = Callable[..., Rig]
SHORT = timedelta(milliseconds=1)


def is_purge(record: Outgoing, *_: object) -> bool:
    return isinstance(decode_record(record.value), Purge)


async def expired_head(rig: Rig) -> Head:
    await rig.append("a", 1, expire_after=SHORT)
    await rig.replicate()
    head = await rig.store.head(Key(TOPIC, "a"))
    assert head is not None
    return head


async def test_a_journal_that_has_not_changed_is_purged(rig: Rig) -> None:
    head = await expired_head(rig)
    assert await rig.journal.purge_expired("a", head) is True
    assert await rig.read("a") == []
    assert await rig.journal.purge_expired("a", head) is False


@pytest.mark.parametrize("change", ["append", "delete", "purge"])
async def test_nothing_is_sent_if_the_journal_is_seen_to_have_changed(rig: Rig, change: str) -> None:
    head = await expired_head(rig)
    match change:
        case "append":
            await rig.append("a", "fresh")
        case "delete":
            await rig.journal.delete("a", to=1)
        case "purge":
            await rig.journal.purge("a")
            await rig.append("a", "of the next incarnation")
    rig.log_faults.calls.clear()
    assert await rig.journal.purge_expired("a", head) is False
    assert rig.log_faults.calls["send"] == 0


@pytest.mark.parametrize("more", [0, 3], ids=["alone", "with others after it"])
async def test_an_append_that_reaches_the_log_first_wins_and_the_result_says_so(open_rig: OpenRig, more: int) -> None:
    """The head changed after the purge was sent and before it was folded."""
    rig, other = open_rig(), open_rig()
    head = await expired_head(rig)
    held = rig.log_faults.hold("send", where=is_purge)
    purging = asyncio.create_task(rig.journal.purge_expired("a", head))
    await held.reached()
    await other.append("a", "fresh")
    for number in range(more):
        await other.append("b", number)
    held.release()
    assert await purging is False
    assert await rig.read("a") == [1, "fresh"]


async def test_an_append_of_the_same_process_that_reaches_the_log_first_wins(rig: Rig) -> None:
    """Both are folded at their acknowledgements: the log is not read again."""
    head = await expired_head(rig)
    held = rig.log_faults.hold("send", where=is_purge)
    purging = asyncio.create_task(rig.journal.purge_expired("a", head))
    await held.reached()
    await rig.append("a", "fresh")
    held.release()
    assert await purging is False
    assert await rig.read("a") == [1, "fresh"]


@pytest.mark.parametrize("change", ["nothing", "append", "append and purge"])
async def test_a_purge_that_took_effect_says_so_whatever_follows_it(open_rig: OpenRig, change: str) -> None:
    rig, other = open_rig(), open_rig()
    head = await expired_head(rig)
    await other.append("b", "another's record is between")
    held = rig.log_faults.hold("send", where=is_purge, after=True)
    purging = asyncio.create_task(rig.journal.purge_expired("a", head))
    await held.reached()
    if change != "nothing":
        await other.append("a", "of the next incarnation")
    if change == "append and purge":
        await other.journal.purge("a")
    held.release()
    assert await purging is True


async def test_a_purge_whose_outcome_cannot_be_read_is_unknown(open_rig: OpenRig) -> None:
    rig, other = open_rig(), open_rig()
    head = await expired_head(rig)
    held = rig.log_faults.hold("send", where=is_purge)
    purging = asyncio.create_task(rig.journal.purge_expired("a", head))
    await held.reached()
    await other.append("a", "fresh")
    rig.log_faults.fail("read", OutcomeUnknown("any failure"), times=None)
    rig.log_faults.fail("end", OutcomeUnknown("any failure"), times=None)
    held.release()
    with pytest.raises(OutcomeUnknown):
        await purging
