"""How long each part of the replication waits, and what ends a wait: in virtual time, over a log and a store in memory.

Fractions are exact, so that times are.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.simulation.virtual_time import VirtualTimeLoop
from tidebook.core.action import Mark
from tidebook.core.errors import Corrupt, Fenced, LogLost, OutcomeUnknown, TidebookError, Unavailable
from tidebook.core.position import Position
from tidebook.core.record import encode_record
from tidebook.core.replication_plan import Pointer, SliceWrites
from tidebook.core.topic_config import TopicConfig
from tidebook.log.port import Record, RecordPage, TopicState
from tidebook.replication import inline, partition, tail, ticks
from tidebook.replication.inline import InlineReplication, NoLock
from tidebook.replication.partition import LogAndStore, PartitionReplicator
from tidebook.replication.tail import ReplicationTail
from tidebook.replication.ticks import LOOK_EVERY_S, Ticker, TickIntervals
from tidebook.runtime.metrics import Metrics
from tidebook.testing.clock import ManualClock
from tidebook.testing.conformance.store_slices import newer_version
from tidebook.testing.faults import Faults

TOPIC = "orders"
CONFIG = TopicConfig(topic_id="t", partitions=2)
MARK = encode_record(Mark(1), limit_bytes=1_000)


def now_s() -> float:
    return asyncio.get_running_loop().time()


class Memory:
    """The records of a topic's partitions, and how far each is replicated."""

    def __init__(self) -> None:
        self.records: dict[int, list[Record]] = {0: [], 1: []}
        self.replicated: dict[int, Pointer] = {}
        #: The time of each slice, its partition and its last offset.
        self.applied: list[tuple[float, int, int]] = []
        #: The time of each read, and where it began.
        self.reads: list[tuple[float, int]] = []
        self.configs = {TOPIC: CONFIG}
        self.settings: dict[str, str] = {}
        self.faults = Faults()
        self._news = asyncio.Condition()

    @property
    def parts(self) -> LogAndStore:
        port: Any = self.faults.around(self)
        return LogAndStore(port, port)

    async def put(self, partition: int = 0, value: bytes = MARK) -> None:
        records = self.records[partition]
        records.append(Record(len(records), 0, None, value))
        async with self._news:
            self._news.notify_all()

    async def read(
        self, topic: str, partition: int, *, start: int, stop: int, key: bytes | None = None, limit: int
    ) -> RecordPage:
        self.reads.append((now_s(), start))
        records = tuple(self.records[partition][start : min(stop, start + limit)])
        return RecordPage(records, start + len(records))

    async def wait(self, topic: str, partition: int, *, offset: int, timeout_s: float | None = None) -> bool:
        try:
            async with asyncio.timeout(timeout_s), self._news:
                await self._news.wait_for(lambda: len(self.records[partition]) > offset)
        except TimeoutError:
            return False
        return True

    async def topic(self, topic: str) -> TopicState:
        return TopicState(topic, CONFIG.topic_id, CONFIG.partitions)

    async def start(self, topic: str, partition: int) -> int:
        return 0

    async def end(self, topic: str, partition: int) -> int:
        return len(self.records[partition])

    async def topics(self) -> list[str]:
        return list(self.configs)

    async def topic_config(self, topic: str) -> TopicConfig | None:
        return self.configs.get(topic)

    async def tags(self) -> AsyncIterator[str]:
        for tag in list[str]():
            yield tag

    async def setting(self, name: str) -> str | None:
        return self.settings.get(name)

    async def set_setting(self, name: str, value: str, *, expected: str | None) -> bool:
        self.settings[name] = value
        return True

    async def wait_any(self, *, timeout_s: float, since: int) -> int:
        await asyncio.sleep(timeout_s)
        return since

    async def pointers(self, topic: str) -> dict[int, Pointer]:
        return self.replicated

    async def pointer(self, topic: str, partition: int) -> Pointer | None:
        return self.replicated.get(partition)

    async def heads(self, topic: str, ids: list[str]) -> dict[str, Any]:
        return {}

    async def apply(self, writes: SliceWrites) -> None:
        if self.replicated.get(writes.partition) != writes.began:
            raise Fenced("another replicator has moved the pointer")
        self.replicated[writes.partition] = writes.pointer
        self.applied.append((now_s(), writes.partition, writes.pointer.position.offset))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Coroutine[Any, Any, None]], None]]:
    """Run a program in virtual time, which is also the time of the modules under test."""
    loop = VirtualTimeLoop()
    for module in (partition, inline):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=loop.time))
    for module in (partition, tail, inline):
        monkeypatch.setattr(module, "RETRY_FIRST_S", 0.125)
    yield loop.run
    loop.close()


Run = Callable[[Coroutine[Any, Any, None]], None]


def tail_of(memory: Memory, *partitions: int, slice_every_s: float = 0.0, wait_s: float = 0.0) -> ReplicationTail:
    configs = {(TOPIC, each): CONFIG for each in partitions or (0,)}
    return ReplicationTail(memory.parts, configs, slice_every_s=slice_every_s, wait_s=wait_s)


async def ended_at(running: Awaitable[None], error: type[TidebookError] | None = None) -> float:
    """Return the time at which something ends, with an error if one is given."""
    if error is None:
        await running
    else:
        with pytest.raises(error):
            await running
    return now_s()


# ---- a tail


def test_the_slices_of_a_busy_partition_begin_a_while_after_one_another(run: Run) -> None:
    async def program() -> None:
        memory = Memory()
        tail = tail_of(memory, slice_every_s=1.0)
        running = asyncio.ensure_future(tail.run())
        for _ in range(5):  # at 0.0, 0.25, 0.5, 0.75 and 1.0
            await memory.put()
            await asyncio.sleep(0.25)
        await asyncio.sleep(2.0)
        await memory.put()
        await asyncio.sleep(0.5)
        tail.stop()
        assert await ended_at(running) == 3.75, "a stop ends the pause"
        assert [at_s for at_s, *_ in memory.applied] == [0.0, 1.0, 3.25]
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(program())


def test_a_tail_that_waits_for_records_leaves_no_tasks_behind(run: Run) -> None:
    async def program() -> None:
        memory = Memory()
        tail = tail_of(memory)
        running = asyncio.ensure_future(tail.run())
        tasks = []
        for _ in range(5):
            await memory.put()
            await asyncio.sleep(1.0)
            tasks.append(len(asyncio.all_tasks()))
        assert tasks == tasks[:1] * 5
        tail.stop()
        await running
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(program())


def test_a_tail_with_stops_does_not_pause_between_its_slices(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail, "PAGE_RECORDS", 1)

    async def program() -> None:
        memory = Memory()
        for _ in range(4):
            await memory.put()
        assert await ended_at(tail_of(memory, slice_every_s=9.0).run({(TOPIC, 0): 3})) == 0.0
        assert [offset for *_, offset in memory.applied] == [0, 1, 2]

    run(program())


def test_a_tail_reads_on_from_where_another_replicator_has_brought_its_partition(run: Run) -> None:
    async def program() -> None:
        memory = Memory()
        tail_ = tail_of(memory)
        running = asyncio.ensure_future(tail_.run())
        await asyncio.sleep(1.0)
        memory.records[0] = [Record(offset, 0, None, MARK) for offset in range(5)]  # nothing wakes the tail
        memory.replicated[0] = Pointer(Position(1, 3), 0)
        await asyncio.sleep(tail.CHECK_EVERY_S)
        assert memory.reads == [(tail.CHECK_EVERY_S, 4)]
        assert memory.applied == [(tail.CHECK_EVERY_S, 0, 4)]
        tail_.stop()
        await running

    run(program())


@pytest.mark.parametrize("error", [Unavailable("it is away"), OutcomeUnknown("no answer")])
@pytest.mark.parametrize("call", ["pointer", "wait", "read"])
def test_a_tail_retries_with_growing_pauses_until_its_time_is_over(run: Run, call: str, error: TidebookError) -> None:
    async def program() -> None:
        memory = Memory()
        await memory.put()
        memory.faults.fail(call, error, times=None)
        assert await ended_at(tail_of(memory, wait_s=0.875).run(), type(error)) == 0.875
        assert memory.faults.calls[call] == 4  # at 0.0, 0.125, 0.375 and 0.875

    run(program())


def test_a_tail_that_is_stopped_while_the_log_is_away_ends_at_once(run: Run) -> None:
    async def program() -> None:
        memory = Memory()
        await memory.put()
        memory.faults.fail("read", Unavailable("it is away"), times=None)
        tail = tail_of(memory, wait_s=60.0)
        running = asyncio.ensure_future(tail.run())
        await asyncio.sleep(0.25)
        tail.stop()
        assert await ended_at(running, Unavailable) == 0.25

    run(program())


def test_an_error_of_one_partition_ends_the_tail_after_the_slices_in_progress(run: Run) -> None:
    async def program() -> None:
        memory = Memory()
        await memory.put(0)
        held = memory.faults.hold("apply", where=lambda writes: writes.partition == 0)
        running = asyncio.ensure_future(tail_of(memory, 0, 1).run())
        await held.reached()
        memory.faults.fail("read", LogLost(topic=TOPIC, partition=1, first=0, last=0))
        await memory.put(1)
        await asyncio.sleep(5.0)
        assert not running.done()
        held.release()
        assert await ended_at(running, LogLost) == 5.0
        assert memory.applied == [(5.0, 0, 0)]

    run(program())


def test_a_tail_whose_partition_is_stopped_waits_for_its_end(run: Run) -> None:
    async def program() -> None:
        memory = Memory()
        await memory.put()
        await memory.put(value=newer_version())
        endless = tail_of(memory)
        running = asyncio.ensure_future(endless.run())
        await asyncio.sleep(100.0)
        assert (endless.replicators[TOPIC, 0].stopped is None, running.done()) == (False, False)
        endless.stop()
        assert await ended_at(running) == 100.0
        assert await ended_at(tail_of(memory).run({(TOPIC, 0): 2})) == 100.0, "with stops it ends"

    run(program())


# ---- a partition


def replicator(memory: Memory, *, wait_s: float = 0.0) -> PartitionReplicator:
    return PartitionReplicator(memory.parts, TOPIC, 0, CONFIG, wait_s=wait_s)


@pytest.mark.parametrize("error", [Unavailable("it is away"), OutcomeUnknown("no answer")])
def test_a_slice_is_retried_with_growing_pauses_until_its_time_is_over(run: Run, error: TidebookError) -> None:
    async def program() -> None:
        memory = Memory()
        await memory.put()
        memory.faults.fail("apply", error, times=None)
        for wait_s, end_s, tries in ((0.875, 0.875, 4), (0.75, 0.375, 3), (0.0, 0.0, 1)):
            began_s, before = now_s(), memory.faults.calls["apply"]
            running = replicator(memory, wait_s=wait_s).replicate(memory.records[0])
            assert await ended_at(running, type(error)) == began_s + end_s
            assert memory.faults.calls["apply"] - before == tries

    run(program())


def test_a_slice_that_others_fence_is_planned_again_so_many_times_with_pauses(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition, "FENCED_MAX", 3)
    monkeypatch.setattr(partition, "FENCED_WAIT_S", 0.5)

    async def program() -> None:
        memory = Memory()
        await memory.put()
        memory.faults.fail("apply", Fenced("another was faster"), times=4)
        assert await ended_at(replicator(memory).replicate(memory.records[0]), Fenced) == 1.5
        memory.faults.fail("apply", Fenced("another was faster"), times=3)
        assert await ended_at(replicator(memory).replicate(memory.records[0])) == 3.0
        assert memory.applied == [(3.0, 0, 0)]

    run(program())


# ---- a ticker


class ScriptedTicker(Ticker):
    """A ticker whose steps are recorded, and end as the script says."""

    def __init__(self, store: object, *script: float | Exception, intervals: TickIntervals) -> None:
        super().__init__(cast(Any, None), cast(Any, store), intervals=intervals, monotonic_s=now_s)
        self._script = list(script)
        self.steps_s: list[float] = []

    async def step(self) -> float:
        self.steps_s.append(now_s())
        outcome = self._script.pop(0) if self._script else LOOK_EVERY_S
        if isinstance(outcome, Exception):
            raise outcome
        if outcome <= self._intervals.followed_s:
            self._ticked_s = now_s()
        return outcome


class WaitedStore:
    """A store in which nothing changes: its waits are recorded, with their time."""

    def __init__(self) -> None:
        self.waits: list[tuple[float, float, int]] = []

    async def wait_any(self, *, timeout_s: float, since: int) -> int:
        self.waits.append((now_s(), timeout_s, since))
        await asyncio.sleep(timeout_s)
        return len(self.waits)


INTERVALS = TickIntervals(followed_s=0.5, idle_s=4.0, pause_s=0.125, look_s=2.0)


async def for_a_while(running: Coroutine[Any, Any, None], seconds: float) -> None:
    task = asyncio.ensure_future(running)
    await asyncio.sleep(seconds)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_a_woken_ticker_rests_until_the_next_tick_is_allowed_and_then_waits_for_a_change(run: Run) -> None:
    async def program() -> None:
        store = WaitedStore()
        ticker = ScriptedTicker(store, 0.5, 0.5, 3.0, intervals=INTERVALS)
        await for_a_while(ticker.run_woken(Metrics()), 6.25)
        assert ticker.steps_s == [0.0, 1.5, 3.0, 6.125]
        # With live streams it looks each second; without, it waits as long as the step says.
        assert store.waits == [(0.5, LOOK_EVERY_S, -1), (2.0, LOOK_EVERY_S, 1), (3.125, 3.0, 2)]

    run(program())


def test_a_woken_ticker_goes_on_a_second_after_an_error(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def program() -> None:
        metrics = Metrics()
        ticker = ScriptedTicker(WaitedStore(), Unavailable("away"), ZeroDivisionError("a bug"), intervals=INTERVALS)
        await for_a_while(ticker.run_woken(metrics), 2.0625)
        assert ticker.steps_s == [0.0, 1.0, 2.0]
        assert metrics.counted("tags_tick_failures") == 2

    run(program())
    assert "ZeroDivisionError" in caplog.text
    assert "Unavailable" not in caplog.text, "the replication reports it"


def test_a_ticker_replicates_its_ticks_and_rests_while_a_stream_is_followed(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    replicated: list[tuple[float, object]] = []

    async def replicate(log: object, store: object, alone: object) -> None:
        replicated.append((now_s(), alone))

    monkeypatch.setattr(ticks, "replicate_adjacent_ticks", replicate)

    async def program() -> None:
        store, metrics = WaitedStore(), Metrics()
        ticker = ScriptedTicker(store, 2.0, 0.5, 0.5, Unavailable("away"), intervals=INTERVALS)
        ticker.alone = {(TOPIC, 0): 7}
        await for_a_while(ticker.run(metrics), 5.5)
        assert ticker.steps_s == [1.0, 3.0, 3.5, 4.0, 5.0]
        assert replicated == [(3.0, {(TOPIC, 0): 7}), (3.5, {(TOPIC, 0): 7})]
        assert store.waits == [], "right after a tick no change is waited for"
        assert metrics.counted("tags_tick_failures") == 1

    run(program())


def test_a_rest_right_after_a_tick_or_without_followers_takes_its_whole_time(run: Run) -> None:
    async def program() -> None:
        store = WaitedStore()
        ticker = ScriptedTicker(store, 0.5, intervals=INTERVALS)
        await ticker.step()
        await ticker.rest(0.5)
        assert now_s() == 0.5
        await ticker.rest(2.0)
        assert (now_s(), store.waits) == (2.5, [])
        await ticker.rest(0.5)
        assert (now_s(), store.waits) == (3.0, [(2.625, 0.375, -1)])

    run(program())


@pytest.mark.parametrize(("after_s", "waits"), [(0.1875, 0), (0.25, 1)])
def test_a_change_is_waited_for_once_half_of_the_interval_after_a_tick_is_over(
    run: Run, after_s: float, waits: int
) -> None:
    async def program() -> None:
        store = WaitedStore()
        ticker = ScriptedTicker(store, 0.5, intervals=INTERVALS)
        await ticker.step()
        await asyncio.sleep(after_s)
        await ticker.rest(0.5)
        assert (now_s(), len(store.waits)) == (after_s + 0.5, waits)

    run(program())


# ---- the replication of a process


def inline_of(memory: Memory, **how: Any) -> InlineReplication:
    port: Any = memory.faults.around(memory)
    return InlineReplication(port, port, clock=ManualClock(0), metrics=Metrics(), **how)


class Times:
    """A condition of a fault, which records when the call is made."""

    def __init__(self, partition: int | None = None, *, until: int = 10_000) -> None:
        self._partition = partition
        self._until = until
        self.at_s: list[float] = []

    def __call__(self, *given: Any, **named: Any) -> bool:
        if self._partition is not None and given[1] != self._partition:
            return False
        self.at_s.append(now_s())
        return len(self.at_s) <= self._until


AWAY = Unavailable("it is away")


def test_a_partition_that_fails_is_retried_with_pauses_that_grow_until_it_succeeds(run: Run) -> None:
    async def program() -> None:
        memory, tries = Memory(), Times(0, until=3)
        memory.faults.fail("wait", AWAY, times=None, where=tries)
        replication = inline_of(memory)
        replication.start()
        await memory.put()
        await asyncio.sleep(10.0)
        assert tries.at_s == [0.0, 0.125, 0.375, 0.875, 0.875], "it waits for the next record"
        assert memory.applied == [(0.875, 0, 0)]
        assert (replication.status().failures, replication.status().stopped) == (3, {})
        tries.at_s.clear()
        await memory.put()
        await asyncio.sleep(10.0)
        assert tries.at_s == [10.0, 10.125, 10.375, 10.875], "the pauses begin anew after a success"
        await replication.close()

    run(program())


@pytest.mark.parametrize(
    ("error", "stopped"), [(AWAY, {}), (Corrupt("lost"), {f"{TOPIC}/0": "lost", f"{TOPIC}/1": "lost"})]
)
def test_a_topic_that_cannot_be_checked_is_retried_with_growing_pauses(
    run: Run, error: TidebookError, stopped: dict[str, str]
) -> None:
    async def program() -> None:
        memory, tries = Memory(), Times(until=3)
        memory.faults.fail("topic", error, times=None, where=tries)
        replication = inline_of(memory)
        replication.start()
        await memory.put()
        await asyncio.sleep(0.75)
        assert replication.status().stopped == stopped
        assert replication.status().failures == 3 * max(1, len(stopped))
        await asyncio.sleep(10.0)
        assert tries.at_s == [0.0, 0.125, 0.375, 0.875]
        assert memory.applied == [(0.875, 0, 0)]
        assert replication.status().stopped == {}
        await replication.close()

    run(program())


def test_topics_that_cannot_be_read_are_read_again_after_pauses_that_begin_anew_after_a_success(run: Run) -> None:
    async def program() -> None:
        memory, tries = Memory(), Times(until=3)
        memory.faults.fail("topics", AWAY, times=None, where=tries)
        replication = inline_of(memory)
        replication.start()
        await asyncio.sleep(0.5)
        assert (replication.status().state, replication.status().last_error) == ("waiting", f"replication: {AWAY}")
        await asyncio.sleep(0.5)
        assert tries.at_s[:4] == [0.0, 0.125, 0.375, 0.875]
        assert replication.status().state == "active"
        tries.at_s.clear()
        await asyncio.sleep(2.0)
        pauses_s = [later - earlier for earlier, later in pairwise(tries.at_s[:4])]
        assert pauses_s == pytest.approx([0.125, 0.25, 0.5])
        await replication.close()

    run(program())


def test_a_stopped_partition_is_tried_again_after_the_longest_pause(run: Run) -> None:
    async def program() -> None:
        memory = Memory()
        await memory.put(value=newer_version())
        replication = inline_of(memory)
        replication.start()
        await asyncio.sleep(12.0)
        assert list(replication.status().stopped) == [f"{TOPIC}/0"]
        retried_s = {at_s for at_s, _ in memory.reads if at_s % inline.RETRY_MAX_S == 0}  # others are of the status
        assert retried_s == {0.0, 5.0, 10.0}
        memory.records[0] = [Record(0, 0, None, MARK)]
        await asyncio.sleep(4.0)
        assert (replication.status().stopped, memory.applied) == ({}, [(15.0, 0, 0)])
        await replication.close()

    run(program())


def test_topics_are_looked_for_again_after_a_pause_and_a_wait_for_a_change(run: Run) -> None:
    async def program() -> None:
        memory, looks = Memory(), Times(until=0)
        memory.faults.fail("topics", AWAY, times=None, where=looks)
        replication = inline_of(memory)
        replication.start()
        await asyncio.sleep(10.0)
        assert len(looks.at_s) <= 30  # ten of the loop, and some of the ticker and of the status
        await replication.close()

    run(program())


def test_the_status_is_stored_at_the_start_and_every_five_seconds(run: Run) -> None:
    async def program() -> None:
        memory, writes = Memory(), Times(until=0)
        memory.faults.fail("set_setting", AWAY, times=None, where=writes)
        replication = inline_of(memory)
        replication.start()
        await asyncio.sleep(16.5)
        assert writes.at_s[0] == 0.0
        assert [round(later - earlier) for earlier, later in pairwise(writes.at_s)] == [5, 5, 5]
        await replication.close()

    run(program())


def test_a_status_that_cannot_be_written_does_not_disturb_the_replication(run: Run) -> None:
    async def program() -> None:
        memory = Memory()
        memory.faults.fail("set_setting", AWAY, times=None)
        replication = inline_of(memory)
        replication.start()
        await asyncio.sleep(20.0)
        await memory.put()
        await asyncio.sleep(0.0625)
        assert memory.applied == [(20.0, 0, 0)]
        assert (replication.status().state, replication.status().failures) == ("active", 0)
        await replication.close()

    run(program())


def test_a_topic_that_is_gone_is_no_longer_followed_and_one_that_comes_is(run: Run) -> None:
    async def program() -> None:
        memory = Memory()
        await memory.put(value=newer_version())
        replication = inline_of(memory)
        replication.start()
        await asyncio.sleep(0.5)
        assert list(replication.status().stopped) == [f"{TOPIC}/0"]
        del memory.configs[TOPIC]
        await asyncio.sleep(2.0)
        assert replication.status().stopped == {}
        await memory.put(1)
        await asyncio.sleep(2.0)
        assert memory.applied == []
        memory.configs[TOPIC] = CONFIG
        await asyncio.sleep(2.0)
        assert [each[1:] for each in memory.applied] == [(1, 0)]
        await replication.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(program())


def test_partitions_are_no_longer_stopped_where_nothing_is_followed_any_more(run: Run) -> None:
    """The last topic was deleted, and the replication has noticed it by an error first."""

    async def program() -> None:
        memory = Memory()
        await memory.put(value=newer_version())
        replication = inline_of(memory)
        replication.start()
        await asyncio.sleep(0.5)
        assert list(replication.status().stopped) == [f"{TOPIC}/0"]
        memory.configs.clear()
        memory.faults.fail("topics", AWAY)
        await asyncio.sleep(5.0)
        assert (replication.status().state, replication.status().stopped) == ("waiting", {})
        await replication.close()

    run(program())


class LostLock(NoLock):
    """A lock that another process has for a while."""

    def take(self) -> bool:
        return not 3.0 <= now_s() < 8.0


def test_a_process_that_has_lost_its_lock_replicates_nothing_until_it_has_it_again(run: Run) -> None:
    async def program() -> None:
        memory = Memory()
        replication = inline_of(memory, lock=LostLock())
        replication.start()
        await memory.put()
        await asyncio.sleep(5.0)
        assert replication.status().state == "passive"
        await memory.put()
        await asyncio.sleep(2.5)
        assert memory.applied == [(0.0, 0, 0)]
        await asyncio.sleep(2.5)
        assert replication.status().state == "active"
        assert [offset for *_, offset in memory.applied] == [0, 1]
        assert memory.applied[1][0] >= 8.0
        await replication.close()

    run(program())


# ---- a process that waits for the lock


class HeldLock:
    """A lock that another process holds: it responds until some second, and then no longer."""

    def __init__(self, responds_until_s: float | None) -> None:
        self.until_s = responds_until_s
        self.seized_s: list[float] = []
        self.released = 0

    def take(self) -> bool:
        return False

    def last_beat(self) -> int | None:
        return None if self.until_s is None else int(min(now_s(), self.until_s))

    def seize(self) -> None:
        self.seized_s.append(now_s())

    def release(self) -> None:
        self.released += 1


def waiting_for(lock: HeldLock) -> InlineReplication:
    return inline_of(Memory(), lock=lock)


def test_a_holder_that_is_silent_is_reported_after_a_while_and_its_lock_is_seized_later(run: Run) -> None:
    async def program() -> None:
        lock = HeldLock(responds_until_s=5.0)
        replication = waiting_for(lock)
        replication.start()
        reported = {}
        for second in range(17):
            await asyncio.sleep(0.5)
            status = replication.status()
            assert status.state == "passive"
            reported[second] = status.silent_holder
            await asyncio.sleep(0.5)
        assert [second for second, text in reported.items() if text] == list(range(8, 17))
        assert reported[8] == "the process that replicates has not responded for 3 s"
        assert reported[16] == "the process that replicates has not responded for 11 s"
        assert replication.status().describe() == f"passive: {replication.status().silent_holder}"
        assert lock.seized_s == [15.0, 16.0, 17.0]
        await replication.close()
        assert lock.released == 1

    run(program())


@pytest.mark.parametrize("until_s", [None, 10_000.0], ids=["unknown", "it responds"])
def test_a_holder_that_responds_or_of_which_nothing_is_known_keeps_its_lock(run: Run, until_s: float | None) -> None:
    async def program() -> None:
        lock = HeldLock(until_s)
        replication = waiting_for(lock)
        replication.start()
        await asyncio.sleep(60.5)
        assert (replication.status().state, replication.status().silent_holder) == ("passive", None)
        await replication.close()
        assert lock.seized_s == []

    run(program())


def test_a_holder_that_responds_again_is_no_longer_reported(run: Run) -> None:
    async def program() -> None:
        lock = HeldLock(responds_until_s=0.0)
        replication = waiting_for(lock)
        replication.start()
        await asyncio.sleep(5.5)
        assert replication.status().silent_holder is not None
        lock.until_s = 10_000.0
        await asyncio.sleep(1.0)
        assert replication.status().silent_holder is None
        await replication.close()

    run(program())
