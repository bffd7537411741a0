"""The tag rows that a delete or a purge clears on Cassandra: those of its events, and those not written."""

from __future__ import annotations

from typing import Any, cast

import pytest

pytest.importorskip("acsylla")

from tidebook.core.buckets import Buckets
from tidebook.core.event import Event, encode_event
from tidebook.core.head import Head
from tidebook.core.key import Key
from tidebook.core.position import Position, tombstone_stamp
from tidebook.core.replication_plan import ClearEvents, ClearJournal, EventRow, Pointer, SliceWrites, TagPosition
from tidebook.runtime.metrics import Metrics
from tidebook.store.cassandra import statements as cql
from tidebook.store.cassandra.tag_views import TagViews

KEY = Key("orders", "o-1")
AT = Position(1, 9)
PLACE = TagPosition("paid", 7, "orders", 0, 5, 0, 1)


class Rows:
    """A journal with one tagged event per number."""

    async def read(self, key: Key, head: Head, *, after: int, to: int, limit: int) -> list[EventRow]:
        kept = encode_event(Event(0, tags={"paid"}))
        return [EventRow(n, kept, 5, Position(1, n), 0, 7) for n in range(after + 1, min(to, head.seq_nr) + 1)][:limit]


class Fixed:
    """The bucket sizes of a store that never changed them."""

    async def fixed_at(self, _: int) -> Buckets:
        return Buckets()


def head_of(*, live: bool, delete_to: int) -> Head:
    return Head(live, 3, delete_to, Position(1, 1), AT, 10, None, 0, (), None, (), {"paid": 3} if live else {})


async def cleared(write: ClearEvents | ClearJournal) -> list[list[Any]]:
    views = TagViews(cast(Any, None), cast(Any, Rows()), cast(Any, Fixed()), Metrics(), batch_rows_max=100)
    writes = SliceWrites("orders", 0, None, Pointer(AT, 7), ((write,),))
    found = []
    async for batches in views.clear_rounds(writes, 8):
        found += [each.values for batch in batches for each in batch if each.cql == cql.CLEAR_TAG]
    return found


@pytest.mark.parametrize(
    ("write", "numbers"),
    [
        (ClearEvents(KEY, head_of(live=True, delete_to=2), 0, (PLACE,)), [5, 1, 2]),
        (ClearJournal(KEY, head_of(live=False, delete_to=2), (PLACE,)), [5, 1, 2, 3]),
        (ClearJournal(KEY, head_of(live=False, delete_to=0), (PLACE,), clear_tags=False), []),
    ],
    ids=["delete", "purge from the first event", "tags stay"],
)
async def test_a_clear_reaches_unwritten_tag_rows_and_those_of_its_events(
    write: ClearEvents | ClearJournal, numbers: list[int]
) -> None:
    found = await cleared(write)
    assert [values[6] for values in found] == numbers
    assert {values[0] for values in found} <= {tombstone_stamp(AT)}
