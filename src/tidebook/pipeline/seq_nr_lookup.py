"""Look up the sequence numbers of replicated appends in the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from tidebook.core.action import Append
from tidebook.core.errors import UnknownVersion
from tidebook.core.event import unpack_events
from tidebook.core.head import Head
from tidebook.core.key import Key, journal_of, partition_of
from tidebook.core.position import Position
from tidebook.core.record import read_record
from tidebook.core.replication_plan import EventRow
from tidebook.core.topic_config import TopicConfig
from tidebook.log.port import Record
from tidebook.store.port import StoreReader

PAGE_ROWS = 1_000


class _Append(msgspec.Struct, frozen=True, gc=False):
    position: Position
    timestamp_ms: int
    body: bytes


async def number_events(
    store: StoreReader, topic: str, partition: int, records: Sequence[Record], config: TopicConfig
) -> list[tuple[str, EventRow]]:
    """Return the events of replicated records with their journal ids, in offset order.

    Void, deleted and purged events are left out. Heads list the most recent appends; older ones are looked up in the
    event rows.
    """
    appends = _appends(records, partition, config)
    heads = await store.heads(topic, list(appends))
    numbered: list[tuple[str, EventRow]] = []
    for id, of_id in appends.items():
        head = heads.get(id)
        if head is None or not head.live:
            continue
        firsts = await _first_seq_nrs(store, Key(topic, id), head, of_id)
        for each in of_id:
            first = firsts.get(each.position)
            if first is not None:
                numbered += (
                    (id, EventRow(first + i, encoded, each.timestamp_ms, each.position, i))
                    for i, encoded in enumerate(unpack_events(each.body))
                    if first + i > head.delete_to
                )
    numbered.sort(key=_place)
    return numbered


def _place(numbered: tuple[str, EventRow]) -> tuple[int, int]:
    return numbered[1].position.offset, numbered[1].index


def _appends(records: Sequence[Record], partition: int, config: TopicConfig) -> dict[str, list[_Append]]:
    found: dict[str, list[_Append]] = {}
    for record in records:
        id = journal_of(record.key)
        if id is None:
            continue
        try:
            action = read_record(record.value, limit_bytes=config.limit_bytes)
        except UnknownVersion:
            continue  # replication is stopped before it
        if not isinstance(action, Append) or action.epoch != config.epoch:
            continue
        if partition_of(id, config.partitions) == partition:
            at = Position(config.epoch, record.offset)
            found.setdefault(id, []).append(_Append(at, record.timestamp_ms, action.body))
    return found


async def _first_seq_nrs(
    store: StoreReader, key: Key, head: Head, appends: Sequence[_Append]
) -> Mapping[Position, int]:
    """Return the sequence number of the first event of each effective append, by position."""
    firsts = {each.position: each.first for each in head.recent if each.position >= head.incarnation}
    oldest = min(firsts, default=None)
    complete = head.evicted is None or head.evicted < head.incarnation
    older = [
        each.position
        for each in appends
        if each.position >= head.incarnation and not complete and (oldest is None or each.position < oldest)
    ]
    if older:
        firsts |= await _look_up(store, key, head, min(older), max(older))
    return firsts


async def _look_up(store: StoreReader, key: Key, head: Head, first: Position, last: Position) -> dict[Position, int]:
    """Return the first sequence numbers of the appends from `first` to `last`.

    Positions increase with sequence numbers, so `first` is found by binary search.
    """
    low, high = head.delete_to, head.seq_nr
    while low < high:
        middle = (low + high) // 2
        page = await store.events(key, head, after=middle, to=high, limit=1)
        if not page or page[0].position >= first:
            high = middle
        else:
            low = page[0].seq_nr
    found: dict[Position, int] = {}
    after = low
    while page := await store.events(key, head, after=after, to=head.seq_nr, limit=PAGE_ROWS):
        for row in page:
            if row.position > last:
                return found
            # The row's index within its append gives the first number even if the first events are deleted.
            found.setdefault(row.position, row.seq_nr - row.index)
        after = page[-1].seq_nr
    return found
