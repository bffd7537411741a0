"""Plan the writes that replicate a slice, a range of consecutive records of a log partition, to the store."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from tidebook.core.action import Damaged, Mark
from tidebook.core.errors import InvalidInput, LogLost, UnknownVersion
from tidebook.core.key import Key, home_of
from tidebook.core.position import Position
from tidebook.core.record import read_record
from tidebook.core.replication_plan import (
    Parked,
    Pointer,
    PositionedAction,
    SliceWrites,
    advance_time,
    first_unreplicated_offset,
    plan_key,
)
from tidebook.core.topic_config import TopicConfig
from tidebook.log.port import Record
from tidebook.store.port import StoreReader

#: The limits of one slice; the Spark session limits its Arrow batches to the same sizes.
SLICE_RECORDS_MAX = 100_000
SLICE_VALUE_BYTES_MAX = 32 * 1024 * 1024
#: Planning yields to the event loop after this many records, so that other slices' I/O is not delayed.
RECORDS_PER_YIELD = 500


class SlicePlan(msgspec.Struct, frozen=True):
    """The writes of a slice, if any, and the error of the record at which it stops, if any."""

    #: The pointer after the writes.
    pointer: Pointer | None
    writes: SliceWrites | None
    stopped_by: UnknownVersion | None = None


async def plan_slice(
    store: StoreReader,
    topic: str,
    partition: int,
    records: Sequence[Record],
    config: TopicConfig,
    *,
    start: int | None = None,
    stop: int | None = None,
    clear_tags: bool = True,
) -> SlicePlan:
    """Decide what to write for consecutive records of a partition; those at or below the pointer are skipped.

    `start` and `stop` are the offsets that were read (start ≤ offset < stop), which differ from the first and the last
    record where the log has holes. Raise `LogLost` if the slice begins after the first unreplicated offset, and
    `Fenced` if the store is in a newer epoch. With `clear_tags=False` deleted and purged events stay in the tag view.

    The pointer is read before the heads: a slice that another replicator applies in between is then fenced or skipped.
    """
    pointer_before = await store.pointer(topic, partition)
    start, stop = _bounds(records, start, stop)
    first = first_unreplicated_offset(pointer_before, topic, partition, config)
    if start >= stop or stop <= first:
        return SlicePlan(pointer_before, None)
    if start > first:
        raise LogLost(
            topic=topic, partition=partition, first=first, last=start - 1,
            remedy="this slice begins after a record that was never replicated: start again from the store's pointers",
        )  # fmt: skip
    time_before_ms = 0 if pointer_before is None else pointer_before.time_ms
    grouped = await _group_by_journal(records, first, topic, partition, config, time_before_ms)
    if grouped.stopped_by is not None:
        stop = grouped.stopped_at
        if stop <= first:
            return SlicePlan(pointer_before, None, grouped.stopped_by)
    # In one call, bounded by the slice: where each journal has one record, a store reads many heads in one request.
    heads = await store.heads(topic, list(grouped.actions))
    pointer = Pointer(Position(config.epoch, stop - 1), grouped.time_ms)
    keys = []
    count = 0
    for id, actions in grouped.actions.items():
        count += len(actions)
        if count > RECORDS_PER_YIELD:
            count = 0
            await asyncio.sleep(0)
        key_writes = plan_key(
            Key(topic, id), heads.get(id), actions, config, partition=partition, clear_tags=clear_tags
        )
        if key_writes:
            keys.append(key_writes)
    writes = SliceWrites(topic, partition, pointer_before, pointer, tuple(keys), tuple(grouped.parked), config.topic_id)
    return SlicePlan(pointer, writes, grouped.stopped_by)


def _bounds(records: Sequence[Record], start: int | None, stop: int | None) -> tuple[int, int]:
    if start is None:
        start = records[0].offset if records else 0
    if stop is None:
        stop = records[-1].offset + 1 if records else start
    if records and not start <= records[0].offset <= records[-1].offset < stop:
        raise InvalidInput(
            f"a slice of offsets {start} to {stop - 1} cannot hold {records[0].offset} to {records[-1].offset}"
        )
    return start, stop


class RecordOwners(dict[bytes | None, tuple[str | None, Damaged | None]]):
    """Maps a record key to its journal id, if it is one, and to the reason why records with this key are void."""

    def __init__(self, partition: int, config: TopicConfig) -> None:
        self._partition = partition
        self._partitions = config.partitions

    def __missing__(self, key: bytes | None) -> tuple[str | None, Damaged | None]:
        id, home = home_of(key, self._partitions)
        void = None
        if id is None:
            void = Damaged(f"the record's key names no journal: {(key or b'')[:80]!r}")
        elif home != self._partition:
            void = Damaged(f"the record's journal belongs to partition {home} of {self._partitions}")
        owner = self[key] = (id, void)
        return owner


class _GroupedActions(msgspec.Struct):
    """The actions of a slice by journal id, in offset order, and the log time after them."""

    time_ms: int
    actions: dict[str, list[PositionedAction]] = {}
    parked: list[Parked] = []
    #: The record of an unknown version at which reading stopped, if any.
    stopped_by: UnknownVersion | None = None
    stopped_at: int = 0


async def _group_by_journal(
    records: Sequence[Record], first: int, topic: str, partition: int, config: TopicConfig, time_ms: int
) -> _GroupedActions:
    """Group the actions at `first` and after by journal; marks and parked records only advance the time."""
    grouped = _GroupedActions(time_ms)
    by_journal, parked = grouped.actions, grouped.parked
    owners = RecordOwners(partition, config)
    before = -1
    epoch, limit_bytes = config.epoch, config.limit_bytes
    for count, record in enumerate(records, 1):
        if count % RECORDS_PER_YIELD == 0:
            await asyncio.sleep(0)
        offset, timestamp_ms = record.offset, record.timestamp_ms
        if offset <= before:
            raise InvalidInput(f"{topic}/{partition}: offset {offset} follows {before}: sort the slice")
        before = offset
        if offset < first:
            continue
        position = Position(epoch, offset)
        try:
            action = read_record(record.value, limit_bytes=limit_bytes)
        except UnknownVersion as error:
            error.add_note(f"at {topic}/{partition}, offset {offset}")
            grouped.stopped_by, grouped.stopped_at = error, offset
            break
        id = None
        if not isinstance(action, Mark):
            id, void = owners[record.key]
            if void is not None and not isinstance(action, Damaged):
                action = void
        time_ms = advance_time(time_ms, timestamp_ms, action)
        if isinstance(action, Damaged):
            parked.append(Parked(topic, partition, position, timestamp_ms, id, action.reason, record.value or b""))
        elif id is not None:
            actions = by_journal.get(id)
            if actions is None:
                actions = by_journal[id] = []
            actions.append(PositionedAction(position, timestamp_ms, action, time_ms))
    grouped.time_ms = time_ms
    return grouped
