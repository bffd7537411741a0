"""The port of the log: topics, partitions and records, as the journal, the WAL and the pipeline use them.

`tidebook.log.kafka` and `tidebook.log.sqlite` implement it; `tidebook.testing.conformance.log` tests its contract.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, overload

import msgspec

from tidebook.core.errors import LogLost, TidebookError, Unavailable


class Record(msgspec.Struct, frozen=True, gc=False):
    """A stored record. The offsets of a partition increase, but need not be consecutive: a gap is not a loss.

    `timestamp_ms` is the time that the log assigned to the record, in milliseconds since 1970.
    """

    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...] = ()


class Outgoing(msgspec.Struct, frozen=True, gc=False):
    """A record to append to a partition."""

    topic: str
    partition: int
    key: bytes | None
    value: bytes
    headers: tuple[tuple[str, bytes], ...] = ()


class RecordColumns(msgspec.Struct, frozen=True):
    """Records of one topic as three columns of equal length, which is cheaper than thousands of `Outgoing` objects."""

    topic: str
    partitions: Sequence[int]
    keys: Sequence[bytes]
    values: Sequence[bytes]

    def record(self, index: int) -> Outgoing:
        """Return the record at `index`."""
        return Outgoing(self.topic, self.partitions[index], self.keys[index], self.values[index])


class OrderedBatch(msgspec.Struct, frozen=True):
    """Records of one topic, each with the chain it belongs to, or None.

    The records of a chain are appended in this order; once one is rejected, the rest of its chain is not appended.
    """

    topic: str
    records: Sequence[Outgoing]
    chains: Sequence[bytes | None]


class Acknowledged(msgspec.Struct, frozen=True, gc=False):
    """The log has stored a record durably at this offset, which implies nothing about the offsets before and after."""

    partition: int
    offset: int
    timestamp_ms: int


class RecordPage(msgspec.Struct, frozen=True, gc=False):
    """Records in offset order. `next_offset` is the offset at which the next read continues."""

    records: tuple[Record, ...]
    next_offset: int


class TopicState(msgspec.Struct, frozen=True, gc=False):
    """The state of a topic. A topic that is deleted and created again has another `topic_id`."""

    topic: str
    topic_id: str
    partitions: int


class AcknowledgedBatch(Sequence[Acknowledged]):
    """The acknowledgements of many records of one partition. Each `Acknowledged` is only created when it is read."""

    __slots__ = ("_timestamps_ms", "offsets", "partition")

    def __init__(self, partition: int, offsets: Sequence[int], timestamps_ms: Sequence[int]) -> None:
        self.partition = partition
        self.offsets = offsets
        self._timestamps_ms = timestamps_ms

    def __len__(self) -> int:
        return len(self.offsets)

    @overload
    def __getitem__(self, index: int) -> Acknowledged: ...
    @overload
    def __getitem__(self, index: slice) -> list[Acknowledged]: ...
    def __getitem__(self, index: int | slice) -> Acknowledged | list[Acknowledged]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        return Acknowledged(self.partition, self.offsets[index], self._timestamps_ms[index])


#: Receives the result of one `send`, once, in the event loop's thread, in offset order per partition.
OnSent = Callable[[Acknowledged | TidebookError], None]
#: Receives results of a `send_many`: indexes into its columns, all of one partition, and the result of each. Every
#: index is reported once, over one or more calls.
OnSentMany = Callable[[Sequence[int], Sequence[Acknowledged | TidebookError]], None]


def callback_for(on_sent: OnSentMany, index: int) -> OnSent:
    """Return a callback for a single `send` that reports its result to `on_sent` under `index`."""
    return lambda result: on_sent((index,), (result,))


class Log(Protocol):
    """Topics with numbered partitions; a partition is an append-only sequence of records, ordered by offset.

    Every failure is a TidebookError:

    - `Unavailable`: the call failed and wrote nothing; it can be retried.
    - `OutcomeUnknown`: a write failed, and may or may not have taken effect.
    - `TooLarge`: a record exceeds the topic's `limit_bytes`; it was not written.
    - `LogLost`: records that the call needs are no longer in the log.
    - `Corrupt`: the stored log is damaged.
    - `NotFound`: there is no such topic or partition.
    - `InvalidInput`: an argument is wrong, or the log was opened before this process forked.
    """

    #: Whether `read(key=…)` uses an index. Without one it scans the records of all keys.
    indexed_by_key: bool
    #: Whether `end` is a read barrier: every record acknowledged before the call has an offset below the result.
    end_is_linearizable: bool

    async def create_topic(
        self, topic: str, partitions: int, *, limit_bytes: int | None = None, keep_forever: bool = False
    ) -> TopicState:
        """Create a topic, or return the existing one unchanged, even if it has a different number of partitions.

        Records over `limit_bytes` are rejected with TooLarge. With `keep_forever` the topic has no retention by time
        or size: only `truncate` and `delete_topic` remove records. Raise InvalidInput if the settings of an existing
        topic on the server contradict `limit_bytes` or `keep_forever`.
        """
        ...

    async def topic(self, topic: str) -> TopicState | None:
        """Return the topic as it is now, or None if there is none."""
        ...

    async def topics(self) -> list[str]:
        """Return the names of all topics."""
        ...

    async def delete_topic(self, topic: str) -> None:
        """Delete a topic and its records; raise NotFound if there is none."""
        ...

    def send(self, record: Outgoing, on_sent: OnSent) -> None:
        """Append a record; call `on_sent` with its Acknowledged once it is durable, or with the error.

        Errors are only reported through `on_sent`, which is not called before `send` has returned (in a forked child
        it may be, since the event loop may not run there). Records that are sent to a partition one after another get
        increasing offsets. A record that fails does not affect the others. Records that are sent in the same iteration
        of the event loop may share a round trip or a commit.
        """
        ...

    def send_many(self, columns: RecordColumns, on_sent: OnSentMany) -> None:
        """Send each record as `send` does, in this order."""
        ...

    async def append(self, record: Outgoing) -> Acknowledged:
        """Append a record; return once it is durable, or raise the error.

        Cancelling the call does not withdraw the record.
        """
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
    ) -> RecordPage:
        """Return records with `start` ≤ offset < `stop`, in offset order; with `key`, only those of this key.

        A page has at most `limit` records, and exceeds `limit_bytes` of values only if it has a single record. To read
        the whole range, call again with `start=next_offset` until that is `stop`. A page may be empty although
        `next_offset` has advanced, if the offsets in between belong to other keys or are gaps.

        A read does not wait for records: if the partition ends before `stop`, the range ends there, and a page at the
        end is empty with `next_offset == start`. Raise LogLost if `start` is below the partition's start: truncated
        records are never skipped silently. An adapter may also raise LogLost if `start` is after the partition's end.
        """
        ...

    async def start(self, topic: str, partition: int) -> int:
        """Return the first offset of the partition that was not truncated; in an empty partition it equals the end."""
        ...

    async def end(self, topic: str, partition: int) -> int:
        """Return the partition's end: the next record gets this offset or a later one.

        If `end_is_linearizable` is False, the result may be lower than the offset of a record that was acknowledged
        before the call. Truncation does not lower the end.
        """
        ...

    async def truncate(self, topic: str, partition: int, *, before: int) -> None:
        """Remove the records below `before`, or below the end if that is lower, and move the partition's start there.

        Do nothing if the start is at or above `before` already.
        """
        ...

    async def wait(self, topic: str, partition: int, *, offset: int, timeout_s: float | None = None) -> bool:
        """Return True as soon as the partition's end is above `offset`, or False after `timeout_s` (None: no limit)."""
        ...

    async def close(self) -> None:
        """Wait for the records that were sent, then release all resources. A second call does nothing."""
        ...


async def read_page(
    log: Log, topic: str, partition: int, *, start: int, stop: int, key: bytes | None = None, limit: int = 1000
) -> RecordPage:
    """Call `log.read` for a range that is known to have been in the log; raise an error if the page makes no progress.

    If the log now ends at or before `start`, a caller that reads page after page up to `stop` would never finish. The
    error is `LogLost`, or `Unavailable` if the end that the log reports may be outdated.
    """
    page = await log.read(topic, partition, start=start, stop=stop, key=key, limit=limit)
    if page.next_offset <= start < stop:
        if not log.end_is_linearizable:
            raise ends_early(topic, partition, start, stop - 1)
        raise LogLost(
            topic=topic,
            partition=partition,
            first=start,
            last=stop - 1,
            when="that it contained before",
            remedy="its topic was created again, or it lost acknowledged records",
        )
    return page


def ends_early(topic: str, partition: int, end: int, last: int) -> Unavailable:
    """Return the error for a log that has contained offset `last`, but ends before it according to its broker."""
    return Unavailable(
        f"{topic}/{partition}: the log ends at {end}, but it contained offset {last} before: its broker "
        "may be cut off from the others, or have just become the leader; retry. If this lasts, the log has lost "
        "acknowledged records"
    )


async def read_all(
    log: Log, topic: str, partition: int, *, start: int, stop: int, key: bytes | None = None
) -> Sequence[Record]:
    """Return all records of a range, which must be small; the errors are those of `read_page`."""
    records: list[Record] = []
    while start < stop:
        page = await read_page(log, topic, partition, start=start, stop=stop, key=key)
        records += page.records
        start = page.next_offset
    return records


async def last_record(log: Log, state: TopicState) -> Record | None:
    """Return one of the last records of the first partition that has any, to infer what the topic is used for."""
    for partition in range(state.partitions):
        end = await log.end(state.topic, partition)
        start = await log.start(state.topic, partition)
        for back in (1, 100, end - start):  # the last offsets may be gaps
            first = max(start, end - back)
            if first < end:
                page = await log.read(state.topic, partition, start=first, stop=end, limit=100)
                if page.records:
                    return page.records[-1]
    return None
