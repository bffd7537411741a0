"""A model of a queue in plain Python, and state machines that compare a real store with it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tidebook.core.payload import BYTES
from tidebook.queue.port import NEVER_MS, QueueRef, QueueStore
from tidebook.testing.conformance.queue_base import QueueTester, Taken, entry, new_queue

MAX_TIMEOUTS = 1
SLOW = 200


@dataclass
class Item:
    """A waiting or processing entry."""

    age: int
    name: str
    key: str | None
    data: str
    priority: int
    process_at: int
    expires_at: int
    timeouts: int = 0
    holder: int | None = None
    lease_until: int = 0
    counted: bool = False


@dataclass
class Model:
    """A queue with at most one waiting and at most one processing entry for each key."""

    now: int
    waiting: dict[str, Item] = field(default_factory=dict)
    processing: dict[str, Item] = field(default_factory=dict)
    dead: list[Item] = field(default_factory=list)

    def put(self, new: Item) -> None:
        out = self.processing.get(new.name)
        if out is not None and out.counted:  # its lease has expired, so it counts as waiting
            del self.processing[new.name]
            self.waiting[new.name] = replace(out, holder=None, counted=False)
        old = self.waiting.get(new.name)
        new = replace(new, process_at=max(new.process_at, self.now))
        if old is not None and old.expires_at > self.now:
            new = replace(
                old,
                data=new.data,
                timeouts=0,
                priority=min(old.priority, new.priority),
                process_at=max(old.process_at, new.process_at),
                expires_at=max(old.expires_at, new.expires_at),
            )
        self.waiting[new.name] = new

    def merge(self, old: Item, timeouts: int, process_at: int) -> bool:
        """Merge an entry that was being processed into the waiting entry of its key."""
        new = self.waiting.get(old.name)
        if new is None or new.expires_at <= self.now:
            return False
        self.waiting[old.name] = replace(
            new,
            age=old.age,
            timeouts=timeouts,
            priority=min(old.priority, new.priority),
            process_at=max(process_at, new.process_at),
            expires_at=max(old.expires_at, new.expires_at),
        )
        return True

    def expire_leases(self) -> None:
        for item in [each for each in self.processing.values() if not each.counted and each.lease_until <= self.now]:
            if item.expires_at <= self.now:
                del self.processing[item.name]
            elif item.timeouts >= MAX_TIMEOUTS:
                del self.processing[item.name]
                self.dead.append(item)
            elif self.merge(item, item.timeouts + 1, item.process_at):
                del self.processing[item.name]
            else:
                item.counted = True
                item.timeouts += 1

    def sweep(self) -> None:
        self.expire_leases()
        for item in [each for each in self.processing.values() if each.counted and each.expires_at <= self.now]:
            del self.processing[item.name]

    def claim(self, limit: int, holder: int, lease: int) -> list[Item]:
        self.expire_leases()
        ready = [each for each in self.processing.values() if each.counted and each.expires_at > self.now]
        ready += [
            each
            for each in self.waiting.values()
            if each.process_at <= self.now and each.expires_at > self.now and each.name not in self.processing
        ]
        quick = [each for each in ready if each.priority < SLOW]
        ready = sorted(quick or ready, key=lambda each: (each.priority, each.process_at, each.age))[:limit]
        for item in ready:
            self.waiting.pop(item.name, None) if item.name not in self.processing else None
            self.processing[item.name] = item
            item.holder, item.lease_until, item.counted = holder, self.now + lease, False
        return ready

    def fail(self, item: Item, delay: int) -> str:
        timeouts = item.timeouts + (not item.counted)
        del self.processing[item.name]
        if item.expires_at <= self.now:
            return "expired"
        if timeouts > MAX_TIMEOUTS:
            self.dead.append(item)
            return "dead"
        if self.merge(item, timeouts, self.now + delay):
            return "merged"
        back = replace(item, timeouts=timeouts, process_at=self.now + delay, holder=None, counted=False)
        self.waiting[item.name] = back
        return "waiting"

    def retry(self, letter: Item, age: int) -> None:
        """Return a dead letter to the queue; a newer entry of its key keeps its data."""
        self.dead.remove(letter)
        expires_at = letter.expires_at if letter.expires_at > self.now else NEVER_MS
        out = self.processing.get(letter.name)
        if out is not None and out.counted and out.expires_at > self.now:
            out.timeouts, out.holder = 0, None
            out.priority, out.expires_at = min(letter.priority, out.priority), max(expires_at, out.expires_at)
            out.process_at = max(out.process_at, self.now)
            return
        newer = self.waiting.get(letter.name)
        if newer is not None and newer.expires_at > self.now:
            self.waiting[letter.name] = replace(
                newer,
                timeouts=0,
                priority=min(letter.priority, newer.priority),
                process_at=max(newer.process_at, self.now),
                expires_at=max(expires_at, newer.expires_at),
            )
            return
        held = self.processing.get(letter.name)
        data = letter.data if held is None else held.data
        self.waiting[letter.name] = Item(age, letter.name, letter.key, data, letter.priority, self.now, expires_at)

    def held(self, name: str, holder: int) -> Item | None:
        item = self.processing.get(name)
        return item if item is not None and item.holder == holder else None

    def shown(self) -> list[tuple[Any, ...]]:
        """Return the entries of a listing, in any order."""
        alive = [("P", each) for each in self.processing.values()]
        alive += [("W", each) for each in self.waiting.values() if each.expires_at > self.now]
        return sorted(
            (status, each.data, each.priority, each.timeouts, each.process_at, each.expires_at)
            for status, each in alive
        )


class QueueMachine(RuleBasedStateMachine):
    """A state machine; a subclass defines `open`, which opens a store and returns how to advance its clock."""

    #: Whether the store is swept whenever the clock moves.
    sweeps_as_time_passes = False

    def open(self, stack: AsyncExitStack) -> Coroutine[Any, Any, tuple[QueueStore, int, Callable[[int], Any]]]:
        raise NotImplementedError

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.stack = AsyncExitStack()
        self.handles: list[tuple[str, int, Taken]] = []
        self.numbers = itertools.count(1)

    def do(self, body: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(body)

    @initialize()
    def begin(self) -> None:
        async def begin() -> tuple[QueueTester, int, Any]:
            store, now, advance = await self.open(self.stack)
            ref: QueueRef = await new_queue(store, max_timeouts=MAX_TIMEOUTS)
            return QueueTester(store, ref), now, advance

        self.tester, now, self.advance_store = self.do(begin())
        self.model = Model(now)

    def teardown(self) -> None:
        self.do(self.stack.aclose())
        self.runner.close()

    @rule(
        key=st.sampled_from(["a", "b", "c", None]),
        priority=st.sampled_from([0, 20, 199, 200, 255]),
        wait=st.sampled_from([-5, 0, 0, 0, 7, 30]),
        lifetime_ms=st.sampled_from([None, None, None, 3, 12]),
    )
    def put(self, key: str | None, priority: int, wait: int, lifetime_ms: int | None) -> None:
        number = next(self.numbers)
        at = self.model.now + wait
        expires_at = NEVER_MS if lifetime_ms is None else self.model.now + lifetime_ms
        self.do(self.tester.put(key, data=f"{number}", priority=priority, process_at=at, expires_at=expires_at))
        self.model.put(Item(number, key or f"#{number}", key, f"{number}", priority, at, expires_at))

    @rule(
        keys=st.lists(st.sampled_from(["a", "b", "c", "d"]), unique=True, min_size=2, max_size=4),
        keyless=st.integers(0, 2),
        priority=st.sampled_from([20, 200]),
    )
    def put_many(self, keys: list[str], keyless: int, priority: int) -> None:
        made = []
        for key in [*keys, *[None] * keyless]:
            number = next(self.numbers)
            made.append(entry(key, f"{number}", priority))
            self.model.put(Item(number, key or f"#{number}", key, f"{number}", priority, self.model.now, NEVER_MS))
        self.do(self.tester.store.put(self.tester.ref, made, inserted_at=0))

    def letter(self, data: st.DataObject) -> tuple[Item, int] | None:
        """Choose a dead letter."""
        if not self.model.dead:
            return None
        item = data.draw(st.sampled_from(self.model.dead), label="letter")
        letters = self.do(self.tester.store.dead_letters(self.tester.ref, limit=1_000))
        (letter,) = [each.id for each in letters if each.data.decode() == item.data]
        return item, letter

    @rule(data=st.data())
    def retry(self, data: st.DataObject) -> None:
        if (found := self.letter(data)) is not None:
            assert self.do(self.tester.store.retry(self.tester.ref, found[1]))
            self.model.retry(found[0], next(self.numbers))

    @rule(data=st.data())
    def edit(self, data: st.DataObject) -> None:
        if (found := self.letter(data)) is not None:
            found[0].data = f"{next(self.numbers)}"
            assert self.do(self.tester.store.edit(self.tester.ref, found[1], BYTES, found[0].data.encode()))

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        if (found := self.letter(data)) is not None:
            assert self.do(self.tester.store.drop(self.tester.ref, found[1]))
            self.model.dead.remove(found[0])

    @rule(limit=st.sampled_from([1, 1, 2, 9]), lease=st.sampled_from([5, 20]))
    def claim(self, limit: int, lease: int) -> None:
        holder = next(self.numbers)
        taken: list[Taken] = self.do(self.tester.claim(limit, lease))
        expected = self.model.claim(limit, holder, lease)
        assert [(each.name, each.entry.timeouts, each.entry.priority) for each in taken] == [
            (each.data, each.timeouts, each.priority) for each in expected
        ]
        self.handles += [(item.name, holder, each) for item, each in zip(expected, taken, strict=True)]

    def handle(self, data: st.DataObject) -> tuple[str, int, Taken] | None:
        if not self.handles:
            return None
        newest = self.handles[-8:]
        return newest[data.draw(st.integers(0, len(newest) - 1), label="handle")]

    @rule(data=st.data())
    def done(self, data: st.DataObject) -> None:
        if (handle := self.handle(data)) is None:
            return
        name, holder, taken = handle
        expected = self.model.held(name, holder)
        assert self.do(self.tester.finish(taken)) == [expected is not None]
        if expected is not None:
            del self.model.processing[name]

    @rule(data=st.data(), lease=st.sampled_from([5, 20]))
    def heartbeat(self, data: st.DataObject, lease: int) -> None:
        if (handle := self.handle(data)) is None:
            return
        name, holder, taken = handle
        expected = self.model.held(name, holder)
        assert self.do(self.tester.beat(taken, lease_ms=lease)) == [expected is not None]
        if expected is not None:
            expected.lease_until, expected.counted = self.model.now + lease, False

    @rule(data=st.data(), delay=st.sampled_from([0, 0, 10]))
    def fail(self, data: st.DataObject, delay: int) -> None:
        if (handle := self.handle(data)) is None:
            return
        name, holder, taken = handle
        expected = self.model.held(name, holder)
        outcome = self.do(self.tester.fail(taken, delay_ms=delay))
        assert outcome == ("lost" if expected is None else self.model.fail(expected, delay))

    @rule(by=st.sampled_from([1, 4, 6, 25]))
    def advance(self, by: int) -> None:
        self.do(self.advance_store(by))
        self.model.now += by
        if self.sweeps_as_time_passes:
            self.model.sweep()

    @rule()
    def sweep(self) -> None:
        self.do(self.tester.store.sweep(self.tester.ref))
        self.model.sweep()

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        if not hasattr(self, "model"):
            return
        listed = self.do(self.tester.store.entries(self.tester.ref, limit=1_000))
        found = sorted(
            (each.status, each.data.decode(), each.priority, each.timeouts, each.process_at, each.expires_at)
            for each in listed
        )
        assert found == self.model.shown()
        letters = self.do(self.tester.store.dead_letters(self.tester.ref, limit=1_000))
        assert sorted(each.data.decode() for each in letters) == sorted(each.data for each in self.model.dead)

    @invariant()
    def is_ready_when_a_claim_would_return_something(self) -> None:
        if not hasattr(self, "model"):
            return
        (due,) = self.do(self.tester.store.due([self.tester.ref]))
        future = sorted({each.process_at for each in self.model.waiting.values() if each.process_at > self.model.now})
        assert set(due.upcoming) >= {
            each.process_at
            for each in self.model.waiting.values()
            if each.process_at > self.model.now and each.expires_at > self.model.now
        }
        assert set(due.upcoming) <= set(future)
        free = [
            each
            for each in self.model.waiting.values()
            if each.process_at <= self.model.now < each.expires_at and each.name not in self.model.processing
        ]
        out = [
            each
            for each in self.model.processing.values()
            if (not each.counted and each.lease_until <= self.model.now)
            or (each.counted and each.expires_at > self.model.now)
        ]
        assert due.ready == bool(free or out)
