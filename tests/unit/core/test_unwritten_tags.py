"""Tag rows of events that are appended and deleted within one slice: never written, but named in the clear.

Another replicator may have written them or may still do so; a clear that did not name them would leave them forever.
"""

from __future__ import annotations

import msgspec
import pytest

from tidebook.core.action import Delete, Purge
from tidebook.core.key import Key
from tidebook.core.position import Position
from tidebook.core.replication_plan import ClearEvents, ClearJournal, PositionedAction, PutTags, Write, plan_key
from tidebook.core.topic_config import TopicConfig
from tidebook.testing.action_histories import append, delete, placed_at, purge

KEY = Key("orders", "o-1")
CONFIG = TopicConfig(topic_id="t", partitions=1)


def planned(*ends: Delete | Purge, clear_tags: bool = True) -> tuple[Write, ...]:
    """Plan one slice of three appends of one tagged event each, followed by `ends`."""
    tagged = [msgspec.structs.replace(placed_at(append(1), at), tagged=(("paid", 1),)) for at in range(3)]
    actions = [*tagged, *ends]
    records = [PositionedAction(Position(1, at), 0, action, time_ms=at) for at, action in enumerate(actions)]
    return plan_key(KEY, None, records, CONFIG, clear_tags=clear_tags)


def put_tags(writes: tuple[Write, ...]) -> list[int]:
    return [row.offset for write in writes if isinstance(write, PutTags) for row in write.rows]


def test_a_delete_names_the_tag_rows_that_its_slice_does_not_write() -> None:
    writes = planned(delete(2))
    [clear] = [write for write in writes if isinstance(write, ClearEvents)]
    assert [place.offset for place in clear.unwritten] == [0, 1]
    assert put_tags(writes) == [2]


def test_a_purge_names_the_tag_rows_that_its_slice_does_not_write() -> None:
    writes = planned(purge())
    [clear] = [write for write in writes if isinstance(write, ClearJournal)]
    assert [place.offset for place in clear.unwritten] == [0, 1, 2]
    assert put_tags(writes) == []


def test_a_purge_after_a_delete_names_all_unwritten_tag_rows() -> None:
    writes = planned(delete(2), purge())
    [clear] = [write for write in writes if isinstance(write, ClearEvents | ClearJournal)]
    assert [place.offset for place in clear.unwritten] == [0, 1, 2]


@pytest.mark.parametrize("end", [delete(2), purge()], ids=["delete", "purge"])
def test_tags_that_are_not_cleared_are_written(end: Delete | Purge) -> None:
    writes = planned(end, clear_tags=False)
    assert [write.unwritten for write in writes if isinstance(write, ClearEvents | ClearJournal)] == [()]
    assert put_tags(writes) == [0, 1, 2]
