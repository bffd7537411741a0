"""The first unreplicated offset, and how its callers behave if the epochs differ."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tidebook.core.errors import Fenced
from tidebook.core.position import Position
from tidebook.core.replication_plan import Pointer, first_unreplicated_offset
from tidebook.core.topic_config import TopicConfig
from tidebook.pipeline.jobs.export import _replicated
from tidebook.replication.status import find_lag, partition_statuses
from tidebook.tags.horizon import Horizons
from tidebook.testing.conformance.journal_records import topic_config

TOPIC = "orders"
CONFIG = msgspec.structs.replace(topic_config(TOPIC), epoch=2)
NEWER = Pointer(Position(3, 41), 0)


@pytest.mark.parametrize(
    ("pointer", "first"), [(None, 0), (Pointer(Position(1, 41), 0), 0), (Pointer(Position(2, 41), 0), 42)]
)
def test_it_follows_the_pointer_of_the_same_epoch_and_is_0_in_a_new_one(pointer: Pointer | None, first: int) -> None:
    assert first_unreplicated_offset(pointer, TOPIC, 0, CONFIG) == first


def test_a_pointer_of_a_newer_epoch_fences_a_process_with_an_outdated_configuration() -> None:
    with pytest.raises(Fenced, match="epoch 3"):
        first_unreplicated_offset(NEWER, TOPIC, 0, CONFIG)


class OneTopic:
    """A log of 100 records and a store whose epoch is one above the caller's."""

    async def pointer(self, topic: str, partition: int) -> Pointer:
        return NEWER

    async def pointers(self, topic: str) -> dict[int, Pointer]:
        return dict.fromkeys(range(CONFIG.partitions), NEWER)

    async def topics(self) -> list[str]:
        return [TOPIC]

    async def topic_config(self, topic: str) -> TopicConfig:
        return CONFIG

    async def start(self, topic: str, partition: int) -> int:
        return 0

    async def end(self, topic: str, partition: int) -> int:
        return 100


async def test_status_export_lag_and_horizon_report_no_offset_of_another_epoch() -> None:
    """A defect that is fixed: they took an offset of the newer epoch for one of their own."""
    both: Any = OneTopic()
    book: Any = SimpleNamespace(log=both, store=both)
    with pytest.raises(Fenced):
        await partition_statuses(both, both, {TOPIC: CONFIG}, now_ms=0)
    with pytest.raises(Fenced):
        await _replicated(book, TOPIC, CONFIG)
    with pytest.raises(Fenced):
        await find_lag(both, TOPIC, CONFIG, {0: NEWER}, partitions=[0], stops={}, now_ms=0)
    horizons = Horizons(both, both)
    await horizons.read()
    with pytest.raises(Fenced):
        await horizons.lagging()
