"""The blocking portal: coroutines and async iterators for threads without a loop."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator

import pytest

from tidebook.core.errors import InvalidInput, OutcomeUnknown, TidebookError, Unavailable
from tidebook.runtime.blocking_portal import PREFETCH_MAX, BlockingPortal


@pytest.fixture
def portal() -> Iterator[BlockingPortal]:
    portal = BlockingPortal()
    yield portal
    portal.close()


async def counting(n: int) -> AsyncIterator[int]:
    for i in range(n):
        yield i


def test_run_returns_the_result_of_the_coroutine(portal: BlockingPortal) -> None:
    async def answer() -> int:
        await asyncio.sleep(0)
        return 42

    assert portal.run(answer()) == 42


def test_a_coroutines_error_is_raised_in_the_callers_thread(portal: BlockingPortal) -> None:
    async def fail() -> None:
        raise LookupError("x")

    with pytest.raises(LookupError, match="x"):
        portal.run(fail())


def test_coroutines_run_in_the_portals_own_thread(portal: BlockingPortal) -> None:
    async def name() -> str:
        return threading.current_thread().name

    assert portal.run(name()) == "tidebook-portal"


@pytest.mark.parametrize("n", [0, 1, PREFETCH_MAX - 1, PREFETCH_MAX, PREFETCH_MAX + 1, 5 * PREFETCH_MAX])
def test_an_iteration_yields_every_item_in_order(portal: BlockingPortal, n: int) -> None:
    assert list(portal.iterate(counting(n))) == list(range(n))


def test_an_iteration_does_not_run_far_ahead_of_its_consumer(portal: BlockingPortal) -> None:
    made = 0

    async def endless() -> AsyncIterator[int]:
        nonlocal made
        while True:
            made += 1
            yield made

    items = portal.iterate(endless())
    assert next(items) == 1
    assert made <= 2 * PREFETCH_MAX
    items.close()  # type: ignore[attr-defined]


def test_an_error_in_an_iteration_is_raised_after_the_items_before_it(portal: BlockingPortal) -> None:
    async def failing() -> AsyncIterator[int]:
        yield 1
        yield 2
        raise LookupError("x")

    items = portal.iterate(failing())
    assert [next(items), next(items)] == [1, 2]
    with pytest.raises(LookupError, match="x"):
        next(items)


def test_an_iteration_left_early_is_closed(portal: BlockingPortal) -> None:
    closed = threading.Event()

    async def watched() -> AsyncIterator[int]:
        try:
            while True:
                yield 1
                await asyncio.sleep(0)
        finally:
            closed.set()

    items = portal.iterate(watched())
    next(items)
    items.close()  # type: ignore[attr-defined]
    assert closed.wait(10)


def test_several_threads_may_use_one_portal(portal: BlockingPortal) -> None:
    sums: list[int] = []
    threads = [threading.Thread(target=lambda: sums.append(sum(portal.iterate(counting(3000))))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums == [3000 * 2999 // 2] * 4


def test_close_cancels_running_tasks() -> None:
    portal = BlockingPortal()
    ended = threading.Event()

    async def wait_for_ever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def start() -> None:
        tasks.append(asyncio.create_task(wait_for_ever()))
        await asyncio.sleep(0)

    tasks: list[asyncio.Task[None]] = []
    portal.run(start())
    portal.close()
    assert ended.is_set()


def test_closing_twice_is_harmless() -> None:
    portal = BlockingPortal()
    portal.close()
    portal.close()


def test_a_closed_portal_raises_unavailable() -> None:
    portal = BlockingPortal()
    portal.close()

    async def never() -> None:
        raise AssertionError

    with pytest.raises(Unavailable, match="closed"):
        portal.run(never())
    with pytest.raises(Unavailable, match="closed"):
        next(portal.iterate(counting(3)))


def test_an_iteration_interrupted_by_close_does_not_end_normally() -> None:
    portal = BlockingPortal()

    async def endless() -> AsyncIterator[int]:
        yield 1
        await asyncio.Event().wait()

    items = portal.iterate(endless())
    assert next(items) == 1
    closing = threading.Thread(target=portal.close)
    closing.start()
    with pytest.raises(Unavailable, match="more items may follow"):
        next(items)
    closing.join()


def test_items_buffered_before_close_are_still_yielded() -> None:
    portal = BlockingPortal()
    items = portal.iterate(counting(5 * PREFETCH_MAX))
    assert next(items) == 0
    portal.close()
    got: list[int] = []
    with pytest.raises(Unavailable, match="more items may follow"):
        got.extend(items)
    with pytest.raises(StopIteration):
        next(items)


def test_a_call_interrupted_by_close_has_an_unknown_outcome() -> None:
    portal = BlockingPortal()
    running = threading.Event()
    errors: list[BaseException] = []

    async def wait_for_ever() -> None:
        running.set()
        await asyncio.Event().wait()

    def call() -> None:
        try:
            portal.run(wait_for_ever())
        except TidebookError as error:
            errors.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    assert running.wait(30)
    portal.close()
    caller.join(30)
    assert [type(error) for error in errors] == [OutcomeUnknown]


def test_a_blocking_call_from_within_the_loop_is_refused() -> None:
    portal = BlockingPortal()

    async def nothing() -> None:
        pass

    async def blocks() -> None:
        portal.run(nothing())

    async def iterates() -> None:
        next(portal.iterate(counting(3)))

    for mistake in (blocks, iterates):
        with pytest.raises(InvalidInput, match="loop"):
            portal.run(mistake())
    portal.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_portal_of_the_parent_is_refused_in_a_forked_child(portal: BlockingPortal) -> None:
    proceed = asyncio.Event()

    async def in_two_parts() -> AsyncIterator[int]:
        yield 1
        await proceed.wait()
        yield 2

    async def answer() -> bool:
        proceed.set()
        return True

    following = portal.iterate(in_two_parts())
    assert next(following) == 1
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)  # a use that hangs, as before, ends the child
        refused = 0
        for use in (lambda: portal.run(answer()), lambda: portal.submit(answer()), lambda: next(following)):
            try:
                use()
            except InvalidInput:
                refused += 1
        portal.close()
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    assert portal.run(answer())
    assert list(following) == [2]
