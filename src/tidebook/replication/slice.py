"""Replicate one slice, a range of consecutive records of a log partition, to the store."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from tidebook.core.action import Damaged, Mark
from tidebook.core.errors import Fenced, InvalidInput, LogLost, UnknownVersion
from tidebook.core.head import Head
from tidebook.core.key import Key, journal_of, partition_of
from tidebook.core.position import Position
from tidebook.core.record import read_record
from tidebook.core.replication_plan import Parked, Pointer, PositionedAction, SliceWrites, advance_time, plan_key
from tidebook.core.topic_config import TopicConfig
from tidebook.log.port import Record
from tidebook.store.port import StoreReader, StoreWriter

#: The most heads that one store call reads.
HEADS_MAX = 5000
#: Planning yields to the event loop after this many records, so that other slices' I/O is not delayed.
RECORDS_PER_YIELD = 500


class SlicePlan(msgspec.Struct, frozen=True):
    """The writes of a slice, if any, and the error of the record at which it stops, if any."""

    #: The pointer after the writes.
    pointer: Pointer | None
    writes: SliceWrites | None
    stopped_by: UnknownVersion | None = None


async def replicate_slice(
    store: StoreWriter,
    topic: str,
    partition: int,
    records: Sequence[Record],
    config: TopicConfig,
    *,
    start: int | None = None,
    stop: int | None = None,
    clear_tags: bool = True,
) -> Pointer | None:
    """Replicate consecutive records of a partition; return the partition's pointer afterwards.

    `start` and `stop` are the offsets that were read (start ≤ offset < stop), which differ from the first and the last
    record where the log has holes. Records at or below the pointer are skipped. Raise `LogLost` if the slice begins
    after the first unreplicated offset, `Fenced` if the store is in a newer epoch, and `UnknownVersion`, once the
    records before it are replicated, at a record that a newer Tidebook wrote. With `clear_tags=False` deleted and
    purged events stay in the tag view.
    """
    plan = await plan_slice(store, topic, partition, records, config, start=start, stop=stop, clear_tags=clear_tags)
    if plan.writes is not None:
        await store.apply(plan.writes)
    if plan.stopped_by is not None:
        raise plan.stopped_by
    return plan.pointer


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
    """Decide what `replicate_slice` writes.

    The pointer is read before the heads: a slice that another replicator applies in between is then fenced or skipped.
    """
    pointer_before = await store.pointer(topic, partition)
    start, stop = _bounds(records, start, stop)
    if start >= stop:
        return SlicePlan(pointer_before, None)
    first = first_unreplicated_offset(pointer_before, topic, partition, config)
    if start > first:
        raise LogLost(
            topic=topic, partition=partition, first=first, last=start - 1,
            remedy="this slice begins after a record that was never replicated: start again from the store's pointers",
        )  # fmt: skip
    if stop <= first:
        return SlicePlan(pointer_before, None)
    time_before_ms = 0 if pointer_before is None else pointer_before.time_ms
    by_journal, parked, time_ms, stopped_by = await _group_by_journal(
        records, first, topic, partition, config, time_before_ms
    )
    if stopped_by is not None:
        stop = stopped_by.offset
        if stop <= first:
            return SlicePlan(pointer_before, None, stopped_by.error)
    heads = await _heads(store, topic, list(by_journal))
    pointer = Pointer(Position(config.epoch, stop - 1), time_ms)
    keys = []
    count = 0
    for id, actions in by_journal.items():
        if id is not None:
            count += len(actions)
            if count > RECORDS_PER_YIELD:
                count = 0
                await asyncio.sleep(0)
            key_writes = plan_key(
                Key(topic, id), heads.get(id), actions, config, partition=partition, clear_tags=clear_tags
            )
            if key_writes:
                keys.append(key_writes)
    writes = SliceWrites(topic, partition, pointer_before, pointer, tuple(keys), tuple(parked))
    return SlicePlan(pointer, writes, None if stopped_by is None else stopped_by.error)


class _Stop(msgspec.Struct, frozen=True):
    offset: int
    error: UnknownVersion


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


def first_unreplicated_offset(pointer: Pointer | None, topic: str, partition: int, config: TopicConfig) -> int:
    """Return the first offset of the configuration's epoch that is not replicated.

    It is 0 while the pointer is missing or of an older epoch. Raise `Fenced` if the pointer is of a newer epoch: the
    caller's configuration is outdated, and no offset of its epoch is meaningful any more.
    """
    if pointer is None or pointer.position.epoch < config.epoch:
        return 0
    if pointer.position.epoch > config.epoch:
        raise Fenced(
            f"{topic}/{partition} is replicated in epoch {pointer.position.epoch} and this process has the "
            f"configuration of epoch {config.epoch}: open the book again"
        )
    return pointer.position.offset + 1


async def _group_by_journal(
    records: Sequence[Record], first: int, topic: str, partition: int, config: TopicConfig, time_ms: int
) -> tuple[dict[str | None, list[PositionedAction]], list[Parked], int, _Stop | None]:
    """Return the actions at `first` and after by journal id, in offset order, with the log's time.

    Marks and parked records are listed under None. Reading stops at a record of an unknown version.
    """
    by_journal: dict[str | None, list[PositionedAction]] = {}
    parked: list[Parked] = []
    owners: dict[bytes | None, _RecordOwner] = {}
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
            return by_journal, parked, time_ms, _Stop(offset, error)
        owner = _NO_OWNER
        if not isinstance(action, Mark):
            owner = owners.get(record.key) or _cache_owner(owners, record.key, partition, config)
        id = owner.id
        if owner.void is not None and not isinstance(action, Damaged):
            action = owner.void
        if isinstance(action, Damaged):
            parked.append(Parked(topic, partition, position, timestamp_ms, id, action.reason, record.value or b""))
            id = None
        time_ms = advance_time(time_ms, timestamp_ms, action)
        actions = by_journal.get(id)
        if actions is None:
            actions = by_journal[id] = []
        actions.append(PositionedAction(position, timestamp_ms, action, time_ms))
    return by_journal, parked, time_ms, None


class _RecordOwner(msgspec.Struct, frozen=True, gc=False):
    """The journal id in a record's key, if any, and why records with this key are void, if they are."""

    id: str | None
    void: Damaged | None = None


_NO_OWNER = _RecordOwner(None)


def _cache_owner(
    owners: dict[bytes | None, _RecordOwner], key: bytes | None, partition: int, config: TopicConfig
) -> _RecordOwner:
    """Return the owner of records with this key, and cache it in `owners`."""
    owner = owners[key] = _owner_of(key, partition, config)
    return owner


def _owner_of(key: bytes | None, partition: int, config: TopicConfig) -> _RecordOwner:
    id = journal_of(key)
    if id is None:
        return _RecordOwner(None, Damaged(f"the record's key names no journal: {(key or b'')[:80]!r}"))
    home = partition_of(id, config.partitions)
    if home != partition:
        return _RecordOwner(id, Damaged(f"the record's journal belongs to partition {home} of {config.partitions}"))
    return _RecordOwner(id)


async def _heads(store: StoreReader, topic: str, ids: Sequence[str | None]) -> dict[str, Head]:
    present = [id for id in ids if id is not None]
    heads: dict[str, Head] = {}
    for i in range(0, len(present), HEADS_MAX):
        heads.update(await store.heads(topic, present[i : i + HEADS_MAX]))
    return heads
