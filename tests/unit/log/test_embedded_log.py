"""What is particular to the embedded log; what every log must do is in the conformance suite."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tidebook.core.errors import LogLost, NotFound, TidebookError, TooLarge
from tidebook.core.metrics import Metrics
from tidebook.log.embedded import EmbeddedLog
from tidebook.log.port import Outgoing, Sent, read_all


def record(value: bytes = b"v", *, key: bytes | None = None, partition: int = 0, topic: str = "t") -> Outgoing:
    return Outgoing(topic, partition, key, value)


@pytest.fixture
async def log(tmp_path: Path) -> AsyncIterator[EmbeddedLog]:
    log = EmbeddedLog(tmp_path)
    await log.create_topic("t", 2)
    yield log
    await log.close()


async def test_a_record_comes_back_as_it_was_sent(log: EmbeddedLog) -> None:
    sent = await log.append(Outgoing("t", 1, b"k", b"v", (("a", b"1"), ("a", b"2"))))
    batch = await log.read("t", 1, start=0, stop=1)
    assert sent.offset == 0
    assert batch.next_offset == 1
    assert batch.records[0].key == b"k"
    assert batch.records[0].value == b"v"
    assert batch.records[0].headers == (("a", b"1"), ("a", b"2"))
    assert batch.records[0].timestamp_ms == sent.timestamp_ms


async def test_sends_of_one_breath_share_commits_and_answer_in_order(tmp_path: Path) -> None:
    metrics = Metrics()
    log = EmbeddedLog(tmp_path, metrics=metrics)
    await log.create_topic("t", 1)
    before = metrics.counted("folder_commits")
    answers: list[Sent | TidebookError] = []
    all_sent = asyncio.Event()

    def on_sent(answer: Sent | TidebookError) -> None:
        answers.append(answer)
        if len(answers) == 1000:
            all_sent.set()

    for _ in range(1000):
        log.send(record(), on_sent)
    await all_sent.wait()
    assert [answer.offset for answer in answers if isinstance(answer, Sent)] == list(range(1000))
    assert metrics.counted("folder_commits") - before < 20
    await log.close()


async def test_a_refused_record_leaves_its_neighbours_alone(tmp_path: Path) -> None:
    log = EmbeddedLog(tmp_path)
    await log.create_topic("t", 1, limit_bytes=10)
    sends = [record(b"a"), record(b"b", topic="none"), record(b"c" * 11), record(b"d", partition=1), record(b"e")]
    answers = await asyncio.gather(*map(log.append, sends), return_exceptions=True)
    assert [type(answer) for answer in answers] == [Sent, NotFound, TooLarge, NotFound, Sent]
    assert [each.value for each in await read_all(log, "t", 0, start=0, stop=2)] == [b"a", b"e"]
    await log.close()


async def test_a_page_ends_at_its_limits(log: EmbeddedLog) -> None:
    for _ in range(5):
        await log.append(record(b"x" * 100))
    assert (await log.read("t", 0, start=0, stop=5, limit=2)).next_offset == 2
    assert (await log.read("t", 0, start=0, stop=5, limit_bytes=250)).next_offset == 2
    assert (await log.read("t", 0, start=3, stop=5, limit_bytes=1)).next_offset == 4
    assert (await log.read("t", 0, start=0, stop=50)).next_offset == 5


async def test_a_key_is_read_without_the_others(log: EmbeddedLog) -> None:
    for i in range(10):
        await log.append(record(b"%d" % i, key=b"k%d" % (i % 3)))
    batch = await log.read("t", 0, start=1, stop=9, key=b"k0")
    assert [each.offset for each in batch.records] == [3, 6]
    assert batch.next_offset == 9


async def test_what_was_truncated_is_lost_and_offsets_go_on(log: EmbeddedLog) -> None:
    for _ in range(10):
        await log.append(record())
    await log.truncate("t", 0, before=10)
    assert (await log.start("t", 0), await log.end("t", 0)) == (10, 10)
    with pytest.raises(LogLost) as lost:
        await log.read("t", 0, start=4, stop=10)
    assert (lost.value.first, lost.value.last) == (4, 9)
    assert (await log.append(record())).offset == 10


async def test_a_topic_made_again_is_another_one(log: EmbeddedLog) -> None:
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


async def test_who_waits_is_woken_by_an_append(log: EmbeddedLog) -> None:
    waiting = asyncio.create_task(log.wait("t", 0, offset=0, timeout_s=30))
    await asyncio.sleep(0)
    await log.append(record())
    assert await waiting
    assert not await log.wait("t", 0, offset=1, timeout_s=0.01)


async def test_offsets_and_topics_are_there_after_reopening(tmp_path: Path) -> None:
    log = EmbeddedLog(tmp_path)
    state = await log.create_topic("t", 2)
    await log.append(record())
    await log.close()
    log = EmbeddedLog(tmp_path)
    assert await log.topic("t") == state
    assert (await log.append(record())).offset == 1
    await log.close()
