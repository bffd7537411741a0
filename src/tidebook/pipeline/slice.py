"""One slice of a partition, from the log's records to the store: what every replicator does, whatever runs it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from tidebook.core.action import Damaged, Mark
from tidebook.core.errors import Fenced, InvalidInput, LogLost, UnknownVersion
from tidebook.core.head import Head
from tidebook.core.key import Key, journal_id, partition_of
from tidebook.core.position import Position
from tidebook.core.record import read_record
from tidebook.core.replication import Parked, Placed, Pointer, SliceWrites, advance_time, plan_key
from tidebook.core.topic import TopicFacts
from tidebook.log.port import Record
from tidebook.store.port import StoreReader, StoreWriter

#: How many heads are asked for at once.
HEADS_MAX = 5000
#: After so many records the loop has its turn: what other slices have under way would wait for this one otherwise.
RECORDS_A_TURN = 500


class Plan(msgspec.Struct, frozen=True):
    """What a slice writes, if anything, and the record at which it had to stop, if any."""

    #: The pointer once the writes are done.
    pointer: Pointer | None
    writes: SliceWrites | None
    stopped_by: UnknownVersion | None = None


async def replicate_slice(
    store: StoreWriter,
    topic: str,
    partition: int,
    records: Sequence[Record],
    facts: TopicFacts,
    *,
    start: int | None = None,
    stop: int | None = None,
    clear_tags: bool = True,
) -> Pointer | None:
    """Replicate consecutive records of a partition; returns how far the partition is replicated now.

    `start` and `stop` tell the offsets that were read (start ≤ offset < stop), which matters only where the log has
    holes; without them the slice reaches from its first record to its last. It may begin below the pointer: what was
    replicated is left out. Raises LogLost where it begins past the next record that the store waits for, and
    UnknownVersion, after replicating what lies before, where a newer Tidebook wrote the record. With
    `clear_tags=False` deleted and purged events stay in the tag view.
    """
    plan = await plan_slice(store, topic, partition, records, facts, start=start, stop=stop, clear_tags=clear_tags)
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
    facts: TopicFacts,
    *,
    start: int | None = None,
    stop: int | None = None,
    clear_tags: bool = True,
) -> Plan:
    """Decide what `replicate_slice` writes. The pointer is read before the heads: replication rests on that order."""
    began = await store.pointer(topic, partition)
    start, stop = _bounds(records, start, stop)
    if start >= stop:
        return Plan(began, None)
    wanted = next_offset(began, topic, partition, facts)
    if start > wanted:
        raise LogLost(
            topic=topic, partition=partition, first=wanted, last=start - 1,
            remedy="this slice begins behind a record that was never replicated: start again from the store's pointers",
        )  # fmt: skip
    if stop <= wanted:
        return Plan(began, None)
    began_ms = 0 if began is None else began.time_ms
    placed, parked, time_ms, stopped_by = await _read(records, wanted, topic, partition, facts, began_ms)
    if stopped_by is not None:
        stop = stopped_by.offset
        if stop <= wanted:
            return Plan(began, None, stopped_by.error)
    heads = await _heads(store, topic, list(placed))
    pointer = Pointer(Position(facts.epoch, stop - 1), time_ms)
    keys = []
    turn = 0
    for id, of_key in placed.items():
        if id is not None:
            turn += len(of_key)
            if turn > RECORDS_A_TURN:
                turn = 0
                await asyncio.sleep(0)
            key_writes = plan_key(
                Key(topic, id), heads.get(id), of_key, facts, partition=partition, clear_tags=clear_tags
            )
            if key_writes:
                keys.append(key_writes)
    writes = SliceWrites(topic, partition, began, pointer, tuple(keys), tuple(parked))
    return Plan(pointer, writes, None if stopped_by is None else stopped_by.error)


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


def next_offset(began: Pointer | None, topic: str, partition: int, facts: TopicFacts) -> int:
    """The first offset that is not replicated yet. A new epoch starts over, unless its pointer was set by `adopt`."""
    if began is None or began.position.epoch < facts.epoch:
        return 0
    if began.position.epoch > facts.epoch:
        raise Fenced(
            f"{topic}/{partition} is replicated in epoch {began.position.epoch} and this replicator holds the facts "
            f"of epoch {facts.epoch}: open the book again"
        )
    return began.position.offset + 1


async def _read(
    records: Sequence[Record], wanted: int, topic: str, partition: int, facts: TopicFacts, time_ms: int
) -> tuple[dict[str | None, list[Placed]], list[Parked], int, _Stop | None]:
    """Records from `wanted` on by journal, in offset order, with the log's time; those of no journal under None."""
    placed: dict[str | None, list[Placed]] = {}
    parked: list[Parked] = []
    names: dict[bytes | None, _Named] = {}
    before = -1
    epoch, limit_bytes = facts.epoch, facts.limit_bytes
    for turn, record in enumerate(records, 1):
        if turn % RECORDS_A_TURN == 0:
            await asyncio.sleep(0)
        offset, timestamp_ms = record.offset, record.timestamp_ms
        if offset <= before:
            raise InvalidInput(f"{topic}/{partition}: offset {offset} comes behind {before}: sort the slice")
        before = offset
        if offset < wanted:
            continue
        position = Position(epoch, offset)
        try:
            action = read_record(record.value, limit_bytes=limit_bytes)
        except UnknownVersion as error:
            error.add_note(f"at {topic}/{partition}, offset {offset}")
            return placed, parked, time_ms, _Stop(offset, error)
        named = _NOBODY
        if not isinstance(action, Mark):
            named = names.get(record.key) or _named(names, record.key, partition, facts)
        id = named.id
        if named.void is not None and not isinstance(action, Damaged):
            action = named.void
        if isinstance(action, Damaged):
            parked.append(Parked(topic, partition, position, timestamp_ms, id, action.reason, record.value or b""))
            id = None
        time_ms = advance_time(time_ms, timestamp_ms, action)
        of_id = placed.get(id)
        if of_id is None:
            of_id = placed[id] = []
        of_id.append(Placed(position, timestamp_ms, action, time_ms))
    return placed, parked, time_ms, None


class _Named(msgspec.Struct, frozen=True, gc=False):
    """The journal that a record's key names, as far as it can be told, and why its records are void, if they are."""

    id: str | None
    void: Damaged | None = None


_NOBODY = _Named(None)


def _named(names: dict[bytes | None, _Named], key: bytes | None, partition: int, facts: TopicFacts) -> _Named:
    """Whose records these are. What no reader of any journal could meet is as void as a damaged one."""
    named = names[key] = _journal_of(key, partition, facts)
    return named


def _journal_of(key: bytes | None, partition: int, facts: TopicFacts) -> _Named:
    try:
        id = journal_id((key or b"").decode())
    except (UnicodeDecodeError, InvalidInput) as error:
        return _Named(None, Damaged(f"the record's key names no journal: {error}"))
    home = partition_of(id, facts.partitions)
    if home != partition:
        return _Named(id, Damaged(f"the record's journal lives in partition {home} of {facts.partitions}"))
    return _Named(id)


async def _heads(store: StoreReader, topic: str, ids: Sequence[str | None]) -> dict[str, Head]:
    named = [id for id in ids if id is not None]
    heads: dict[str, Head] = {}
    for i in range(0, len(named), HEADS_MAX):
        heads.update(await store.heads(topic, named[i : i + HEADS_MAX]))
    return heads
