"""When a ticker ticks, how long it pauses, and what tickers of several topics share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tidebook.core.action import Mark
from tidebook.core.event import Event
from tidebook.core.record import decode_record
from tidebook.log.port import read_all
from tidebook.replication import ticks
from tidebook.replication.ticks import (
    FOLLOWED_CHECK_S,
    FOLLOWED_FOR_S,
    REPLICATED_TIME_SETTING,
    SHARE_ATTEMPTS_MAX,
    Ticker,
    TickIntervals,
    has_tags,
    needs_ticks,
    replicate_adjacent_ticks,
    send_ticks,
    share_replicated_time,
    tick,
)
from tidebook.tags.horizon import renew_followed
from tidebook.testing.clock import ManualClock
from tidebook.testing.replicating import replicate
from tidebook.wiring.book import Book
from tidebook.wiring.settings import Section, Settings

TOPIC = "orders"
BEGAN_MS = 1_700_000_000_000
#: Binary fractions, so that their sums are exact.
INTERVALS = TickIntervals(followed_s=0.5, idle_s=4.0, pause_s=0.125, check_s=2.0)


class Seconds:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(BEGAN_MS)


@pytest.fixture
async def book(tmp_path: Path, clock: ManualClock) -> AsyncIterator[Book]:
    async with Book(Settings(tmp_path, {"journal": Section(None, {"partitions": 2})}), clock=clock) as opened:
        yield opened


async def append(book: Book, clock: ManualClock, id: str = "a", *, topic: str = TOPIC) -> None:
    clock.advance(1_000)
    await book.journal(topic).append(id, [Event(1, tags={"x"})])
    await replicate(book.log, book.store, topic)


async def marks(book: Book, topic: str = TOPIC) -> list[int | None]:
    """Return the times of all ticks of a topic."""
    found = []
    for partition in range(2):
        end = await book.log.end(topic, partition)
        records = await read_all(book.log, topic, partition, start=0, stop=end)
        actions = [decode_record(record.value or b"") for record in records if record.key is None]
        found += [action.time_ms for action in actions if isinstance(action, Mark)]
    return found


async def test_every_partition_gets_a_tick_just_after_the_greatest_time(book: Book, clock: ManualClock) -> None:
    await append(book, clock)
    sent = await tick(book.log, book.store)
    assert set(sent) == {(TOPIC, 0), (TOPIC, 1)}
    assert await marks(book) == [BEGAN_MS + 1_001] * 2
    ends = {(TOPIC, number): await book.log.end(TOPIC, number) for number in range(2)}
    assert {at: offset + 1 for at, offset in sent.items()} == ends
    await tick(book.log, book.store, [TOPIC], seen_ms=BEGAN_MS + 5_000)
    assert sorted(await marks(book), key=str) == [BEGAN_MS + 1_001] * 2 + [BEGAN_MS + 5_001] * 2
    assert await tick(book.log, book.store, ["nobody"]) == {}


async def test_a_book_without_tags_gets_no_ticks_and_one_with_followers_needs_some(
    book: Book, clock: ManualClock
) -> None:
    await book.journal(TOPIC).append("a", [Event(1)])
    await replicate(book.log, book.store, TOPIC)
    assert (await has_tags(book.store), await needs_ticks(book.store)) == (False, False)
    assert await send_ticks(book.log, book.store) == {}
    await renew_followed(book.store, clock)
    assert (await has_tags(book.store), await needs_ticks(book.store)) == (False, True)
    await append(book, clock)
    assert (await has_tags(book.store), await needs_ticks(book.store)) == (True, True)
    assert len(await send_ticks(book.log, book.store)) == 2


async def test_a_ticker_sends_no_ticks_on_request_to_a_book_without_tags(book: Book, clock: ManualClock) -> None:
    await book.journal(TOPIC).append("a", [Event(1)])
    await replicate(book.log, book.store, TOPIC)
    ticker = Ticker(book.log, book.store, monotonic_s=Seconds())
    assert await ticker.tick() == {}
    await renew_followed(book.store, clock)
    assert await ticker.tick() == {}, "only the steps of a ticker read the followed setting"
    await append(book, clock)
    assert len(await ticker.tick()) == 2


async def test_the_ticks_of_one_topic_are_above_the_times_of_the_others(book: Book, clock: ManualClock) -> None:
    await append(book, clock)
    await append(book, clock, topic="users")
    await send_ticks(book.log, book.store, [TOPIC])
    assert await marks(book) == [BEGAN_MS + 2_001] * 2
    assert await marks(book, "users") == [BEGAN_MS + 1_000] * 2, "the topic has only its first marks"
    assert await book.store.setting(REPLICATED_TIME_SETTING) == str(BEGAN_MS + 2_000)


async def test_a_ticker_without_followers_ticks_when_its_interval_is_nearly_over(
    book: Book, clock: ManualClock
) -> None:
    await append(book, clock)
    seconds = Seconds()
    ticker = Ticker(book.log, book.store, intervals=INTERVALS, monotonic_s=seconds)
    assert await ticker.step() == FOLLOWED_CHECK_S
    assert len(await marks(book)) == 2
    for after_s, wait_s, ticked in ((1.0, FOLLOWED_CHECK_S, 2), (3.5, 0.5, 2), (3.75, FOLLOWED_CHECK_S, 4)):
        await append(book, clock)
        seconds.now_s = 100.0 + after_s
        assert await ticker.step() == wait_s
        assert len(await marks(book)) == ticked
    await append(book, clock)
    seconds.now_s += 3.5
    await ticker.step()
    assert len(await marks(book)) == 4, "the next interval began with the last tick"


async def test_a_followed_ticker_ticks_when_half_of_its_interval_is_over(book: Book, clock: ManualClock) -> None:
    await append(book, clock)
    await renew_followed(book.store, clock)
    seconds = Seconds()
    ticker = Ticker(book.log, book.store, intervals=INTERVALS, monotonic_s=seconds)
    assert await ticker.step() == 0.5
    assert set(ticker.adjacent) == {(TOPIC, 0), (TOPIC, 1)}
    for after_s, wait_s, ticked in ((0.125, 0.375, 2), (0.25, 0.5, 4)):
        await append(book, clock)
        seconds.now_s = 100.0 + after_s
        assert await ticker.step() == wait_s
        assert len(await marks(book)) == ticked
    await replicate(book.log, book.store, TOPIC)
    seconds.now_s += 0.5
    assert await ticker.step() == 0.5
    assert ticker.adjacent == {}
    assert len(await marks(book)) == 4, "nothing came after the ticks"
    seconds.now_s += 0.0625
    await append(book, clock)
    await ticker.step()
    assert len(await marks(book)) == 6, "a step without a tick does not postpone the next"


async def test_a_ticker_reads_the_followed_setting_in_intervals_and_only_a_change_counts(
    book: Book, clock: ManualClock
) -> None:
    await append(book, clock)
    seconds = Seconds()
    ticker = Ticker(book.log, book.store, intervals=INTERVALS, monotonic_s=seconds)
    assert await ticker.step() == FOLLOWED_CHECK_S
    await renew_followed(book.store, clock)
    seconds.now_s = 101.75
    assert await ticker.step() == FOLLOWED_CHECK_S, "the ticker has not read the setting again"
    seconds.now_s = 102.0
    assert await ticker.step() == 0.5
    seconds.now_s = 102.0 + FOLLOWED_FOR_S - 0.125
    assert await ticker.step() == 0.5
    seconds.now_s = 102.0 + FOLLOWED_FOR_S
    assert await ticker.step() == FOLLOWED_CHECK_S
    clock.advance(60_000)
    await renew_followed(book.store, clock)
    seconds.now_s += 2.0
    assert await ticker.step() == 0.5


class Waits:
    """A store whose waits are recorded and end at once."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.waits: list[tuple[float, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def wait_any(self, *, timeout_s: float, since: int) -> int:
        self.waits.append((timeout_s, since))
        return since + 5


async def test_a_rest_ends_at_a_change_of_the_store_only_if_a_tick_is_allowed(book: Book, clock: ManualClock) -> None:
    await append(book, clock)
    await renew_followed(book.store, clock)
    seconds, store = Seconds(), Waits(book.store)
    intervals = TickIntervals(followed_s=0.03125, idle_s=4.0, pause_s=0.0078125, check_s=2.0)
    ticker = Ticker(book.log, store, intervals=intervals, monotonic_s=seconds)  # type: ignore[arg-type]
    await ticker.step()
    await ticker.pause(0.03125)  # right after a tick
    await ticker.pause(0.0625)  # there are no followers
    assert store.waits == []
    seconds.now_s += 0.015625
    await ticker.pause(0.03125)
    await ticker.pause(0.03125)
    assert store.waits == [(0.0234375, -1), (0.0234375, 4)]
    await append(book, clock)
    seconds.now_s += 0.03125
    await ticker.step()
    seconds.now_s += 0.03125
    await ticker.pause(0.03125)
    assert store.waits[2:] == [(0.0234375, -1)], "after a tick every change counts"


@pytest.mark.parametrize("left_out", [0, 1])
async def test_more_ticks_than_the_maximum_are_left_to_the_job(
    book: Book, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, left_out: int
) -> None:
    await append(book, clock)
    sent = await tick(book.log, book.store)
    before = await book.store.pointers(TOPIC)
    monkeypatch.setattr(ticks, "ADJACENT_TICKS_MAX", 2 - left_out)
    await replicate_adjacent_ticks(book.log, book.store, sent)
    after = await book.store.pointers(TOPIC)
    assert (after == before) is bool(left_out)
    if not left_out:
        assert {(TOPIC, number): pointer.position.offset for number, pointer in after.items()} == sent
    await replicate_adjacent_ticks(book.log, book.store, {})


async def test_a_ticker_uses_the_time_of_other_topics_from_its_first_step(book: Book, clock: ManualClock) -> None:
    await append(book, clock)
    await append(book, clock, topic="users")
    ticker = Ticker(book.log, book.store, [TOPIC], monotonic_s=Seconds())
    assert set(await ticker.tick()) == {(TOPIC, 0), (TOPIC, 1)}
    assert await marks(book) == [BEGAN_MS + 2_001] * 2
    assert await ticker.tick() == {}, "the ticks are not replicated yet"


class SharedTimes:
    """A store with one setting, which another process changes just before the first few writes."""

    def __init__(self, text: str | None, *, races: int = 0) -> None:
        self.text = text
        self._races = races

    async def setting(self, name: str) -> str | None:
        return self.text

    async def set_setting(self, name: str, value: str, *, expected: str | None) -> bool:
        if self._races:
            self._races -= 1
            self.text = str(int(self.text or 0) + 1)
        if self.text != expected:
            return False
        self.text = value
        return True


@pytest.mark.parametrize(
    ("text", "replicated_ms", "races", "shared", "after"),
    [
        (None, 70, 0, 70, "70"),
        ("70", 70, 0, 70, "70"),
        ("90", 70, 0, 90, "90"),
        ("60", 70, 0, 70, "70"),
        ("60", 70, SHARE_ATTEMPTS_MAX - 1, 70, "70"),
        ("60", 70, SHARE_ATTEMPTS_MAX, 70, "65"),  # the next tick stores it
        ("68", 70, 3, 70, "70"),
    ],
)
async def test_the_greatest_time_of_all_pipelines_is_shared(
    text: str | None, replicated_ms: int, races: int, shared: int, after: str
) -> None:
    store: Any = SharedTimes(text, races=races)
    assert (await share_replicated_time(store, replicated_ms), store.text) == (shared, after)
