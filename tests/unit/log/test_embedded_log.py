"""Behaviour of the SQLite log that the conformance suite of logs does not cover."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tidebook.core.errors import LogLost, NotFound, TidebookError, TooLarge
from tidebook.log.port import Acknowledged, Outgoing, read_all
from tidebook.log.sqlite import SqliteLog
from tidebook.runtime.metrics import Metrics
from tidebook.testing.clock import ManualClock


def record(value: bytes = b"v", *, key: bytes | None = None, partition: int = 0, topic: str = "t") -> Outgoing:
    return Outgoing(topic, partition, key, value)


@pytest.fixture
async def log(tmp_path: Path) -> AsyncIterator[SqliteLog]:
    log = SqliteLog(tmp_path)
    await log.create_topic("t", 2)
    yield log
    await log.close()


async def test_a_record_is_read_as_it_was_sent(log: SqliteLog) -> None:
    sent = await log.append(Outgoing("t", 1, b"k", b"v", (("a", b"1"), ("a", b"2"))))
    batch = await log.read("t", 1, start=0, stop=1)
    assert sent.offset == 0
    assert batch.next_offset == 1
    assert batch.records[0].key == b"k"
    assert batch.records[0].value == b"v"
    assert batch.records[0].headers == (("a", b"1"), ("a", b"2"))
    assert batch.records[0].timestamp_ms == sent.timestamp_ms


async def test_concurrent_sends_share_commits_and_are_acknowledged_in_order(tmp_path: Path) -> None:
    metrics = Metrics()
    log = SqliteLog(tmp_path, metrics=metrics)
    await log.create_topic("t", 1)
    before = metrics.counted("sqlite_commits")
    answers: list[Acknowledged | TidebookError] = []
    all_sent = asyncio.Event()

    def on_sent(answer: Acknowledged | TidebookError) -> None:
        answers.append(answer)
        if len(answers) == 1000:
            all_sent.set()

    for _ in range(1000):
        log.send(record(), on_sent)
    await all_sent.wait()
    assert [answer.offset for answer in answers if isinstance(answer, Acknowledged)] == list(range(1000))
    assert metrics.counted("sqlite_commits") - before < 20
    await log.close()


async def test_a_refused_record_does_not_affect_the_others_of_its_batch(tmp_path: Path) -> None:
    log = SqliteLog(tmp_path)
    await log.create_topic("t", 1, limit_bytes=10)
    sends = [record(b"a"), record(b"b", topic="none"), record(b"c" * 11), record(b"d", partition=1), record(b"e")]
    answers = await asyncio.gather(*map(log.append, sends), return_exceptions=True)
    assert [type(answer) for answer in answers] == [Acknowledged, NotFound, TooLarge, NotFound, Acknowledged]
    assert [each.value for each in await read_all(log, "t", 0, start=0, stop=2)] == [b"a", b"e"]
    await log.close()


async def test_a_page_ends_at_its_limits(log: SqliteLog) -> None:
    for _ in range(5):
        await log.append(record(b"x" * 100))
    assert (await log.read("t", 0, start=0, stop=5, limit=2)).next_offset == 2
    assert (await log.read("t", 0, start=0, stop=5, limit_bytes=250)).next_offset == 2
    assert (await log.read("t", 0, start=3, stop=5, limit_bytes=1)).next_offset == 4
    assert (await log.read("t", 0, start=0, stop=50)).next_offset == 5


async def test_a_read_of_one_key_returns_no_records_of_others(log: SqliteLog) -> None:
    for i in range(10):
        await log.append(record(b"%d" % i, key=b"k%d" % (i % 3)))
    batch = await log.read("t", 0, start=1, stop=9, key=b"k0")
    assert [each.offset for each in batch.records] == [3, 6]
    assert batch.next_offset == 9


async def test_truncated_records_are_lost_and_offsets_continue(log: SqliteLog) -> None:
    for _ in range(10):
        await log.append(record())
    await log.truncate("t", 0, before=10)
    assert (await log.start("t", 0), await log.end("t", 0)) == (10, 10)
    with pytest.raises(LogLost) as lost:
        await log.read("t", 0, start=4, stop=10)
    assert (lost.value.first, lost.value.last) == (4, 9)
    assert (await log.append(record())).offset == 10


async def test_a_recreated_topic_has_another_id_and_no_old_records(log: SqliteLog) -> None:
    await log.append(record())
    before = await log.topic("t")
    await log.delete_topic("t")
    assert await log.topic("t") is None
    with pytest.raises(NotFound):
        await log.append(record())
    after = await log.create_topic("t", 2)
    assert before is not None
    assert after.topic_id != before.topic_id
    assert (await log.append(record())).offset == 0
    assert len((await log.read("t", 0, start=0, stop=1)).records) == 1


async def test_an_append_wakes_a_waiter(log: SqliteLog) -> None:
    waiting = asyncio.create_task(log.wait("t", 0, offset=0, timeout_s=30))
    await asyncio.sleep(0)
    await log.append(record())
    assert await waiting
    assert not await log.wait("t", 0, offset=1, timeout_s=0.01)


async def test_offsets_and_topics_survive_reopening(tmp_path: Path) -> None:
    log = SqliteLog(tmp_path)
    state = await log.create_topic("t", 2)
    await log.append(record())
    await log.close()
    log = SqliteLog(tmp_path)
    assert await log.topic("t") == state
    assert (await log.append(record())).offset == 1
    await log.close()


async def test_truncating_past_the_end_empties_the_log_and_offsets_continue(log: SqliteLog) -> None:
    for _ in range(10):
        await log.append(record())
    await log.truncate("t", 0, before=1_000)
    assert (await log.start("t", 0), await log.end("t", 0)) == (10, 10)
    assert (await log.append(record(b"next"))).offset == 10
    assert [each.value for each in (await log.read("t", 0, start=10, stop=11)).records] == [b"next"]


async def test_truncating_below_the_start_restores_nothing(log: SqliteLog) -> None:
    for _ in range(10):
        await log.append(record())
    await log.truncate("t", 0, before=8)
    await log.truncate("t", 0, before=3)
    assert await log.start("t", 0) == 8


async def test_times_do_not_go_back_with_the_clock(tmp_path: Path) -> None:
    clock = ManualClock(5_000)
    log = SqliteLog(tmp_path, clock=clock)
    await log.create_topic("t", 2)
    await log.append(record())
    clock.set(3_000)
    assert (await log.append(record())).timestamp_ms == 5_000
    assert (await log.append(record(partition=1))).timestamp_ms == 5_000
    await log.close()
    log = SqliteLog(tmp_path, clock=clock)
    assert (await log.append(record())).timestamp_ms == 5_000
    clock.set(5_001)
    assert (await log.append(record())).timestamp_ms == 5_001
    times = [each.timestamp_ms for each in await read_all(log, "t", 0, start=0, stop=4)]
    assert times == [5_000, 5_000, 5_000, 5_001]
    await log.close()


RECREATE = """
import asyncio, sys
from tidebook.log.sqlite import SqliteLog

async def main():
    log = SqliteLog(sys.argv[1])
    await log.delete_topic("t")
    await log.create_topic("t", 2)
    await log.close()

asyncio.run(main())
"""


async def test_a_topic_that_another_process_recreated_is_not_mistaken_for_the_old_one(
    log: SqliteLog, tmp_path: Path
) -> None:
    for _ in range(3):
        await log.append(record(b"old"))
    other = await asyncio.create_subprocess_exec(sys.executable, "-c", RECREATE, str(tmp_path))
    assert await other.wait() == 0
    assert (await log.append(record(b"new"))).offset == 0
    assert [each.value for each in (await log.read("t", 0, start=0, stop=9)).records] == [b"new"]


async def test_the_time_of_the_log_never_goes_back_on_any_partition(tmp_path: Path) -> None:
    """A tick brings the time of one partition to another, where no later record may have an earlier time."""
    clock = ManualClock(1_000_000)
    log = SqliteLog(tmp_path, clock=clock)
    for topic in ("a", "b", "c"):
        await log.create_topic(topic, 1)
    await log.append(record(topic="a"))
    clock.set(5)
    assert (await log.append(record(topic="b"))).timestamp_ms == 1_000_000
    await log.close()
    log = SqliteLog(tmp_path, clock=clock)
    assert (await log.append(record(topic="c"))).timestamp_ms == 1_000_000
    clock.set(1_000_001)
    assert (await log.append(record(topic="c"))).timestamp_ms == 1_000_001
    await log.close()
