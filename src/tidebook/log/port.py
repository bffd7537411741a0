"""What a log must do. Its adapters stand beside it; `tidebook.testing.conformance` says what each must pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, overload

import msgspec

from tidebook.core.errors import TidebookError


class Record(msgspec.Struct, frozen=True, gc=False):
    """A record as the log holds it. Offsets of a partition grow; a hole between two is no loss."""

    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...] = ()


class Outgoing(msgspec.Struct, frozen=True, gc=False):
    """A record on its way to a partition."""

    topic: str
    partition: int
    key: bytes | None
    value: bytes
    headers: tuple[tuple[str, bytes], ...] = ()


class Many(msgspec.Struct, frozen=True):
    """Records of one topic, in three columns: thousands of them are made and checked faster so."""

    topic: str
    partitions: list[int]
    keys: list[bytes]
    values: list[bytes]

    def record(self, place: int) -> Outgoing:
        """One of them."""
        return Outgoing(self.topic, self.partitions[place], self.keys[place], self.values[place])


class InOrder(msgspec.Struct, frozen=True):
    """Records of one topic; those of one chain (None: of no chain) must not pass by one another."""

    topic: str
    records: Sequence[Outgoing]
    chains: Sequence[bytes | None]


class Sent(msgspec.Struct, frozen=True, gc=False):
    """The log has it, durably, at this offset. `first_offset` etc. of neighbours tell nothing: read them."""

    partition: int
    offset: int
    timestamp_ms: int


class Batch(msgspec.Struct, frozen=True, gc=False):
    """Records in offset order, and how far they reach: the read goes on at `next_offset`."""

    records: tuple[Record, ...]
    next_offset: int


class TopicState(msgspec.Struct, frozen=True, gc=False):
    """A topic as the log has it. `topic_id` tells the lives of a topic apart."""

    topic: str
    topic_id: str
    partitions: int


class SentTogether(Sequence[Sent]):
    """Records of one partition that were all taken. What is told of a single one is made when it is asked for."""

    __slots__ = ("_timestamps_ms", "offsets", "partition")

    def __init__(self, partition: int, offsets: Sequence[int], timestamps_ms: Sequence[int]) -> None:
        self.partition = partition
        self.offsets = offsets
        self._timestamps_ms = timestamps_ms

    def __len__(self) -> int:
        return len(self.offsets)

    @overload
    def __getitem__(self, index: int) -> Sent: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sent]: ...
    def __getitem__(self, index: int | slice) -> Sent | list[Sent]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        return Sent(self.partition, self.offsets[index], self._timestamps_ms[index])


#: Called in the event loop's thread, in offset order per partition.
OnSent = Callable[[Sent | TidebookError], None]
#: The same for some of many: their places among them, all of one partition, and what came of each.
OnSentMany = Callable[[Sequence[int], Sequence[Sent | TidebookError]], None]


def one_of(on_sent: OnSentMany, place: int) -> OnSent:
    """The callback of one of many that is sent for itself."""
    return lambda result: on_sent((place,), (result,))


class Log(Protocol):
    """A set of topics, each with partitions, each an ordered run of records.

    Every failure is a TidebookError: Unavailable (nothing was written), OutcomeUnknown (it may have been),
    LogLost (the offset asked for is gone), NotFound (no such topic).
    """

    #: Whether `read(key=…)` finds a key's records without passing over those of others.
    indexed_by_key: bool
    #: Whether `end` alone is a barrier: no acknowledged record can lie at or behind it unseen.
    end_is_linearizable: bool

    async def create_topic(
        self, topic: str, partitions: int, *, limit_bytes: int | None = None, keep_forever: bool = False
    ) -> TopicState:
        """Make a topic, or return it as it is. `keep_forever`: no retention by time or size, only `truncate`."""
        ...

    async def topic(self, topic: str) -> TopicState | None:
        """The topic as it is now, or None."""
        ...

    async def topics(self) -> list[str]:
        """The names of all topics."""
        ...

    async def delete_topic(self, topic: str) -> None:
        """Remove a topic and all it holds."""
        ...

    def send(self, record: Outgoing, on_sent: OnSent) -> None:
        """Append a record and call back once it is durable. Records sent in the same breath share the cost."""
        ...

    def send_many(self, many: Many, on_sent: OnSentMany) -> None:
        """`send` for many, in this order."""
        ...

    async def append(self, record: Outgoing) -> Sent:
        """`send`, awaited."""
        ...

    async def read(
        self,
        topic: str,
        partition: int,
        *,
        start: int,
        stop: int,
        key: bytes | None = None,
        limit: int = 1000,
        limit_bytes: int = 4_000_000,
    ) -> Batch:
        """Records of offsets `start` ≤ offset < `stop`, at most `limit` of them (at least one where there is one).

        Ends when `next_offset` is `stop`. Raises LogLost where `start` lies below the log's start.
        """
        ...

    async def start(self, topic: str, partition: int) -> int:
        """The first offset that is still there."""
        ...

    async def end(self, topic: str, partition: int) -> int:
        """The offset that the next record gets, or a later one."""
        ...

    async def truncate(self, topic: str, partition: int, *, before: int) -> None:
        """Remove the records below `before`."""
        ...

    async def wait(self, topic: str, partition: int, *, offset: int, timeout_s: float | None = None) -> bool:
        """Wait until `end` is above `offset`; False when the time ran out first."""
        ...

    async def close(self) -> None:
        """Finish what was sent, then let go."""
        ...


async def read_all(
    log: Log, topic: str, partition: int, *, start: int, stop: int, key: bytes | None = None
) -> Sequence[Record]:
    """All records of a range, for ranges known to be small."""
    records: list[Record] = []
    while start < stop:
        batch = await log.read(topic, partition, start=start, stop=stop, key=key)
        records += batch.records
        start = batch.next_offset
    return records
