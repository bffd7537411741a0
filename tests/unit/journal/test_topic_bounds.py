"""An open topic: when its calls are refused, when it is checked, and what opening and adopting it cost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from tests.unit.journal.rig import TOPIC, Rig
from tidebook.core.action import Mark
from tidebook.core.bounds import TICK_AHEAD_MS_MAX
from tidebook.core.errors import Corrupt, Fenced, InvalidInput, Unavailable
from tidebook.core.event import Event
from tidebook.core.head import Head
from tidebook.core.position import Position
from tidebook.core.record import decode_record
from tidebook.core.replication_plan import Pointer, SliceWrites
from tidebook.journal.settings import JournalSettings
from tidebook.journal.topic import open_topic
from tidebook.log.port import Outgoing, read_page

OpenRig = Callable[..., Rig]


@pytest.mark.parametrize(
    "call",
    ["append", "append_many", "delete", "purge", "pointer", "head", "read", "tail", "save", "load", "purge_expired"],
)
async def test_every_call_of_a_superseded_topic_is_refused(rig: Rig, call: str) -> None:
    await rig.append("a", 1)
    head = await rig.journal.head("a")
    assert head is not None
    topic = rig.journal._open
    assert topic is not None
    topic._superseded, topic.check_due = Fenced("the topic has moved on"), True
    rig.log_faults.calls.clear()

    async def first(events: AsyncIterator[Any]) -> Any:
        return await anext(events, None)

    def purge_expired(head: Head) -> Awaitable[object]:
        return rig.journal.purge_expired("a", head)

    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "append": lambda: rig.append("a", 2, confirm=False),
        "append_many": lambda: rig.journal.append_many([("a", [Event(2)])], confirm=False),
        "delete": lambda: rig.journal.delete("a", to=1),
        "purge": lambda: rig.journal.purge("a"),
        "pointer": lambda: rig.journal.pointer("a"),
        "head": lambda: rig.journal.head("a"),
        "read": lambda: first(rig.journal.read("a")),
        "tail": lambda: first(rig.journal.tail("a")),
        "save": lambda: rig.journal.save_snapshot("a", seq_nr=1, payload=1),
        "load": lambda: rig.journal.load_snapshot("a"),
        "purge_expired": lambda: purge_expired(head),
    }
    for _ in range(2):
        with pytest.raises(Fenced, match="moved on"):
            await calls[call]()
    assert rig.log_faults.calls["send"] == 0


async def test_a_check_that_finds_nothing_is_repeated_after_its_interval(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.append("a", 1)
    topic = rig.journal._open
    assert topic is not None
    assert not topic.check_due
    for fails in (False, True):
        topic._timer.cancel()
        topic._set_check_due()
        if fails:
            rig.store_faults.fail("topic_config", Unavailable("the store is down"))
        await rig.append("a", 2)
        assert not topic.check_due
        assert topic._check_task is not None
        await topic._check_task
        assert not topic.check_due
        assert not topic._timer.cancelled()
        assert topic._timer.when() > topic.loop.time()


async def test_closing_waits_for_no_check_and_leaves_no_timer(rig: Rig) -> None:
    await rig.append("a", 1)
    topic = rig.journal._open
    assert topic is not None
    topic._set_check_due()
    held = rig.store_faults.hold("topic_config")
    await rig.append("a", 2)
    await held.reached()
    await asyncio.wait_for(rig.journal.close(), 30)
    assert topic._check_task is not None
    assert topic._check_task.cancelled()
    assert topic._timer.cancelled()


async def test_opening_a_topic_whose_epoch_has_begun_writes_nothing(open_rig: OpenRig) -> None:
    rig = open_rig()
    await rig.append("a", 1)
    await rig.replicate()
    await rig._log.delete_topic(TOPIC)
    config = await rig.journal.adopt()
    assert config.began
    late = open_rig()
    topic = await open_topic(late.log, late.store, TOPIC, config, late.settings, late.metrics)
    assert {"setting", "set_setting", "apply", "set_topic_config"}.isdisjoint(late.store_faults.calls)
    assert {"append", "send", "create_topic"}.isdisjoint(late.log_faults.calls)
    await topic.close()


@pytest.mark.parametrize("known", [True, False])
async def test_adopting_a_topic_that_the_log_does_not_have_creates_it(open_rig: OpenRig, known: bool) -> None:
    rig = open_rig(partitions=3, limit_bytes=5000)
    if known:
        await rig.append("a", 1)
        await rig.replicate()
        await rig._log.delete_topic(TOPIC)
    late = open_rig(partitions=2, limit_bytes=7000)
    config = await late.journal.adopt()
    state = await late.log.topic(TOPIC)
    assert state is not None
    assert state.topic_id == config.topic_id
    assert (state.partitions, config.partitions) == ((3, 3) if known else (2, 2))
    assert (config.limit_bytes, config.epoch) == ((5000, 2) if known else (7000, 1))
    assert len(config.began) == (3 if known else 0)
    assert await late.read("a") == ([1] if known else [])


@pytest.mark.parametrize(("ahead_ms", "opens"), [(TICK_AHEAD_MS_MAX, True), (TICK_AHEAD_MS_MAX + 1, False)])
async def test_a_topic_is_opened_if_the_time_of_the_book_is_no_further_ahead_than_a_tick_may_be(
    open_rig: OpenRig, ahead_ms: int, opens: bool
) -> None:
    rig = open_rig()
    now_ms = rig.clock.now_ms()
    await rig.store.set_topic_config("older", JournalSettings().topic_config("id", 1), expected=None)
    await rig.store.apply(SliceWrites("older", 0, None, Pointer(Position(1, 0), now_ms + ahead_ms), ()))
    if opens:
        await rig.append("a", 1)
    else:
        with pytest.raises(Unavailable, match="clock"):
            await rig.append("a", 1)


async def test_a_store_with_one_record_more_than_the_log_does_not_fit_it(open_rig: OpenRig) -> None:
    rig = open_rig()
    await rig.append("a", 1)
    await rig.replicate()
    end = await rig.log.end(TOPIC, 0)
    await rig.store.apply(
        SliceWrites(TOPIC, 0, await rig.store.pointer(TOPIC, 0), Pointer(Position(1, end - 1), 2**40), ())
    )
    assert await open_rig().read("a", barrier="offset") == [1]
    await rig.store.apply(
        SliceWrites(TOPIC, 0, await rig.store.pointer(TOPIC, 0), Pointer(Position(1, end), 2**40), ())
    )
    with pytest.raises(Corrupt, match="ends at"):
        await open_rig().read("a", barrier="offset")


async def test_an_end_below_the_pointer_is_asked_for_again_if_it_may_be_outdated(
    open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, other = open_rig(), open_rig()
    await rig.append("a", 1)
    await rig.replicate()
    ask, ends = other._log.end, list[int]()

    async def outdated(topic: str, partition: int) -> int:
        ends.append(await ask(topic, partition) if ends else 0)
        return ends[-1]

    monkeypatch.setattr(other._log, "end", outdated)
    if other._log.end_is_linearizable:
        with pytest.raises(Corrupt, match="ends at 0"):
            await other.read("a")
    else:
        assert await other.read("a") == [1]
        assert ends[0] < ends[1]


async def test_a_topic_of_the_log_that_holds_other_messages_is_not_taken_for_journals(rig: Rig) -> None:
    await rig.make_topic()
    await rig._log.append(Outgoing(TOPIC, 0, b"key", b"a message of an outbox"))
    with pytest.raises(InvalidInput, match="no journal wrote"):
        await rig.append("a", 1)
    assert await rig.store.topic_config(TOPIC) is None


async def test_a_new_topic_begins_at_the_greatest_time_of_the_book(rig: Rig) -> None:
    """Its appends would otherwise come before events that queries by tag have delivered."""
    for number, time_ms in enumerate((5, 77, 6)):
        await rig.store.set_topic_config(f"older-{number}", JournalSettings().topic_config("id", 1), expected=None)
        await rig.store.apply(SliceWrites(f"older-{number}", 0, None, Pointer(Position(1, 0), time_ms), ()))
    await rig.journal.create()
    [mark] = (await read_page(rig.log, TOPIC, 0, start=0, stop=1)).records
    assert decode_record(mark.value or b"") == Mark(1, 77)


async def test_an_epoch_that_began_in_some_partitions_is_begun_in_the_others(open_rig: OpenRig) -> None:
    """The process that adopted the log has died in between."""
    rig = open_rig(partitions=2)
    for id in ("a", "b", "c", "d"):
        await rig.append(id, 1)
    await rig._log.delete_topic(TOPIC)
    await rig._log.create_topic(TOPIC, 2)
    rig.store_faults.fail("apply", Unavailable("the process dies"), where=lambda writes: writes.partition == 1)
    with pytest.raises(Unavailable):
        await rig.journal.adopt()
    assert sorted(await rig.store.pointers(TOPIC)) == [0]
    late = open_rig(partitions=2)
    config = await late.journal.create()
    pointers = await late.store.pointers(TOPIC)
    assert {number: each.position.epoch for number, each in pointers.items()} == {0: config.epoch, 1: config.epoch}
