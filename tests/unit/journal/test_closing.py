"""A journal that is closed or adopted while callers wait: each of them gets the right error."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.unit.journal.rig import Rig
from tidebook.core.errors import OutcomeUnknown, Unavailable
from tidebook.core.event import Event

OpenRig = Callable[..., Rig]
pytestmark = pytest.mark.parametrize(
    "kind", ["like kafka"]
)  # a log on which a separate task reads the records of others


async def append_by_another_writer(mine: Rig, other: Rig) -> None:
    """Append a record of another writer, so that the outcome of the next append of `mine` has to be read."""
    await mine.append("a", 0)
    await other.append("a", 1)


async def test_an_append_in_a_closed_journal_fails_and_can_be_retried(open_rig: OpenRig) -> None:
    mine, other = open_rig(follow_s=0), open_rig()
    await append_by_another_writer(mine, other)
    held = mine.log_faults.hold("read")
    appending = asyncio.create_task(mine.append("a", 2))
    await held.reached()
    await mine.journal.close()
    with pytest.raises(OutcomeUnknown, match="closed") as caught:
        await asyncio.wait_for(appending, 5)
    held.release()
    assert (await mine.append("a", 2, retry=caught.value)).last == 3
    assert await other.read("a") == [0, 1, 2]


async def test_every_append_of_append_many_in_a_closed_journal_fails(open_rig: OpenRig) -> None:
    mine, other = open_rig(follow_s=0), open_rig()
    await append_by_another_writer(mine, other)
    held = mine.log_faults.hold("read")
    appending = asyncio.create_task(mine.journal.append_many([("a", [Event(2)]), ("a", [Event(3)])]))
    await held.reached()
    await mine.journal.close()
    reported = await asyncio.wait_for(appending, 5)
    assert [type(each) for each in reported] == [OutcomeUnknown, OutcomeUnknown]


async def test_a_read_in_a_closed_journal_fails_and_is_not_cancelled(open_rig: OpenRig) -> None:
    mine, other = open_rig(follow_s=0), open_rig()
    await append_by_another_writer(mine, other)
    held = mine.log_faults.hold("read")
    reading = asyncio.create_task(mine.read("a"))
    await held.reached()
    await mine.journal.close()
    with pytest.raises(Unavailable, match="closed"):
        await asyncio.wait_for(reading, 5)


async def test_the_cancellation_of_a_reader_is_not_turned_into_an_error(open_rig: OpenRig) -> None:
    mine, other = open_rig(follow_s=0), open_rig()
    await append_by_another_writer(mine, other)
    held = mine.log_faults.hold("read")
    reading = asyncio.create_task(mine.read("a"))
    await held.reached()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading


async def test_adopting_a_topic_whose_log_fits_its_store_does_not_affect_callers(open_rig: OpenRig) -> None:
    mine, other = open_rig(follow_s=0), open_rig()
    await append_by_another_writer(mine, other)
    held = mine.log_faults.hold("read")
    appending = asyncio.create_task(mine.append("a", 2))
    await held.reached()
    assert (await mine.journal.adopt()).epoch == 1
    held.release()
    assert (await asyncio.wait_for(appending, 5)).last == 3
