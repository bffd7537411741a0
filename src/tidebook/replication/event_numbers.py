"""Look up the sequence numbers of replicated appends, which are not in the log, in heads and event rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tidebook.core.action import Append
from tidebook.core.event import unpack_events
from tidebook.core.head import Head
from tidebook.core.key import Key
from tidebook.core.position import Position
from tidebook.core.record import read_record
from tidebook.core.replication_plan import EventRow
from tidebook.core.topic_config import TopicConfig
from tidebook.log.port import Record
from tidebook.replication.slice import RecordOwners
from tidebook.store.port import StoreReader

PAGE_ROWS = 1_000


async def number_events(
    store: StoreReader, topic: str, partition: int, records: Sequence[Record], config: TopicConfig
) -> list[tuple[str, EventRow]]:
    """Return the events of replicated records with their journal ids, in offset order.

    Void, deleted and purged events are left out. Heads list the most recent appends; older ones are looked up in the
    event rows. Raise `UnknownVersion` for a record that a later build has written and replicated.
    """
    appends = _appends(records, partition, config)
    heads = await store.heads(topic, list(appends))
    numbered: list[tuple[str, EventRow]] = []
    for id, of_id in appends.items():
        head = heads.get(id)
        if head is None or not head.live:
            continue
        firsts = await first_seq_nrs(store, Key(topic, id), head, of_id)
        for position, (timestamp_ms, body) in of_id.items():
            first = firsts.get(position)
            if first is not None:
                numbered += (
                    (id, EventRow(first + i, encoded, timestamp_ms, position, i))
                    for i, encoded in enumerate(unpack_events(body))
                    if first + i > head.delete_to
                )
    numbered.sort(key=lambda each: (each[1].position.offset, each[1].index))
    return numbered


#: The timestamp and the encoded events of each append, by position.
_Appends = dict[Position, tuple[int, bytes]]


def _appends(records: Sequence[Record], partition: int, config: TopicConfig) -> dict[str, _Appends]:
    found: dict[str, _Appends] = {}
    owners = RecordOwners(partition, config)
    for record in records:
        action = read_record(record.value, limit_bytes=config.limit_bytes)
        id, void = owners[record.key]
        if id is not None and void is None and isinstance(action, Append) and action.epoch == config.epoch:
            found.setdefault(id, {})[Position(config.epoch, record.offset)] = (record.timestamp_ms, action.body)
    return found


async def first_seq_nrs(
    store: StoreReader, key: Key, head: Head, appends: Iterable[Position]
) -> Mapping[Position, int]:
    """Return the sequence number of the first event of each effective append that the head includes, by position.

    `appends` are the requested positions; the result may contain others.
    """
    firsts = {each.position: each.first for each in head.recent if each.position >= head.incarnation}
    if head.evicted is None or head.evicted < head.incarnation:
        return firsts
    oldest = min(firsts, default=None)
    older = [position for position in appends if position >= head.incarnation and (oldest is None or position < oldest)]
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
