"""Limits of calls: sizes at their bounds, work in flight, and what a call costs the store and the log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from tests.unit.journal.rig import TOPIC, Rig
from tidebook.core.action import Mark
from tidebook.core.bounds import TICK_AHEAD_MS_MAX
from tidebook.core.errors import Corrupt, Fenced, InvalidInput, OutcomeUnknown, TidebookError, TooLarge, Unavailable
from tidebook.core.event import Event
from tidebook.core.head import Head
from tidebook.core.position import Position
from tidebook.core.record import PLAIN_BYTES_MAX, decode_record
from tidebook.core.replication_plan import Pointer, SliceWrites
from tidebook.core.topic_config import TopicConfig
from tidebook.journal import journal as journals
from tidebook.journal import reader as readers
from tidebook.journal.append import EncodedAppends, encode_append, retry_floor
from tidebook.journal.outcome import Appended
from tidebook.journal.settings import JournalSettings
from tidebook.journal.topic import open_topic
from tidebook.log.port import Outgoing
from tidebook.runtime.clock import RandomIds

OpenRig = Callable[..., Rig]
LIMIT_BYTES = 400
CONFIG = TopicConfig(topic_id="id", partitions=1, limit_bytes=LIMIT_BYTES)
kafka_only = pytest.mark.parametrize("kind", ["like kafka"])


async def turns(count: int = 50) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


# ---- sizes of records


def encoded_alone(events: list[Event]) -> bytes:
    return encode_append(CONFIG, RandomIds(), events)[1]


def encoded_with_others(events: list[Event]) -> bytes:
    return EncodedAppends([[Event(1)], events, [Event(2)]], CONFIG, RandomIds()).values(slice(0, 3))[1]


def encoded_with_an_id(events: list[Event]) -> bytes:
    return encode_append(CONFIG, RandomIds(), events, append_id=b"x" * 16)[1]


@pytest.mark.parametrize("encode", [encoded_alone, encoded_with_others])
def test_a_record_is_never_above_the_limit_and_a_plain_one_is_refused_like_any_other(
    encode: Callable[[list[Event]], bytes],
) -> None:
    fit = 0
    for size in range(LIMIT_BYTES - PLAIN_BYTES_MAX - 3, LIMIT_BYTES + PLAIN_BYTES_MAX + 3):
        events = [Event(b"x" * size)]
        try:
            encoded_with_an_id(events)
        except TooLarge:
            with pytest.raises(TooLarge):
                encode(events)
            continue
        value = encode(events)
        fit += 1
        assert len(value) <= LIMIT_BYTES
        assert decode_record(value).count == 1  # type: ignore[union-attr]
    assert 0 < fit < 2 * PLAIN_BYTES_MAX


@pytest.mark.parametrize("payload", [b"", "", None, b"x"])
def test_an_empty_payload_is_an_event_like_any_other(payload: Any) -> None:
    for encode in (encoded_alone, encoded_with_others, encoded_with_an_id):
        action: Any = decode_record(encode([Event(payload)]))
        again: Any = decode_record(encoded_with_an_id([Event(payload)]))
        assert (action.count, action.body) == (1, again.body)


@pytest.mark.parametrize("append_id", [bytes(15), bytes(17), bytearray(16), "x" * 16])
def test_an_append_id_is_16_bytes(append_id: Any) -> None:
    with pytest.raises(InvalidInput, match="16 bytes"):
        encode_append(CONFIG, RandomIds(), [Event(1)], append_id=append_id)
    action, _ = encode_append(CONFIG, RandomIds(), [Event(1)], append_id=bytes(16))
    assert action is not None
    assert action.append_id == bytes(16)


def test_a_retry_needs_the_id_of_its_append_and_takes_no_other() -> None:
    unknown = OutcomeUnknown("no answer", append_id=b"a" * 16, partition=0, offset=None, floor=7, epoch=CONFIG.epoch)
    action, _ = encode_append(CONFIG, RandomIds(), [Event(1)], retry=unknown)
    assert action is not None
    assert (action.append_id, action.floor) == (b"a" * 16, 7)
    with pytest.raises(InvalidInput, match="excludes append_id"):
        encode_append(CONFIG, RandomIds(), [Event(1)], retry=unknown, append_id=b"a" * 16)
    with pytest.raises(InvalidInput, match="of an append"):
        encode_append(CONFIG, RandomIds(), [Event(1)], retry=OutcomeUnknown("a purge's"))
    assert retry_floor(unknown, CONFIG.epoch + 1) == -1
    assert retry_floor(OutcomeUnknown("no floor", append_id=b"a" * 16, epoch=CONFIG.epoch), CONFIG.epoch) == -1


async def test_a_snapshot_may_be_as_large_as_a_record_and_no_larger(open_rig: OpenRig) -> None:
    rig = open_rig(limit_bytes=300)
    await rig.append("a", 1)
    await rig.journal.save_snapshot("a", seq_nr=1, payload=b"x" * 300)
    with pytest.raises(TooLarge):
        await rig.journal.save_snapshot("a", seq_nr=1, payload=b"x" * 301)
    loaded = await rig.journal.load_snapshot("a")
    assert loaded is not None
    assert loaded.payload == b"x" * 300


async def test_a_snapshot_at_the_number_asked_for_is_loaded(rig: Rig) -> None:
    await rig.append("a", 1, 2, 3)
    for seq_nr in (1, 2, 3):
        await rig.journal.save_snapshot("a", seq_nr=seq_nr, payload=seq_nr)
    for to in (1, 2, 3):
        loaded = await rig.journal.load_snapshot("a", to=to)
        assert loaded is not None
        assert loaded.payload == to


# ---- unconfirmed appends


@pytest.mark.parametrize("many", [False, True])
async def test_an_unconfirmed_append_has_its_numbers_if_a_tail_knows_the_head(rig: Rig, many: bool) -> None:
    """The tail begins at the very start of the log here."""
    await rig.make_topic()
    assert await rig.journal.create()
    assert rig.journal._open is not None
    cache = rig.journal._open.partitions[0].cache
    await cache.head("a")
    first = cache.next_offset
    await cache.reach(await rig.log.end(TOPIC, 0) - 1)
    if many:
        [appended] = await rig.journal.append_many([("a", [Event(1), Event(2)])], confirm=False)
        assert isinstance(appended, Appended)
    else:
        appended = await rig.append("a", 1, 2, confirm=False)
    assert (appended.first, appended.last) == (1, 2)
    assert first == 0
    assert cache.pending_outcomes == {}


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("confirm", [False, True])
async def test_an_append_that_the_tail_met_before_its_acknowledgement_has_its_numbers(
    open_rig: OpenRig, many: bool, confirm: bool
) -> None:
    rig = open_rig(follow_s=0)
    await rig.make_topic()
    await rig.journal.create()
    assert rig.journal._open is not None
    cache = rig.journal._open.partitions[0].cache
    await cache.head("a")
    held = rig.log_faults.hold("send", after=True)
    if many:
        appending: asyncio.Task[Any] = asyncio.create_task(
            rig.journal.append_many([("a", [Event(1)])], confirm=confirm)
        )
    else:
        appending = asyncio.create_task(rig.append("a", 1, confirm=confirm))
    await held.reached()
    await cache.reach(await rig.log.end(TOPIC, 0) - 1, follow=False)
    rig.store_faults.calls.clear()
    rig.log_faults.calls.clear()
    held.release()
    done = await appending
    appended = done[0] if many else done
    assert (appended.first, appended.last) == (1, 1)
    assert cache.pending_outcomes == {}
    assert not rig.store_faults.calls
    assert not rig.log_faults.calls


@pytest.mark.parametrize("many", [False, True])
async def test_without_a_tail_an_unconfirmed_append_has_its_offset_alone(rig: Rig, many: bool) -> None:
    await rig.journal.create()
    assert rig.journal._open is not None
    cache = rig.journal._open.partitions[0].cache
    first = rig.first_offset
    if many:
        outcomes = await rig.journal.append_many([("a", [Event(1)]), ("b", [Event(1)])], confirm=False)
    else:
        outcomes = [await rig.append(id, 1, confirm=False) for id in "ab"]
    found = [(each.first, each.last, each.offset) for each in outcomes if isinstance(each, Appended)]
    assert found == [(None, None, first), (None, None, first + 1)]
    assert (cache.seen, cache.next_offset) == (first + 1, -1)
    assert cache.pending_outcomes == {}


# ---- work in flight


async def test_so_many_batches_of_a_call_are_in_flight_and_no_more(
    open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "BATCH_RECORDS", 2)
    monkeypatch.setattr(journals, "BATCHES_IN_FLIGHT_MAX", 3)
    rig = open_rig()
    await rig.journal.create()
    held = [rig.log_faults.hold("send") for _ in range(20)]
    rig.log_faults.calls.clear()
    items = [(f"j{number}", [Event(number)]) for number in range(20)]
    appending = asyncio.create_task(rig.journal.append_many(items, confirm=False))
    await turns()
    assert rig.log_faults.calls["send"] == 8
    for each in held[:2]:
        each.release()
    while rig.log_faults.calls["send"] < 10:  # noqa: ASYNC110 - only yields to other tasks
        await asyncio.sleep(0)
    await turns()
    assert rig.log_faults.calls["send"] == 10
    for each in held:
        each.release()
    assert len(await appending) == 20


async def test_other_tasks_run_between_the_batches_of_a_call(
    open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "BATCH_RECORDS", 1)
    rig = open_rig()
    await rig.journal.create()
    rig.log_faults.calls.clear()
    seen: set[int] = set()

    async def watch() -> None:
        while rig.log_faults.calls["send"] < 10:
            seen.add(rig.log_faults.calls["send"])
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    await rig.journal.append_many([(f"j{number}", [Event(number)]) for number in range(10)], confirm=False)
    await watching
    assert len(seen) > 5


async def test_heads_are_resolved_so_many_at_a_time_and_each_failure_is_its_appends(
    open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "HEADS_IN_FLIGHT_MAX", 2)
    rig = open_rig()
    await rig.journal.create()
    rig.store_faults.fail("head", Unavailable("one fails"), where=lambda key: key.id == "b")
    held = [rig.store_faults.hold("head") for _ in range(5)]
    rig.store_faults.calls.clear()
    appending = asyncio.create_task(rig.journal.append_many([(id, [Event(id)]) for id in "abcdef"]))
    for number, each in enumerate(held):
        await asyncio.wait_for(each.reached(), 30)
        await turns()
        assert rig.store_faults.calls["head"] <= 2 + 2 * ((number + 1) // 2)
        each.release()
    outcomes = await appending
    assert [type(each).__name__ for each in outcomes] == ["Appended", "Unavailable", *["Appended"] * 4]
    assert await rig.journal.pointer("b") is None
    assert await rig.journal.pointer("f") == 1


async def test_if_the_first_heads_all_fail_the_rest_are_not_asked_for(
    open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "HEADS_IN_FLIGHT_MAX", 2)
    rig = open_rig()
    await rig.append("known", 0)
    rig.store_faults.fail("head", Unavailable("the store is down"), times=None)
    rig.store_faults.calls.clear()
    ids = ["a", "b", "known", "c", "d", "e"]
    outcomes = await rig.journal.append_many([(id, [Event(id)]) for id in ids])
    failed = [id for id, each in zip(ids, outcomes, strict=True) if isinstance(each, TidebookError)]
    assert failed == ["a", "b", "c", "d", "e"]
    assert rig.store_faults.calls["head"] == 2


# ---- a topic that was superseded


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


# ---- opening


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
async def test_a_topic_is_opened_up_to_the_time_that_a_tick_may_be_ahead(
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


async def test_a_store_that_is_one_record_ahead_of_the_log_does_not_fit_it(open_rig: OpenRig) -> None:
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


# ---- reading


async def test_a_read_of_no_topic_creates_none_and_an_unknown_barrier_is_refused(rig: Rig) -> None:
    assert await rig.read("a") == []
    assert await rig.journal.pointer("a") is None
    assert await rig.journal.load_snapshot("a") is None
    assert [id async for id in rig.journal.ids()] == []
    await rig.journal.purge("a")
    assert not await rig.journal.exists()
    for bad in ("never", "", 1):
        with pytest.raises(InvalidInput, match="'mark' or 'offset'"):
            await rig.read("a", barrier=bad)


@kafka_only
@pytest.mark.parametrize("barrier", ["mark", "offset"])
async def test_the_barrier_of_the_settings_is_used_unless_another_is_given(open_rig: OpenRig, barrier: str) -> None:
    rig: Rig = open_rig(barrier=barrier)
    await rig.append("a", 1)
    for given, marks in ((None, barrier == "mark"), ("mark", True), ("offset", False)):
        rig.log_faults.calls.clear()
        assert await rig.read("a", barrier=given) == [1]
        assert rig.log_faults.calls["send"] == marks
        rig.log_faults.calls.clear()
        assert await rig.journal.pointer("a", barrier=given) == 1
        assert rig.log_faults.calls["send"] == marks


@kafka_only
async def test_a_tail_sends_one_mark_however_often_it_is_woken(open_rig: OpenRig) -> None:
    rig, other = open_rig(), open_rig()
    await other.append("a", 1)
    await rig.journal.create()
    rig.log_faults.calls.clear()
    tail = rig.journal.tail("a")
    for number in range(1, 4):
        assert (await anext(tail)).payload == number
        await other.append("a", number + 1)
    assert rig.log_faults.calls["send"] == 1


async def test_a_tail_that_is_woken_by_others_reads_no_rows(open_rig: OpenRig) -> None:
    rig, other = open_rig(), open_rig()
    await other.append("a", 1)
    await other.replicate()
    tail = rig.journal.tail("a")
    assert (await anext(tail)).payload == 1
    waiting: asyncio.Task[Any] = asyncio.create_task(anext(tail))  # type: ignore[arg-type]
    held = rig.log_faults.hold("wait")
    await held.reached()
    rig.store_faults.calls.clear()
    held.release()
    again = rig.log_faults.hold("wait")
    await other.append("b", "wakes it")
    await again.reached()
    assert rig.store_faults.calls["events"] == 0
    again.release()
    await other.append("a", 2)
    assert (await waiting).payload == 2


async def test_a_tail_begins_at_its_start_and_waits_for_a_number_that_is_not_there_yet(rig: Rig) -> None:
    await rig.append("a", 1, 2, 3)
    tail = rig.journal.tail("a", start=3)
    assert (await anext(tail)).payload == 3
    late = rig.journal.tail("a", start=5)
    waiting: asyncio.Task[Any] = asyncio.create_task(anext(late))  # type: ignore[arg-type]
    await turns()
    await rig.append("a", 4)
    await rig.append("a", 5)
    assert (await waiting).payload == 5
    assert (await anext(tail)).payload == 4


async def test_a_tail_goes_on_with_the_first_event_of_the_next_incarnation(rig: Rig) -> None:
    await rig.append("a", 1, 2, 3)
    tail = rig.journal.tail("a", start=2)
    assert [(await anext(tail)).payload for _ in range(2)] == [2, 3]
    await rig.journal.purge("a")
    await rig.append("a", "new 1", "new 2")
    assert [(await anext(tail)).payload for _ in range(2)] == ["new 1", "new 2"]
    await rig.journal.delete("a", to=2)
    await rig.append("a", "new 3")
    assert (await anext(tail)).payload == "new 3"


async def test_a_read_that_ends_within_the_stores_rows_reads_no_tail_twice(open_rig: OpenRig) -> None:
    rig = open_rig(tail_bytes_max=1)
    await rig.append("a", 1, 2)
    await rig.replicate()
    await rig.append("a", "a long tail", "that is not kept")
    assert await rig.read("a", end=2) == [1, 2]
    assert rig.metrics.counted("read_tail_retried") == 0
    assert await rig.read("a", end=3) == [1, 2, "a long tail"]
    assert rig.metrics.counted("read_tail_retried") == 1


async def test_a_delete_in_a_topic_that_does_not_exist_creates_it(rig: Rig) -> None:
    await rig.journal.delete("a", to=7)
    assert await rig.journal.exists()
    assert (await rig.append("a", 8)).first == 8


@kafka_only
async def test_where_a_view_comes_from_is_counted(open_rig: OpenRig) -> None:
    rig = open_rig()
    await rig.append("a", 1, 2)
    await rig.replicate()
    names = ("read_without_store", "read_head_cached", "read_store_only")

    async def counts(barrier: str) -> list[int]:
        before = [rig.metrics.counted(name) for name in names]
        assert await rig.read("a", barrier=barrier) == [1, 2]
        return [int(rig.metrics.counted(name) - was) for name, was in zip(names, before, strict=True)]

    assert await counts("mark") == [0, 1, 0]
    assert rig.journal._open is not None
    rig.journal._open.partitions[0].cache.heads.clear()
    assert await counts("mark") == [0, 0, 0], "the mark is after the pointer"
    await rig.replicate()
    rig.journal._open.partitions[0].cache.heads.clear()
    rig.journal._open.partitions[0].cache.known_pointer = None
    assert await counts("offset") == [0, 0, 1]
    fresh = open_rig()
    await fresh.append("b", 1)
    fresh.store_faults.fail("pointer", Unavailable("the store is down"), times=None)
    fresh.store_faults.fail("head", Unavailable("the store is down"), times=None)
    assert await fresh.read("b") == [1]
    assert fresh.metrics.counted("read_without_store") == 1


def is_mark(record: Outgoing, *_: object) -> bool:
    return isinstance(decode_record(record.value), Mark)


@kafka_only
@pytest.mark.parametrize("given", [{}, {"start": 3}, {"end": 4}, {"start": 1, "end": 3}], ids=str)
async def test_rows_of_a_known_journal_are_requested_while_the_mark_is_on_its_way(
    open_rig: OpenRig, given: dict[str, int]
) -> None:
    rig = open_rig(page_events=10)
    await rig.append("a", *range(1, 6))
    await rig.journal.delete("a", to=1)
    await rig.replicate()
    expected = [number for number in range(2, 6) if given.get("start", 1) <= number <= given.get("end", 9)]
    assert await rig.read("a", **given) == expected
    rig.store_faults.calls.clear()
    discarded = rig.metrics.counted("read_rows_discarded")
    mark, rows = rig.log_faults.hold("send", where=is_mark), rig.store_faults.hold("events")
    reading = asyncio.create_task(rig.read("a", **given))
    await asyncio.wait_for(rows.reached(), 30)
    rows.release()
    await mark.reached()
    mark.release()
    assert await reading == expected
    assert rig.metrics.counted("read_rows_discarded") == discarded
    assert rig.store_faults.calls["events"] == 1


@kafka_only
@pytest.mark.parametrize("given", [{"start": 6}, {"end": 1}], ids=str)
async def test_no_rows_are_requested_where_a_known_journal_has_none(open_rig: OpenRig, given: dict[str, int]) -> None:
    rig = open_rig(page_events=10)
    await rig.append("a", *range(1, 6))
    await rig.journal.delete("a", to=1)
    await rig.replicate()
    for _ in range(2):
        assert await rig.read("a", **given) == []
    assert rig.store_faults.calls["events"] == 0


@kafka_only
async def test_rows_of_a_journal_with_gaps_are_not_requested_in_advance(
    open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "SPARSE_IDS_MAX", 2)
    rig = open_rig(page_events=4)
    for id in "abc":
        await rig.append(id, 1)
        await rig.append(id, 9, at=9)
    await rig.replicate()
    assert rig.journal._open is not None
    reader = rig.journal._open.partitions[0]
    for id, sparse in (("a", {"a"}), ("b", {"a", "b"}), ("c", {"c"})):
        assert await rig.read(id) == [1, 9]
        assert reader._sparse_ids == sparse
    mark = rig.log_faults.hold("send", where=is_mark)
    rig.store_faults.calls.clear()
    reading = asyncio.create_task(rig.read("c"))
    await mark.reached()
    await turns()
    assert rig.store_faults.calls["events"] == 0
    mark.release()
    assert await reading == [1, 9]


@kafka_only
async def test_pages_after_the_first_are_requested_before_they_are_wanted(open_rig: OpenRig) -> None:
    rig = open_rig(page_events=4, segment_size=1000)
    await rig.append("a", *range(40))
    await rig.replicate()
    fresh = open_rig(page_events=4, segment_size=1000)
    events = fresh.journal.read("a")
    assert (await anext(events)).payload == 0
    await turns()
    assert fresh.store_faults.calls["events"] > 2
    assert [event.payload async for event in events] == list(range(1, 40))
    assert fresh.store_faults.calls["events"] <= 12


async def test_other_tasks_run_between_the_pages_of_a_read(open_rig: OpenRig) -> None:
    rig = open_rig(page_events=2)
    await rig.append("a", *range(20))
    await rig.replicate()
    read: list[Any] = []
    seen: set[int] = set()

    async def watch() -> None:
        while len(read) < 20:
            seen.add(len(read))
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    async for event in rig.journal.read("a"):
        read.append(event.payload)
    await watching
    assert len(seen) > 5
