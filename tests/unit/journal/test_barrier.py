"""A read may share only a mark that had not been sent when the read began (rule 20)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tests.unit.journal.rig import Rig
from tidebook.core.action import Delete, Mark
from tidebook.core.errors import OutcomeUnknown, Unavailable
from tidebook.core.position import Position
from tidebook.core.record import decode_record
from tidebook.core.replication_plan import Pointer, SliceWrites
from tidebook.log.port import Outgoing

pytestmark = pytest.mark.parametrize("kind", ["like kafka"])

OpenRig = Callable[..., Rig]


def is_mark(record: Outgoing, *_: object) -> bool:
    return isinstance(decode_record(record.value), Mark)


async def test_a_read_does_not_share_a_mark_that_was_sent_before_it_began(open_rig: OpenRig) -> None:
    """A read that starts after an append and shared a mark sent before the append would miss it."""
    rig, other = open_rig(), open_rig()
    await rig.append("a", 1)
    sent = rig.log_faults.hold("send", after=True, where=is_mark)
    first = asyncio.create_task(rig.read("a"))
    await sent.reached()  # the mark is in the log, but not yet acknowledged
    await other.append("a", 2)
    second = asyncio.create_task(rig.read("a"))
    third = asyncio.create_task(rig.read("a"))
    await asyncio.sleep(0)
    sent.release()
    assert await first in ([1], [1, 2])
    assert await second == [1, 2]
    assert await third == [1, 2]


async def test_reads_that_begin_in_the_same_loop_iteration_share_one_mark(rig: Rig) -> None:
    await rig.append("a", 1)
    rig.log_faults.calls.clear()
    assert await asyncio.gather(*(rig.read("a") for _ in range(50))) == [[1]] * 50
    assert rig.log_faults.calls["send"] == 1


async def test_reads_that_begin_while_a_mark_is_in_flight_share_the_next_one(rig: Rig) -> None:
    await rig.append("a", 1)
    rig.log_faults.calls.clear()
    held = rig.log_faults.hold("send", where=is_mark)
    first = asyncio.create_task(rig.read("a"))
    await held.reached()
    rest = [asyncio.create_task(rig.read("a")) for _ in range(20)]
    await asyncio.sleep(0)
    held.release()
    assert await first == [1]
    assert await asyncio.gather(*rest) == [[1]] * 20
    assert rig.log_faults.calls["send"] == 2


async def test_a_failed_mark_fails_only_the_reads_that_share_it(rig: Rig) -> None:
    await rig.append("a", 1)
    rig.log_faults.fail("send", Unavailable("the log is down"), where=is_mark)
    failed = await asyncio.gather(*(rig.read("a") for _ in range(3)), return_exceptions=True)
    assert [type(each) for each in failed] == [Unavailable] * 3
    assert await rig.read("a") == [1]


@pytest.mark.parametrize("act", ["read", "pointer", "delete", "ids", "save", "load"])
async def test_a_call_whose_mark_has_no_answer_is_unavailable_because_it_has_written_nothing(
    rig: Rig, act: str
) -> None:
    await rig.append("a", 1)
    acts: dict[str, Callable[[], Awaitable[object]]] = {
        "read": lambda: rig.read("a"),
        "pointer": lambda: rig.journal.pointer("a"),
        "delete": lambda: rig.journal.delete("a", to=1),
        "ids": lambda: anext(rig.journal.ids()),
        "save": lambda: rig.journal.save_snapshot("a", seq_nr=1, payload=1),
        "load": lambda: rig.journal.load_snapshot("a"),
    }
    rig.log_faults.fail("send", OutcomeUnknown("no answer"), where=is_mark, after=True)
    with pytest.raises(Unavailable, match="no answer"):
        await acts[act]()
    await acts[act]()


async def test_a_delete_that_was_sent_and_not_answered_has_an_unknown_outcome(rig: Rig) -> None:
    await rig.append("a", 1)

    def is_delete(record: Outgoing, *_: object) -> bool:
        return isinstance(decode_record(record.value), Delete)

    rig.log_faults.fail("send", OutcomeUnknown("no answer"), where=is_delete, after=True)
    with pytest.raises(OutcomeUnknown):
        await rig.journal.delete("a", to=1)
    assert await rig.read("a") == []


async def test_a_topic_is_unavailable_if_its_first_mark_has_no_answer(rig: Rig) -> None:
    await rig.store.apply(SliceWrites("older", 0, None, Pointer(Position(1, 0), 77), ()))
    await rig.store.set_topic_config("older", rig.settings.topic_config("id", 1), expected=None)
    rig.log_faults.fail("append", OutcomeUnknown("no answer"), after=True)
    with pytest.raises(Unavailable, match="no answer"):
        await rig.append("a", 1)
    assert (await rig.append("a", 1)).last == 1


async def test_a_cancelled_reader_does_not_cancel_readers_that_share_its_mark(rig: Rig) -> None:
    await rig.append("a", 1)
    held = rig.log_faults.hold("send", where=is_mark)
    impatient = asyncio.create_task(rig.read("a"))
    patient = asyncio.create_task(rig.read("a"))
    await held.reached()
    impatient.cancel()
    held.release()
    assert await patient == [1]


async def test_the_store_is_read_while_the_mark_is_in_flight(rig: Rig) -> None:
    await rig.append("a", 1)
    rig.store_faults.calls.clear()
    held = rig.log_faults.hold("send", where=is_mark)
    head_read = rig.store_faults.hold("head")
    reading = asyncio.create_task(rig.read("a"))
    await held.reached()
    await head_read.reached()
    head_read.release()
    held.release()
    assert await reading == [1]


async def test_the_offset_barrier_writes_nothing(rig: Rig) -> None:
    await rig.append("a", 1)
    rig.log_faults.calls.clear()
    assert await rig.read("a", barrier="offset") == [1]
    assert rig.log_faults.calls["send"] == 0


async def test_the_offset_barrier_includes_all_records_acknowledged_to_this_process(rig: Rig) -> None:
    """A leader that is cut off may report an old end; a read still includes what was acknowledged to this process."""
    await rig.append("a", 1)
    end = await rig.log.end("orders", 0)
    await rig.append("a", 2)

    async def stale(topic: str, partition: int) -> int:
        return end

    partition = rig.journal._open.partitions[0]  # type: ignore[union-attr]
    partition.barriers._log = type("Stale", (), {"end": staticmethod(stale), "end_is_linearizable": False})()
    assert await rig.read("a", barrier="offset") == [1, 2]
