"""A live stream that followers share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

import pytest

from tidebook import Unavailable
from tidebook.server.broadcast import Broadcasts, Line, StreamPosition


def line(number: int) -> Line:
    return Line((number,), "orders", str(number), str(number).encode())


async def first_event(last: StreamPosition | None) -> AsyncGenerator[int, None]:
    if last is None:
        yield 1


async def test_new_followers_do_not_share_a_failed_stream_that_has_a_follower_left() -> None:
    broadcasts, live = Broadcasts(), asyncio.Queue[int]()

    async def fail() -> AsyncIterator[int]:
        raise Unavailable("the log is down")

    async def start() -> AsyncIterator[int]:
        async def events() -> AsyncGenerator[int, None]:
            while True:
                yield await live.get()

        return events()

    stays = broadcasts.follow(("orders",), fail, line, first_event)
    assert await anext(stays) == [("1", b"1")]
    others = [broadcasts.follow(("orders",), start, line, first_event) for _ in range(2)]
    assert [await anext(each) for each in others] == [[("1", b"1")]] * 2
    live.put_nowait(2)  # one event for both: they share a reader
    assert [await anext(each) for each in others] == [[("2", b"2")]] * 2
    with pytest.raises(Unavailable):
        await anext(stays)
    live.put_nowait(3)  # the follower that has left does not end the stream of the others
    assert [await anext(each) for each in others] == [[("3", b"3")]] * 2
    for each in others:
        await each.aclose()
