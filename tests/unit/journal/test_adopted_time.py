"""The time of an adopted topic: its new epoch begins above all times of the old one, in every partition."""

from __future__ import annotations

from pathlib import Path

from tidebook.core.action import Mark
from tidebook.core.position import Position
from tidebook.core.record import read_record
from tidebook.core.replication_plan import Pointer, SliceWrites
from tidebook.core.topic_config import TopicConfig
from tidebook.journal.settings import JournalSettings
from tidebook.journal.topic import adopt_topic
from tidebook.log.sqlite import SqliteLog
from tidebook.store.sqlite import SqliteStore
from tidebook.testing.clock import ManualClock

TOPIC = "orders"
OLD_MS = (7_000, 9_000)


async def test_an_adopted_epoch_begins_above_every_time_of_the_old_one(tmp_path: Path) -> None:
    """The clock of the new log may be slow, but events of a tag are ordered by these times: offsets restart at 0."""
    log, store = SqliteLog(tmp_path, clock=ManualClock(1_000)), SqliteStore(tmp_path)
    config = TopicConfig(topic_id="lost", partitions=2)
    await store.set_topic_config(TOPIC, config, expected=None)
    for number, time_ms in enumerate(OLD_MS):
        await store.apply(SliceWrites(TOPIC, number, None, Pointer(Position(1, 5), time_ms), ()))
    adopted = await adopt_topic(log, store, TOPIC, JournalSettings())
    assert adopted.epoch == 2
    for number in range(2):
        [record] = (await log.read(TOPIC, number, start=0, stop=9)).records
        mark = read_record(record.value, limit_bytes=config.limit_bytes)
        assert isinstance(mark, Mark)
        assert (mark.epoch, mark.time_ms) == (2, max(OLD_MS) + 1)
        assert adopted.began[number] == (0, max(OLD_MS) + 1)
        assert await store.pointer(TOPIC, number) == Pointer(Position(2, 0), max(OLD_MS) + 1)
    await store.close()
    await log.close()
