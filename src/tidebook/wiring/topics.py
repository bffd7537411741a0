"""Describe and delete the topics of a book, in the log and in the store."""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from tidebook.core.errors import Corrupt, InvalidInput, NotFound
from tidebook.core.key import topic_name
from tidebook.core.record import is_record
from tidebook.core.replication_plan import first_unreplicated_offset
from tidebook.log.port import Log, TopicState, last_record
from tidebook.store.port import StoreWriter

#: The content of a topic: journals, a region of a write-ahead log, or messages of an outbox or another program.
TopicKind = Literal["journal", "wal", "messages"]

_WAL_TOPIC = re.compile(r"wal\.(.+)\.(0|[1-9][0-9]*)\.(data|meta)")


class TopicDescription(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a topic in the log and in the store; tuples have one item for each partition, in order."""

    topic: str
    kind: TopicKind
    partitions: int
    #: The epoch of a journal topic; None for others.
    epoch: int | None
    #: The first retained offset of each partition, and the offset of its next record.
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    #: The last replicated offset of this epoch in each partition; None if nothing is replicated yet.
    pointers: tuple[int | None, ...]
    #: The number of records not replicated yet; None if the topic does not hold journals.
    lag: int | None

    @property
    def records(self) -> int:
        """The number of records in the log."""
        return sum(self.ends) - sum(self.starts)

    def as_row(self) -> dict[str, Any]:
        """Return the description as a JSON object."""
        return msgspec.structs.asdict(self)


async def describe_topic(log: Log, store: StoreWriter, topic: str) -> TopicDescription:
    """Describe a topic; raise `NotFound` if it does not exist, `Corrupt` if only the store has it."""
    pointers = await store.pointers(
        topic_name(topic)
    )  # read first: the configuration must not be older than the pointers
    config = await store.topic_config(topic)
    state = await log.topic(topic)
    if state is None:
        if config is None:
            raise NotFound(f"there is no topic {topic}")
        raise Corrupt(
            f"topic {topic}: it is in the store but not in the log: restore the log, or run "
            f"'tidebook journal adopt {topic}', which begins a new epoch with the data of the store"
        )
    numbers = range(state.partitions if config is None else config.partitions)
    starts = [await log.start(topic, number) for number in numbers]
    ends = [await log.end(topic, number) for number in numbers]
    next_offsets = [0 for _ in numbers]
    if config is not None:
        next_offsets = [first_unreplicated_offset(pointers.get(number), topic, number, config) for number in numbers]
    lag = sum(max(0, end - max(start, offset)) for start, end, offset in zip(starts, ends, next_offsets, strict=True))
    return TopicDescription(
        topic=topic,
        kind="journal" if config is not None else await _kind(log, state),
        partitions=len(numbers),
        epoch=None if config is None else config.epoch,
        starts=tuple(starts),
        ends=tuple(ends),
        pointers=tuple(offset - 1 if offset else None for offset in next_offsets),
        lag=None if config is None else lag,
    )


async def _kind(log: Log, state: TopicState) -> TopicKind:
    """Return the kind of a topic that is not in the store, from its name or its last record."""
    if _WAL_TOPIC.fullmatch(state.topic):
        return "wal"
    record = await last_record(log, state)
    return "journal" if record is not None and is_record(record.value) else "messages"


async def delete_topic(log: Log, store: StoreWriter, topic: str) -> None:
    """Delete a topic and all its data; raise `NotFound` if it does not exist.

    The log is deleted before the store: after a crash in between, the store still has the topic and the call can be
    repeated. In the other order, the old records would be replicated into a new topic of the same name.
    """
    wal = _WAL_TOPIC.fullmatch(topic_name(topic))
    if wal:
        raise InvalidInput(
            f"topic {topic} is part of a write-ahead log: "
            f"delete its region with 'tidebook wal delete {wal[1]} {wal[2]}'"
        )
    config = await store.topic_config(topic)
    if config is not None and not store.deletes_topics:
        raise InvalidInput(
            f"topic {topic} holds journals, and this store cannot delete them together: purge each with "
            f"'tidebook journal purge {topic} ID'; the empty topic remains"
        )
    in_log = True
    try:
        await log.delete_topic(topic)
    except NotFound:
        in_log = False
    if config is not None:
        await store.delete_topic(topic)
    elif not in_log:
        raise NotFound(f"there is no topic {topic}")
