"""Calls of a journal other than append and read: what they return, and what they reject."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.unit.journal.rig import TOPIC, Rig
from tidebook.core.bounds import EVENTS_MAX
from tidebook.core.errors import Conflict, InvalidInput, LogLost, NotFound, Unavailable
from tidebook.core.event import Event
from tidebook.core.key import Key
from tidebook.core.position import FIRST_EPOCH, Position
from tidebook.core.seq_nr import LAST
from tidebook.journal import journal as journals
from tidebook.journal.append import PendingBatch
from tidebook.journal.outcome import Appended
from tidebook.journal.topic import OpenTopic, open_topic
from tidebook.log.port import AcknowledgedBatch, RecordColumns

OpenRig = Callable[..., Rig]


async def test_a_topic_exists_from_its_first_append_on(rig: Rig) -> None:
    assert not await rig.journal.exists()
    with pytest.raises(NotFound):
        await rig.journal.topic_config()
    await rig.append("a", 1)
    assert await rig.journal.exists()
    assert (await rig.journal.topic_config()).epoch == FIRST_EPOCH


async def test_a_head_has_the_last_number_and_a_purged_journal_has_none(rig: Rig) -> None:
    assert await rig.journal.head("a") is None
    done = await rig.append("a", 1, 2)
    head = await rig.journal.head("a", barrier="offset")
    assert head is not None
    assert (head.live, head.seq_nr, head.position) == (True, 2, Position(FIRST_EPOCH, done.offset))
    await rig.journal.purge("a")
    assert await rig.journal.head("a") is None
    assert await rig.journal.pointer("a") is None
    with pytest.raises(InvalidInput):
        await rig.journal.head("a", barrier="none")  # type: ignore[arg-type]


async def test_nothing_is_purged_in_a_missing_topic(open_rig: OpenRig) -> None:
    rig, other = open_rig(), open_rig()
    await rig.append("a", 1)
    head = await rig.journal.head("a")
    assert head is not None
    await rig.journal.close()
    other.journal.topic = "unknown"
    assert await other.journal.purge_expired("a", head) is False
    await other.journal.purge("a")
    assert await rig.read("a") == [1]


async def test_snapshots_have_the_time_of_the_clock_and_the_newest_comes_first(rig: Rig) -> None:
    await rig.append("a", 1, 2, 3)
    for seq_nr in (1, 3):
        await rig.journal.save_snapshot("a", seq_nr=seq_nr, payload={"n": seq_nr})
    head = await rig.journal.head("a")
    assert head is not None
    assert [each.seq_nr for each in await rig.journal.snapshots("a", head)] == [3, 1]
    loaded = await rig.journal.load_snapshot("a", to=2)
    assert loaded is not None
    assert (loaded.seq_nr, loaded.payload) == (1, {"n": 1})
    assert loaded.timestamp == datetime.fromtimestamp(rig.clock.now_ms() / 1000, UTC)
    with pytest.raises(InvalidInput, match="beyond the end"):
        await rig.journal.save_snapshot("a", seq_nr=4, payload=0)
    await rig.journal.delete_snapshots("a", to=1)
    assert [each.seq_nr for each in await rig.journal.snapshots("a", head)] == [3]


@pytest.mark.parametrize("wrap", [list, tuple])
async def test_an_append_has_at_least_one_and_not_too_many_events(rig: Rig, wrap: Callable[[Any], Any]) -> None:
    with pytest.raises(InvalidInput, match="at least one"):
        await rig.journal.append("a", wrap([]))
    with pytest.raises(InvalidInput, match="at most 10,000"):
        await rig.journal.append("a", wrap([Event(1)] * (EVENTS_MAX + 1)))
    assert not await rig.journal.exists()
    assert (await rig.journal.append("a", wrap([Event(1)] * EVENTS_MAX))).last == EVENTS_MAX
    assert (await rig.journal.append("a", wrap([Event(1)]))).last == EVENTS_MAX + 1


@pytest.mark.parametrize("bad", [Event(1), "text", b"bytes", 5, {Event: 1}, None, ["no event"]])
async def test_anything_but_a_list_of_events_is_refused(rig: Rig, bad: Any) -> None:
    with pytest.raises(InvalidInput, match="events"):
        await rig.journal.append("a", bad)
    with pytest.raises(InvalidInput, match="events"):
        await rig.journal.append_many([("a", [Event(1)]), ("b", bad)])
    assert not await rig.journal.exists()


@pytest.mark.parametrize("confirm", [True, False])
async def test_many_appends_in_one_call_have_their_outcomes_in_order(
    open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch, confirm: bool
) -> None:
    """There are more appends than may be in flight, so the first ones are awaited while others are sent."""
    monkeypatch.setattr(journals, "BATCHES_IN_FLIGHT_MAX", 1)
    rig = open_rig(partitions=2)
    monkeypatch.setattr(journals, "BATCH_RECORDS", 3)
    ids = [f"j-{n % 5}" for n in range(16)]
    outcomes = await rig.journal.append_many([(id, [Event(n)]) for n, id in enumerate(ids)], confirm=confirm)
    assert all(isinstance(each, Appended) for each in outcomes)
    if confirm:
        assert [each.last for each in outcomes if isinstance(each, Appended)] == [n // 5 + 1 for n in range(16)]
    for number in range(5):
        assert await rig.read(f"j-{number}") == [n for n in range(16) if n % 5 == number]


async def test_outcomes_are_equal_if_their_numbers_partitions_and_offsets_are(rig: Rig) -> None:
    first = Appended(1, 2, 0, 7)
    again = Appended(1, 2, 0, 7, repeated=True)
    assert (first == again, hash(first) == hash(again), len({first, again})) == (True, True, 1)
    others = [Appended(2, 2, 0, 7), Appended(1, 3, 0, 7), Appended(1, 2, 1, 7), Appended(1, 2, 0, 8), 5]
    assert [first == other for other in others] == [False] * 5


async def test_ids_are_those_of_replicated_and_of_new_journals(open_rig: OpenRig) -> None:
    rig, other = open_rig(partitions=2), open_rig(partitions=2)
    for id in ("a", "b", "c"):
        await rig.append(id, 1)
    await rig.replicate()
    await other.append("d", 1)
    await other.journal.purge("b")
    await other.append("a", 2)
    assert sorted([id async for id in rig.journal.ids()]) == ["a", "c", "d"]


async def test_ids_are_found_although_the_log_is_truncated_while_it_is_searched(open_rig: OpenRig) -> None:
    rig, other = open_rig(), open_rig()
    for id in ("a", "b"):
        await other.append(id, 1)
    await rig.journal.create()
    held = rig.log_faults.hold("read")

    async def ids() -> list[str]:
        return sorted([id async for id in rig.journal.ids()])

    listing = asyncio.create_task(ids())
    await held.reached()
    await other.replicate()
    await other.truncate()
    held.release()
    assert await listing == ["a", "b"]
    await other.append("c", 1)
    lost = LogLost(topic=TOPIC, partition=0, first=0, last=1)
    rig.log_faults.fail("read", lost, times=None)
    with pytest.raises(LogLost):  # it is not replicated
        await ids()


async def test_a_journal_whose_topic_was_adopted_is_opened_again(open_rig: OpenRig) -> None:
    rig = open_rig()
    await rig.append("a", 1)
    await rig.replicate()
    before = await rig.journal.topic_config()
    assert await rig.journal.adopt() == before, "the log fits"
    await rig._log.delete_topic(TOPIC)
    after = await rig.journal.adopt()
    assert after.epoch == before.epoch + 1
    assert (await rig.journal.topic_config()) == after
    await rig.append("a", 2)
    assert await rig.read("a") == [1, 2]


async def opened(rig: Rig) -> OpenTopic:
    """Open the topic as a journal does."""
    config = await rig.journal.create()
    return await open_topic(rig.log, rig.store, TOPIC, config, rig.settings, rig.metrics)


async def test_unconfirmed_appends_of_one_batch_get_their_offsets_and_a_lower_offset_proves_another_log(
    open_rig: OpenRig,
) -> None:
    """The acknowledgements of one partition, as a log like Kafka's reports them."""
    rig = open_rig()
    topic = await opened(rig)
    cache = topic.partitions[0].cache
    before = cache.seen
    sent: list[Any] = []

    class SendLog:
        def send_many(self, columns: Any, batch: PendingBatch) -> None:
            sent.append(batch)

    columns = RecordColumns(TOPIC, [0, 0, 0], [b"a", b"b", b"c"], [b"", b"", b""])
    batch = PendingBatch(["a", "b", "c"], {0: cache}, columns, confirm=False)
    batch.send(SendLog())  # type: ignore[arg-type]
    batch([0, 2], AcknowledgedBatch(0, [before + 5, before + 7], [1, 1]))
    assert cache.seen == before + 7
    batch([1], AcknowledgedBatch(0, [before + 6], [1]))
    assert cache.seen == before + 7
    outcomes = await batch.outcomes()
    assert [(each.first, each.last, each.partition, each.offset) for each in outcomes] == [  # type: ignore[union-attr]
        (None, None, 0, before + 5), (None, None, 0, before + 6), (None, None, 0, before + 7),
    ]  # fmt: skip
    assert sent == [batch]
    await topic.close()


async def test_checked_ids_are_cached_up_to_a_bound_and_bad_ids_are_named(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidebook.journal.topic.ADDRESSES_MAX", 2)
    topic = await opened(rig)
    for id in ("a", "b", "c", "a"):
        assert topic.address(id) == (topic.partitions[0].cache, id.encode())
        assert len(topic._addresses) <= 2
    assert topic.addresses(["a", "z"]) == [topic.address("a"), topic.address("z")]
    bad: Any
    for bad in (["list"], 5, None, ""):
        with pytest.raises(InvalidInput):
            topic.addresses(["a", bad])
    await topic.close()


async def test_an_open_topic_does_not_read_its_config_again(rig: Rig) -> None:
    await rig.append("a", 1)
    rig.store_faults.fail("topic_config", Unavailable("the store is down"), times=None)
    rig.log_faults.fail("topic", Unavailable("the log is down"), times=None)
    await rig.append("a", 2)
    assert await rig.read("a") == [1, 2]
    assert (await rig.store.head(Key(TOPIC, "a"))) is None


@pytest.mark.parametrize(("at", "count", "fits"), [(LAST, 1, True), (LAST - 1, 2, True), (LAST, 2, False)])
async def test_the_last_number_of_a_journal_is_at_most_the_greatest_integer(
    rig: Rig, at: int, count: int, fits: bool
) -> None:
    if not fits:
        with pytest.raises(InvalidInput, match="leaves no room"):
            await rig.append("a", *range(count), at=at)
        return
    assert (await rig.append("a", *range(count), at=at)).last == LAST
    with pytest.raises(Conflict, match="largest"):
        await rig.append("a", "one more")


@pytest.mark.parametrize(
    "bad",
    [{"expected": 1, "at": 2}, {"expected": -1}, {"at": 0}, {"append_id": b"short"}, {"append_id": "x" * 16},
     {"retry": ValueError()}, {"incarnation": Position(FIRST_EPOCH, 0)}],
    ids=repr,
)  # fmt: skip
async def test_arguments_that_contradict_each_other_are_refused(rig: Rig, bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        await rig.append("a", 1, **bad)
    assert not await rig.journal.exists()
