"""Limits of calls of a journal: snapshots, work in flight, tails, and topics that do not exist."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.unit.journal.rig import TOPIC, Rig
from tidebook.core.errors import Corrupt, InvalidInput, TidebookError, TooLarge, Unavailable
from tidebook.core.event import Event
from tidebook.journal import journal as journals
from tidebook.journal.outcome import Appended
from tidebook.runtime import tracing

OpenRig = Callable[..., Rig]
kafka_only = pytest.mark.parametrize("kind", ["like kafka"])


async def let_tasks_run(count: int = 50) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_snapshot_may_be_as_large_as_a_record_and_no_larger(open_rig: OpenRig) -> None:
    rig = open_rig(limit_bytes=300)
    await rig.append("a", 1)
    await rig.journal.save_snapshot("a", seq_nr=1, payload=b"x" * 300)
    with pytest.raises(TooLarge):
        await rig.journal.save_snapshot("a", seq_nr=1, payload=b"x" * 301)
    loaded = await rig.journal.load_snapshot("a")
    assert loaded is not None
    assert loaded.payload == b"x" * 300


async def test_a_snapshot_at_the_requested_number_is_loaded(rig: Rig) -> None:
    await rig.append("a", 1, 2, 3)
    for seq_nr in (1, 2, 3):
        await rig.journal.save_snapshot("a", seq_nr=seq_nr, payload=seq_nr)
    for to in (1, 2, 3):
        loaded = await rig.journal.load_snapshot("a", to=to)
        assert loaded is not None
        assert loaded.payload == to


async def test_the_batches_of_a_call_in_flight_are_bounded(open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "BATCH_RECORDS", 2)
    monkeypatch.setattr(journals, "BATCHES_IN_FLIGHT_MAX", 3)
    rig = open_rig()
    await rig.journal.create()
    held = [rig.log_faults.hold("send") for _ in range(20)]
    rig.log_faults.calls.clear()
    items = [(f"j{number}", [Event(number)]) for number in range(20)]
    appending = asyncio.create_task(rig.journal.append_many(items, confirm=False))
    await let_tasks_run()
    assert rig.log_faults.calls["send"] == 8
    for each in held[:2]:
        each.release()
    while rig.log_faults.calls["send"] < 10:  # noqa: ASYNC110 - only yields to other tasks
        await asyncio.sleep(0)
    await let_tasks_run()
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


async def test_heads_are_resolved_in_bounded_groups_and_each_failure_is_that_of_its_append(
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
        await let_tasks_run()
        assert rig.store_faults.calls["head"] <= 2 + 2 * ((number + 1) // 2)
        each.release()
    outcomes = await appending
    assert [type(each).__name__ for each in outcomes] == ["Appended", "Unavailable", *["Appended"] * 4]
    assert [each.last for each in outcomes if isinstance(each, Appended)] == [1] * 5
    assert await rig.journal.pointer("b") is None
    assert await rig.journal.pointer("f") == 1


async def test_if_the_first_heads_all_fail_the_rest_are_not_requested(
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


async def test_a_read_of_a_missing_topic_does_not_create_it_and_an_unknown_barrier_is_refused(rig: Rig) -> None:
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
    await let_tasks_run()
    await rig.append("a", 4)
    await rig.append("a", 5)
    assert (await waiting).payload == 5
    assert (await anext(tail)).payload == 4


async def test_a_tail_continues_with_the_first_event_of_the_next_incarnation(rig: Rig) -> None:
    await rig.append("a", 1, 2, 3)
    tail = rig.journal.tail("a", start=2)
    assert [(await anext(tail)).payload for _ in range(2)] == [2, 3]
    await rig.journal.purge("a")
    await rig.append("a", "new 1", "new 2")
    assert [(await anext(tail)).payload for _ in range(2)] == ["new 1", "new 2"]
    await rig.journal.delete("a", to=2)
    await rig.append("a", "new 3")
    assert (await anext(tail)).payload == "new 3"


async def test_a_delete_in_a_topic_that_does_not_exist_creates_it(rig: Rig) -> None:
    await rig.journal.delete("a", to=7)
    assert await rig.journal.exists()
    assert (await rig.append("a", 8)).first == 8


@pytest.mark.parametrize("call", ["append", "read", "adopt", "create", "pointer", "ids"])
async def test_a_journal_that_was_created_before_a_fork_refuses_every_call(rig: Rig, call: str) -> None:
    rig.journal._generation -= 1
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "append": lambda: rig.append("a", 1),
        "read": lambda: rig.read("a"),
        "adopt": rig.journal.adopt,
        "create": rig.journal.create,
        "pointer": lambda: rig.journal.pointer("a"),
        "ids": lambda: anext(rig.journal.ids()),
    }
    with pytest.raises(InvalidInput, match="fork"):
        await calls[call]()


@pytest.mark.parametrize("is_on", [True, False])
async def test_many_appends_are_one_span_of_a_trace_which_their_events_carry(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, is_on: bool
) -> None:
    spans: list[tuple[str, dict[str, Any]]] = []

    @contextmanager
    def span(name: str, **attributes: Any) -> Iterator[str]:
        spans.append((name, attributes))
        yield "the span"

    def with_context(events: list[Event], begun: Any) -> list[Event]:
        assert begun == "the span"
        return [Event(event.payload, metadata={"traced": True}) for event in events]

    await rig.journal.create()
    monkeypatch.setattr(tracing, "is_on", lambda: is_on)
    monkeypatch.setattr(tracing, "span", span)
    monkeypatch.setattr(tracing, "with_context", with_context)
    await rig.journal.append_many([(id, [Event(id)]) for id in "ab"])
    assert spans == ([("journal.append_many", {"topic": TOPIC, "appends": 2})] if is_on else [])
    monkeypatch.undo()
    read = [event.metadata async for event in rig.journal.read("b")]
    assert read == ([{"traced": True}] if is_on else [None])


@kafka_only
async def test_a_purge_of_an_expired_journal_does_not_make_its_process_follow_the_log(open_rig: OpenRig) -> None:
    rig, other = open_rig(), open_rig()
    await rig.journal.create()
    await rig.replicate()
    await rig.append("a", 1)
    assert rig.journal._open is not None
    head = rig.journal._open.partitions[0].cache.heads["a"]
    assert head is not None
    await other.append("b", "precedes the purge")
    rig.log_faults.calls.clear()
    assert await rig.journal.purge_expired("a", head) is True
    await let_tasks_run()
    assert rig.log_faults.calls["wait"] == 0


@pytest.mark.parametrize("confirm", [True, False])
async def test_many_appends_to_a_recreated_log_are_refused_and_not_sent(rig: Rig, confirm: bool) -> None:
    await rig.append("a", 1)
    assert rig.journal._open is not None
    assert rig.journal._open.partitions[0].cache.is_recreated(0, 5)
    rig.log_faults.calls.clear()
    with pytest.raises(Corrupt, match="created again"):
        await rig.journal.append_many([("a", [Event(2)])], confirm=confirm)
    assert rig.log_faults.calls["send"] == 0
