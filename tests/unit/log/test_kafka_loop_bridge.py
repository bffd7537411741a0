"""Calls from threads run in the loop, in order, and one that fails does not affect others."""

from __future__ import annotations

import asyncio
import threading

import pytest

pytest.importorskip("confluent_kafka")

from tidebook.log.kafka.producer import LoopBridge


async def test_calls_of_a_thread_run_in_the_loop_in_their_order() -> None:
    crossing = LoopBridge()
    done = asyncio.Event()
    found: list[tuple[int, int]] = []

    def take(number: int) -> None:
        found.append((number, threading.get_ident()))
        if number == 9_999:
            done.set()

    def run() -> None:
        for number in range(10_000):
            assert crossing.call_in_loop(take, number)

    thread = threading.Thread(target=run)
    thread.start()
    async with asyncio.timeout(30):
        await done.wait()
    thread.join()
    crossing.close()
    assert found == [(number, threading.get_ident()) for number in range(10_000)]


async def test_a_failing_call_is_reported_to_the_loop_and_the_others_run() -> None:
    reported: list[BaseException] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["exception"]))
    crossing = LoopBridge()
    found: list[int] = []

    def take(number: int) -> None:
        if number == 1:
            raise ValueError("one")
        found.append(number)

    for number in range(3):
        crossing.call_in_loop(take, number)
    crossing.close()
    assert found == [0, 2]
    assert [str(error) for error in reported] == ["one"]


def test_a_call_into_a_closed_loop_returns_false() -> None:
    crossings: list[LoopBridge] = []

    async def main() -> None:
        crossings.append(LoopBridge())

    asyncio.run(main())
    assert not crossings[0].call_in_loop(print)
