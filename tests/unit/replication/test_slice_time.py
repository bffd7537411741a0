"""Every record advances the log time, even a damaged one; otherwise the horizon would stop there."""

from __future__ import annotations

from pathlib import Path

from tidebook.core.position import Position
from tidebook.core.replication_plan import Pointer
from tidebook.core.topic_config import TopicConfig
from tidebook.log.port import Record
from tidebook.replication.slice import plan_slice
from tidebook.store.sqlite import SqliteStore

CONFIG = TopicConfig(topic_id="t", partitions=1)


async def test_a_damaged_record_moves_the_logs_time(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path)
    records = [
        Record(0, 5_000, b"o-1", b"no record of Tidebook's", ()),
        Record(1, 7_000, None, b"", ()),
        Record(2, 6_000, b"\xff", b"nor this one", ()),
    ]
    plan = await plan_slice(store, "orders", 0, records, CONFIG)
    assert plan.writes is not None
    assert [parked.position.offset for parked in plan.writes.parked] == [0, 1, 2]
    assert plan.pointer == Pointer(Position(1, 2), 7_000)
    await store.close()
