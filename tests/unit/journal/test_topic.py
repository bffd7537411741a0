"""Opening a topic: its configuration is frozen, checked against the log, and a mismatch raises (rules 1 and 2)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from tests.unit.journal.rig import TOPIC, Rig
from tidebook.core.action import Mark
from tidebook.core.bounds import TICK_AHEAD_MS_MAX
from tidebook.core.errors import Corrupt, Fenced, InvalidInput, OutcomeUnknown, Unavailable
from tidebook.core.event import Event
from tidebook.core.key import Key
from tidebook.core.position import Position
from tidebook.core.record import read_record
from tidebook.core.replication_plan import Pointer, SliceWrites
from tidebook.core.topic_config import TopicConfig
from tidebook.journal.journal import Journal
from tidebook.journal.settings import JournalSettings
from tidebook.store.sqlite import SqliteStore

OpenRig = Callable[..., Rig]


async def recreate_topic(rig: Rig) -> None:
    """Delete the topic and create it again: offsets start at 0."""
    await rig.log.delete_topic(TOPIC)
    await rig.log.create_topic(TOPIC, rig.settings.partitions)


async def test_a_topic_is_created_with_the_config_of_the_settings(rig: Rig) -> None:
    config = await rig.journal.create()
    state = await rig.log.topic(TOPIC)
    assert state is not None
    assert (config.topic_id, config.partitions, config.epoch, config.segment_size) == (state.topic_id, 1, 1, 5)


async def test_a_topic_that_exists_in_the_log_keeps_its_partitions(open_rig: OpenRig) -> None:
    rig = open_rig(partitions=4)
    await rig.log.create_topic(TOPIC, 2)
    assert (await rig.journal.create()).partitions == 2


async def test_the_partition_of_an_id_depends_on_the_frozen_count_of_partitions(open_rig: OpenRig) -> None:
    """Partitions may be added to a topic; two producers with different counts would split a journal."""
    first = open_rig(partitions=4)
    homes = {f"k{i}": (await first.append(f"k{i}", i)).partition for i in range(8)}
    other = open_rig(partitions=9)
    assert {id: (await other.append(id, "more")).partition for id in homes} == homes


async def test_a_recreated_topic_is_not_taken_for_the_old_one(open_rig: OpenRig) -> None:
    rig = open_rig()
    await rig.append("a", 1)
    await rig.replicate()
    await recreate_topic(rig)
    for attempt in (open_rig().read("a"), open_rig().append("a", 2), open_rig().journal.pointer("a")):
        with pytest.raises(Corrupt, match="adopt"):
            await attempt


async def test_a_topic_that_the_log_has_lost_raises(open_rig: OpenRig) -> None:
    rig = open_rig()
    await rig.append("a", 1)
    await rig.log.delete_topic(TOPIC)
    with pytest.raises(Corrupt, match="adopt"):
        await open_rig().read("a")


async def test_a_log_that_ends_below_the_pointer_raises(open_rig: OpenRig) -> None:
    rig = open_rig()
    await rig.append("a", 1)
    await rig.store.apply(SliceWrites(TOPIC, 0, None, Pointer(Position(1, 99), 0), ()))
    with pytest.raises(Corrupt, match="99"):
        await open_rig().read("a")


async def test_a_topic_with_fewer_partitions_than_configured_raises(open_rig: OpenRig) -> None:
    rig = open_rig()
    config = await rig.journal.create()
    await rig.store.set_topic_config(TOPIC, msgspec.structs.replace(config, partitions=3), expected=config)
    with pytest.raises(Corrupt, match="partitions"):
        await open_rig().read("a")


# ---- adopt


async def test_an_adopted_topic_continues_from_what_the_store_has(open_rig: OpenRig) -> None:
    rig = open_rig()
    await rig.append("a", 1, 2)
    await rig.replicate()
    await recreate_topic(rig)
    fresh = open_rig()
    config = await fresh.journal.adopt()
    assert config.epoch == 2
    assert await fresh.read("a") == [1, 2]
    assert (await fresh.append("a", 3, expected=2)).last == 3
    assert await fresh.read("a") == [1, 2, 3]
    await fresh.replicate()
    assert await open_rig().read("a") == [1, 2, 3]
    head = await fresh.store.head(Key(TOPIC, "a"))
    assert head is not None
    assert head.position.epoch == 2


async def test_adopting_a_log_that_fits_loses_nothing_that_is_not_replicated(open_rig: OpenRig) -> None:
    rig = open_rig()
    await rig.append("a", 1)
    assert (await rig.journal.adopt()).epoch == 1
    assert await rig.read("a") == [1]


async def test_records_of_an_older_epoch_are_void_after_an_adoption(open_rig: OpenRig) -> None:
    rig = open_rig()
    await rig.append("a", 1)
    await rig.replicate()
    await rig.append("a", "never replicated")
    await rig.store.apply(SliceWrites(TOPIC, 0, await rig.store.pointer(TOPIC, 0), Pointer(Position(1, 99), 0), ()))
    fresh = open_rig()
    await fresh.journal.adopt()
    assert await fresh.read("a") == [1]
    assert (await fresh.append("a", 2, expected=1)).last == 2
    await fresh.replicate()
    assert await open_rig().read("a") == [1, 2]


async def test_an_adopted_log_may_have_been_truncated(open_rig: OpenRig) -> None:
    rig = open_rig()
    await rig.append("a", 1)
    await rig.append("a", 2)
    await rig.replicate()
    await rig.truncate()
    await rig.store.apply(SliceWrites(TOPIC, 0, await rig.store.pointer(TOPIC, 0), Pointer(Position(1, 99), 0), ()))
    fresh = open_rig()
    assert (await fresh.journal.adopt()).epoch == 2
    assert await fresh.read("a") == [1, 2]
    assert (await fresh.append("a", 3, expected=2)).last == 3
    await fresh.replicate()
    assert await open_rig().read("a") == [1, 2, 3]


async def test_a_process_of_an_older_epoch_is_fenced_by_the_pointer(open_rig: OpenRig) -> None:
    old = open_rig()
    await old.append("a", 1)
    await old.replicate()
    await recreate_topic(old)
    fresh = open_rig()
    await fresh.journal.adopt()
    await fresh.append("a", 2)
    await fresh.replicate()
    with pytest.raises(Fenced, match="open the book again"):
        await old.read("a")


async def test_a_process_of_an_older_epoch_reports_no_success(open_rig: OpenRig) -> None:
    """The append of the slow process is in the log, but void for all others."""
    old = open_rig()
    await old.append("a", 1)
    await old.replicate()
    await old.store.apply(SliceWrites(TOPIC, 0, await old.store.pointer(TOPIC, 0), Pointer(Position(1, 99), 0), ()))
    fresh = open_rig()
    await fresh.journal.adopt()
    for _ in range(2):
        with pytest.raises((Fenced, OutcomeUnknown), match="open the book again"):
            await old.append("a", "void")
    assert await fresh.read("a") == [1]
    await old.journal.close()
    assert (await old.append("a", 2, expected=1)).last == 2


async def test_an_unconfirmed_appender_is_fenced_within_seconds_of_a_new_epoch(
    open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidebook.journal.topic.CHECK_INTERVAL_S", 0.0)
    acts: list[Callable[[Rig], Awaitable[object]]] = [
        lambda rig: rig.append("a", "void", confirm=False),
        lambda rig: rig.journal.append_many([("a", [Event("void")])], confirm=False),
    ]
    for act in acts:
        old, fresh = open_rig(), open_rig()
        await old.append("a", 0, confirm=False)
        await old.replicate()
        await recreate_topic(old)
        await fresh.journal.adopt()
        for number in range(3):  # past the offsets seen in the old log, which would prove a recreated log
            await fresh.append("b", number)

        async def keep_calling(old: Rig = old, act: Callable[[Rig], Awaitable[object]] = act) -> None:
            for _ in range(1000):
                await act(old)

        with pytest.raises(Fenced, match="open the book again"):
            await keep_calling()
        await old.journal.close()
        await act(old)


async def test_an_unconfirmed_appender_continues_while_the_store_is_unavailable(
    open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidebook.journal.topic.CHECK_INTERVAL_S", 0.0)
    rig = open_rig()
    await rig.append("a", 0, confirm=False)
    rig.store_faults.fail("topic_config", Unavailable("the store is down"), times=None)
    for number in range(1, 4):
        await rig.append("a", number, confirm=False)
    rig.store_faults.heal()
    assert await rig.read("a") == [0, 1, 2, 3]


async def test_a_retry_over_an_adoption_makes_no_second_copy(open_rig: OpenRig) -> None:
    rig = open_rig()
    rig.log_faults.fail("send", OutcomeUnknown("no answer"), after=True)
    with pytest.raises(OutcomeUnknown) as caught:
        await rig.append("a", "mine")
    for i in range(20):
        await rig.append("a", i)
    await rig.replicate()
    await recreate_topic(rig)
    fresh = open_rig()
    await fresh.journal.adopt()
    with pytest.raises(OutcomeUnknown, match="too late"):
        await fresh.append("a", "mine", retry=caught.value)
    assert await fresh.journal.pointer("a") == 21


async def test_concurrent_adoptions_lose_no_acknowledged_append(open_rig: OpenRig) -> None:
    """The slower process's mark comes after the append: if the epoch began there, it would never be replicated."""
    rig = open_rig()
    await rig.append("a", 1)
    await rig.replicate()
    await recreate_topic(rig)
    one, other = open_rig(), open_rig()
    held = other.log_faults.hold("append")
    adopting = asyncio.create_task(other.journal.adopt())
    await held.reached()
    config = await one.journal.adopt()
    assert (await one.append("a", 2, expected=1)).last == 2
    held.release()
    assert await adopting == config
    await one.replicate()
    assert await open_rig().read("a") == [1, 2]


async def test_an_interrupted_adoption_is_completed_by_the_next_process(open_rig: OpenRig) -> None:
    rig = open_rig()
    await rig.append("a", 1)
    await rig.append("a", 2)
    await rig.replicate()
    await rig.truncate()
    await rig.store.apply(SliceWrites(TOPIC, 0, await rig.store.pointer(TOPIC, 0), Pointer(Position(1, 99), 7), ()))
    dying = open_rig()
    dying.store_faults.fail("apply", Unavailable("the store is down"))
    with pytest.raises(Unavailable):
        await dying.journal.adopt()
    for fresh in (open_rig(), open_rig()):
        assert await fresh.read("a") == [1, 2]
    assert (await open_rig().journal.adopt()).epoch == 2
    assert (await open_rig().append("a", 3, expected=2)).last == 3
    await rig.replicate()
    assert await open_rig().read("a") == [1, 2, 3]


async def test_an_epoch_begins_above_the_time_that_a_replicator_reached_meanwhile(open_rig: OpenRig) -> None:
    """At equal times, tagged events are ordered by offset, and offsets restart at 0."""
    rig = open_rig()
    await rig.append("a", 1)
    await rig.replicate()
    await recreate_topic(rig)
    fresh = open_rig()
    held = fresh.store_faults.hold("set_topic_config")
    adopting = asyncio.create_task(fresh.journal.adopt())
    await held.reached()
    late = Pointer(Position(1, 99), rig.clock.now_ms() + 5_000)
    await rig.store.apply(SliceWrites(TOPIC, 0, await rig.store.pointer(TOPIC, 0), late, ()))
    held.release()
    await adopting
    pointer = await rig.store.pointer(TOPIC, 0)
    assert pointer is not None
    assert (pointer.position.epoch, pointer.time_ms) == (2, late.time_ms + 1)


async def test_the_tick_of_a_new_epoch_is_above_all_times_of_the_old_one(open_rig: OpenRig) -> None:
    """The log time, folded from the mark, must be above the times of all earlier tagged events."""
    rig = open_rig()
    await rig.append("a", 1)
    await rig.replicate()
    late = Pointer(Position(1, 99), rig.clock.now_ms() + 5_000)
    await rig.store.apply(SliceWrites(TOPIC, 0, await rig.store.pointer(TOPIC, 0), late, ()))
    await recreate_topic(rig)
    config = await open_rig().journal.adopt()
    assert config.began == ((0, late.time_ms + 1),)
    [mark] = (await rig.log.read(TOPIC, 0, start=0, stop=1)).records
    action = read_record(mark.value, limit_bytes=config.limit_bytes)
    assert isinstance(action, Mark)
    assert action.time_ms == late.time_ms + 1


async def test_concurrent_processes_begin_an_epoch_at_the_same_times(
    open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With stamped pointers both are written, and replicators that start from them would disagree on times."""
    rig = open_rig()
    await rig.append("a", 1)
    await rig.replicate()
    await recreate_topic(rig)
    written: list[Pointer] = []
    apply = SqliteStore.apply

    async def noted(self: SqliteStore, writes: SliceWrites) -> None:
        written.append(writes.pointer)
        await apply(self, writes)

    monkeypatch.setattr(SqliteStore, "apply", noted)
    one, other = open_rig(), open_rig()
    held = one.store_faults.hold("apply")
    adopting = asyncio.create_task(one.journal.adopt())
    await held.reached()
    late = Pointer(Position(1, 99), rig.clock.now_ms() + 5_000)
    await rig.store.apply(SliceWrites(TOPIC, 0, await rig.store.pointer(TOPIC, 0), late, ()))
    await other.journal.adopt()
    held.release()
    await adopting
    assert len(written) == 3
    assert len(set(written[1:])) == 1


# ---- settings


@pytest.mark.parametrize(
    "bad",
    [
        {"page_events": 0},
        {"partitions": 0},
        {"segment_size": 0},
        {"segments": -1},
        {"limit_bytes": 0},
        {"snapshot_slots": 0},
        {"barrier": "none"},
        {"follow_s": -1},
        {"no_such": 1},
    ],
    ids=repr,
)
def test_settings_that_are_unknown_or_out_of_range_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(bad, JournalSettings)


async def test_concurrent_processes_agree_on_the_configuration_of_a_new_topic(open_rig: OpenRig) -> None:
    one, other = open_rig(segment_size=3), open_rig(segment_size=7)
    config: list[TopicConfig] = list(await asyncio.gather(one.journal.create(), other.journal.create()))
    assert config[0] == config[1]


@pytest.mark.parametrize(
    "bad",
    [
        lambda journal: journal.append("", [Event(1)]),
        lambda journal: journal.append("a", []),
        lambda journal: journal.append("a", [Event({1})]),
        lambda journal: journal.append("a", [Event(1)], expected=0, at=1),
        lambda journal: journal.append("a", [Event(b"x" * 1_000_001)]),
        lambda journal: journal.append_many([("a", [Event(1)]), ("", [Event(1)])]),
        lambda journal: journal.append_many([5]),
        lambda journal: journal.append_many(5),
        lambda journal: journal.delete("a", to=0),
        lambda journal: journal.save_snapshot("a", seq_nr=0, payload=1),
        lambda journal: journal.save_snapshot("a", seq_nr=1, payload={1}),
    ],
    ids=[
        "id",
        "no events",
        "a set",
        "both",
        "too large",
        "one of many",
        "no pair",
        "no pairs",
        "to",
        "seq_nr",
        "state",
    ],
)
async def test_bad_input_creates_no_topic(rig: Rig, bad: Callable[[Journal], Awaitable[object]]) -> None:
    with pytest.raises(InvalidInput):
        await bad(rig.journal)
    assert await rig.store.topics() == []
    assert await rig.log.topics() == []


async def test_a_topic_whose_log_is_days_behind_the_time_of_the_book_is_not_opened(open_rig: OpenRig) -> None:
    """A tick too far in the future is ignored, so later events would be below what tag queries have delivered."""
    rig = open_rig()
    ahead_ms = rig.clock.now_ms() + 2 * TICK_AHEAD_MS_MAX
    await rig.store.set_topic_config("other", TopicConfig(topic_id="t", partitions=1), expected=None)
    await rig.store.apply(SliceWrites("other", 0, None, Pointer(Position(1, 0), ahead_ms), ()))
    with pytest.raises(Unavailable, match="clock"):
        await rig.append("a", 1)
    rig.clock.advance(TICK_AHEAD_MS_MAX)
    assert (await rig.append("a", 1)).last == 1
