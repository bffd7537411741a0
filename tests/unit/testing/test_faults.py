"""Tests of the fault injection around a port and of the manual clock."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from tidebook.core.errors import OutcomeUnknown, TidebookError, Unavailable
from tidebook.log.port import Acknowledged, Log, Outgoing
from tidebook.log.sqlite import SqliteLog
from tidebook.testing.clock import ManualClock
from tidebook.testing.faults import Faults

RECORD = Outgoing("t", 0, b"k", b"v")


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture
async def log(tmp_path: Path, faults: Faults) -> Log:
    log = SqliteLog(tmp_path)
    await log.create_topic("t", 1)
    return faults.around(log)


async def sent(log: Log) -> Acknowledged | TidebookError:
    future: asyncio.Future[Acknowledged | TidebookError] = asyncio.get_running_loop().create_future()
    log.send(RECORD, future.set_result)
    return await future


async def test_without_faults_everything_passes(log: Log, faults: Faults) -> None:
    assert (await log.append(RECORD)).offset == 0
    assert isinstance(await sent(log), Acknowledged)
    assert log.indexed_by_key is True
    assert faults.calls == {"append": 1, "send": 1}
    await log.close()


async def test_a_held_call_waits_until_it_is_let_go(log: Log, faults: Faults) -> None:
    held = faults.hold("append")
    appending = asyncio.create_task(log.append(RECORD))
    await held.reached()
    assert await log.end("t", 0) == 0
    held.release()
    assert (await appending).offset == 0
    await log.close()


async def test_a_call_held_afterwards_is_done_and_has_not_answered(log: Log, faults: Faults) -> None:
    held = faults.hold("append", after=True)
    appending = asyncio.create_task(log.append(RECORD))
    await held.reached()
    assert await log.end("t", 0) == 1
    assert not appending.done()
    held.release()
    await appending
    await log.close()


async def test_a_failed_call_is_not_done(log: Log, faults: Faults) -> None:
    faults.fail("append", Unavailable("x"))
    with pytest.raises(Unavailable):
        await log.append(RECORD)
    assert await log.end("t", 0) == 0
    assert (await log.append(RECORD)).offset == 0
    await log.close()


async def test_a_call_that_fails_afterwards_is_done(log: Log, faults: Faults) -> None:
    faults.fail("append", OutcomeUnknown("x"), after=True)
    with pytest.raises(OutcomeUnknown):
        await log.append(RECORD)
    assert await log.end("t", 0) == 1
    await log.close()


async def test_faults_are_meant_for_calls_with_certain_arguments(log: Log, faults: Faults) -> None:
    faults.fail("append", Unavailable("x"), where=lambda record: record.key == b"other")
    assert (await log.append(RECORD)).offset == 0
    await log.close()


async def test_send_calls_back_with_its_faults(log: Log, faults: Faults) -> None:
    faults.fail("send", Unavailable("x"))
    assert isinstance(await sent(log), Unavailable)
    assert await log.end("t", 0) == 0
    faults.fail("send", OutcomeUnknown("x"), after=True)
    assert isinstance(await sent(log), OutcomeUnknown)
    assert await log.end("t", 0) == 1
    held = faults.hold("send")
    sending = asyncio.create_task(sent(log))
    await held.reached()
    assert await log.end("t", 0) == 1
    held.release()
    assert isinstance(await sending, Acknowledged)
    await log.close()


async def test_healing_ends_all_faults(log: Log, faults: Faults) -> None:
    faults.fail("end", Unavailable("x"), times=None)
    faults.shake(random.Random(1))
    held = faults.hold("append")
    appending = asyncio.create_task(log.append(RECORD))
    await held.reached()
    faults.heal()
    await appending
    assert await log.end("t", 0) == 1
    await log.close()


async def test_a_shaken_port_gives_others_their_turn(log: Log, faults: Faults) -> None:
    faults.shake(random.Random(7))
    order: list[int] = []

    async def ask(name: int) -> None:
        for _ in range(5):
            await log.end("t", 0)
            order.append(name)

    await asyncio.gather(ask(1), ask(2))
    assert order != sorted(order)
    await log.close()


def test_a_manual_clock_moves_only_when_it_is_advanced() -> None:
    clock = ManualClock(1000)
    assert clock.now_ms() == 1000
    clock.advance(5)
    assert clock.now_ms() == 1005
    clock.set(10)
    assert clock.now_ms() == 10
