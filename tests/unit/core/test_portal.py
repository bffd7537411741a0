"""The portal: the one async body, for threads that have no loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator

import pytest

from tidebook.core.errors import InvalidInput, OutcomeUnknown, TidebookError, Unavailable
from tidebook.core.portal import AHEAD_MAX, Portal


@pytest.fixture
def portal() -> Iterator[Portal]:
    portal = Portal()
    yield portal
    portal.close()


async def counting(n: int) -> AsyncIterator[int]:
    for i in range(n):
        yield i


def test_a_coroutine_gives_its_result(portal: Portal) -> None:
    async def answer() -> int:
        await asyncio.sleep(0)
        return 42

    assert portal.run(answer()) == 42


def test_a_coroutines_error_is_raised_in_the_callers_thread(portal: Portal) -> None:
    async def fail() -> None:
        raise LookupError("x")

    with pytest.raises(LookupError, match="x"):
        portal.run(fail())


def test_coroutines_run_in_the_portals_own_thread(portal: Portal) -> None:
    async def name() -> str:
        return threading.current_thread().name

    assert portal.run(name()) == "tidebook-portal"


@pytest.mark.parametrize("n", [0, 1, AHEAD_MAX - 1, AHEAD_MAX, AHEAD_MAX + 1, 5 * AHEAD_MAX])
def test_an_iteration_gives_every_item_in_order(portal: Portal, n: int) -> None:
    assert list(portal.iterate(counting(n))) == list(range(n))


def test_an_iteration_does_not_run_far_ahead_of_its_consumer(portal: Portal) -> None:
    made = 0

    async def endless() -> AsyncIterator[int]:
        nonlocal made
        while True:
            made += 1
            yield made

    items = portal.iterate(endless())
    assert next(items) == 1
    assert made <= 2 * AHEAD_MAX
    items.close()  # type: ignore[attr-defined]


def test_an_error_in_an_iteration_comes_after_the_items_before_it(portal: Portal) -> None:
    async def failing() -> AsyncIterator[int]:
        yield 1
        yield 2
        raise LookupError("x")

    items = portal.iterate(failing())
    assert [next(items), next(items)] == [1, 2]
    with pytest.raises(LookupError, match="x"):
        next(items)


def test_an_iteration_left_early_is_closed(portal: Portal) -> None:
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


def test_several_threads_may_use_one_portal(portal: Portal) -> None:
    sums: list[int] = []
    threads = [threading.Thread(target=lambda: sums.append(sum(portal.iterate(counting(3000))))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums == [3000 * 2999 // 2] * 4


def test_closing_ends_what_still_runs() -> None:
    portal = Portal()
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
    portal = Portal()
    portal.close()
    portal.close()


def test_a_closed_portal_refuses_in_words() -> None:
    portal = Portal()
    portal.close()

    async def never() -> None:
        raise AssertionError

    with pytest.raises(Unavailable, match="closed"):
        portal.run(never())
    with pytest.raises(Unavailable, match="closed"):
        next(portal.iterate(counting(3)))


def test_an_iteration_that_a_close_cuts_off_does_not_end_as_if_it_were_whole() -> None:
    portal = Portal()

    async def endless() -> AsyncIterator[int]:
        yield 1
        await asyncio.Event().wait()

    items = portal.iterate(endless())
    assert next(items) == 1
    closing = threading.Thread(target=portal.close)
    closing.start()
    with pytest.raises(Unavailable, match="not all of it"):
        next(items)
    closing.join()


def test_items_that_came_before_a_close_are_still_given() -> None:
    portal = Portal()
    items = portal.iterate(counting(5 * AHEAD_MAX))
    assert next(items) == 0
    portal.close()
    got: list[int] = []
    with pytest.raises(Unavailable, match="not all of it"):
        got.extend(items)
    with pytest.raises(StopIteration):
        next(items)


def test_a_call_that_a_close_cuts_off_has_an_unknown_outcome() -> None:
    portal = Portal()
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


def test_a_blocking_call_from_within_the_loop_is_refused_and_does_not_hang() -> None:
    portal = Portal()

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
