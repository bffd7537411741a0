"""Encode appends as records, send them, and derive the outcome of each from its acknowledgement."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from itertools import repeat
from typing import Any

import msgspec

from tidebook.core.action import Append, expiry_ms
from tidebook.core.bounds import EVENTS_MAX, IDENTITY_BYTES
from tidebook.core.errors import InvalidInput, OutcomeUnknown, TidebookError
from tidebook.core.event import NOT_PLAIN, Event, encode_events, plain_payloads
from tidebook.core.key import Key
from tidebook.core.position import Position
from tidebook.core.record import (
    PLAIN_BYTES_MAX,
    decode_record,
    encode_plain_append,
    encode_plain_appends,
    encode_record,
)
from tidebook.core.seq_nr import LAST, seq_nr
from tidebook.core.topic_config import TopicConfig
from tidebook.journal.head_cache import HeadCache
from tidebook.journal.outcome import Appended, outcome_from_head, outcome_of
from tidebook.log.port import Acknowledged, AcknowledgedBatch, Log, Outgoing, RecordColumns
from tidebook.runtime.clock import Ids
from tidebook.runtime.futures import resolve_future
from tidebook.runtime.process import generation, refuse_fork


def encode_append(
    config: TopicConfig,
    ids: Ids,
    events: Sequence[Event],
    expected: int | None = None,
    at: int | None = None,
    expire_after: timedelta | int | None = None,
    append_id: bytes | None = None,
    retry: OutcomeUnknown | None = None,
    incarnation: Position | None = None,
) -> bytes:
    """Validate the arguments of an append and return its encoded record."""
    if all(each is None for each in (expected, at, expire_after, append_id, retry, incarnation)):
        (payload_type,), (payload,) = plain_payloads((events,))
        if payload_type != NOT_PLAIN and 0 < len(payload) <= config.limit_bytes - PLAIN_BYTES_MAX:
            return encode_plain_append(config.epoch, ids.new(), payload_type, payload)
    if type(events) is not list or not 0 < len(events) <= EVENTS_MAX:
        _check_events(events)
    if expected is not None or at is not None:
        _check_numbers(expected, at, len(events))
    floor = None
    if retry is not None:
        if append_id is not None or getattr(retry, "append_id", None) is None:
            raise InvalidInput("retry takes the OutcomeUnknown of an append, and excludes append_id")
        append_id, floor = retry.append_id, retry_floor(retry, config.epoch)
    if append_id is None:
        append_id = ids.new()
    elif type(append_id) is not bytes or len(append_id) != IDENTITY_BYTES:
        raise InvalidInput("append_id must be 16 bytes")
    body, tagged = encode_events(events)
    expiry = None if expire_after is None else expiry_ms(expire_after)
    action = Append(config.epoch, append_id, len(events), body, expected, at, expiry, floor, tagged, incarnation)
    return encode_record(action, limit_bytes=config.limit_bytes)


def _check_events(events: Sequence[Event]) -> None:
    if isinstance(events, (Event, str, bytes)) or not isinstance(events, Sequence):
        raise InvalidInput("events must be a list of tidebook.Event objects")
    if not events:
        raise InvalidInput("an append needs at least one event")
    if len(events) > EVENTS_MAX:
        raise InvalidInput(f"an append takes at most {EVENTS_MAX:,} events, not {len(events):,}: split it")


def _check_numbers(expected: int | None, at: int | None, count: int) -> None:
    if expected is not None and at is not None:
        raise InvalidInput("give either expected or at, not both")
    if expected is not None:
        seq_nr(expected, name="expected", least=0)
    if at is not None and seq_nr(at, name="at") + count - 1 > LAST:
        raise InvalidInput(f"at {at} leaves no room for {count} events: the last number is {LAST}")


def retry_floor(retry: OutcomeUnknown, epoch: int) -> int:
    """Return the offset at which the log ended before the first attempt, or -1 if it is of another epoch or unknown."""
    return retry.floor if retry.floor is not None and retry.epoch == epoch else -1


class PendingAppend(msgspec.Struct, gc=False):
    """An append of a batch that was acknowledged or has failed; it determines the outcome.

    Most unconfirmed appends need none, see `AppendBatch`.
    """

    batch: AppendBatch
    index: int
    cache: HeadCache
    id: str
    action: Append
    record: Outgoing
    confirm: bool
    #: The highest offset that this process had seen when the record was sent; the record's own must be higher.
    sent_after: int

    def __call__(self, sent: Acknowledged | TidebookError) -> None:
        """Handle the acknowledgement or the error, in offset order."""
        if isinstance(sent, TidebookError):
            self._resolve(self._unknown(str(sent), None, sent) if isinstance(sent, OutcomeUnknown) else sent)
            return
        cache, action = self.cache, self.action
        if cache.is_recreated(sent.offset, self.sent_after):
            self._resolve(cache.recreated_error())
            return
        if cache.next_offset < 0 and not self.confirm:  # without a tail only the offset is known
            if sent.offset > cache.seen:
                cache.seen = sent.offset
            self._resolve(Appended(None, None, sent.partition, sent.offset))
            return
        change = cache.take_own(sent, self.record, self.id, action)
        if change is None:  # the tail may have folded the record already
            change = cache.outcome(action.append_id, sent.offset)
        if change is not None:
            self._resolve(outcome_of(change, cache.topic, self.id, action, sent.partition, self._position(sent)))
        elif self.confirm:
            task = asyncio.get_running_loop().create_task(self._read_outcome(sent))
            task.add_done_callback(_outcome_tasks.discard)
            _outcome_tasks.add(task)
        else:
            self._resolve(Appended(None, None, sent.partition, sent.offset))

    def _resolve(self, outcome: Appended | TidebookError) -> None:
        self.cache.pending_outcomes.pop(self.action.append_id, None)
        self.batch.set_outcomes((self.index,), (outcome,))

    async def _read_outcome(self, sent: Acknowledged) -> None:
        """Read and fold the log up to the record: other writers wrote before it, or the head is not cached."""
        cache, append_id = self.cache, self.action.append_id
        position = self._position(sent)
        try:
            await cache.reach(sent.offset, follow=cache.note_competing_writer())
            change = cache.outcome(append_id, sent.offset)
            if change is None:
                head = await cache.head(self.id)
                change = cache.outcome(append_id, sent.offset)
                if change is None:
                    self._resolve(outcome_from_head(head, self._key, self.action, sent.partition, position))
                    return
            self._resolve(outcome_of(change, cache.topic, self.id, self.action, sent.partition, position))
        except BaseException as error:  # including a cancellation: the caller must not wait forever
            why = (
                f"the append is in the log at offset {sent.offset}, but whether it took effect is unknown: "
                f"{str(error) or type(error).__name__}"
            )
            self._resolve(self._unknown(why, sent.offset, error))
            if not isinstance(error, TidebookError):
                raise

    def _unknown(self, why: str, offset: int | None, error: BaseException) -> OutcomeUnknown:
        unknown = OutcomeUnknown(
            f"{self._key}: {why}",
            append_id=self.action.append_id,
            partition=self.cache.partition,
            offset=offset,
            # Every offset that this process had seen is below those of the records it had yet to send.
            floor=self.sent_after + 1 if self.action.floor is None else self.action.floor,
            epoch=self.action.epoch,
        )
        unknown.__cause__ = error
        return unknown

    def _position(self, sent: Acknowledged) -> Position:
        return Position(self.cache.config.epoch, sent.offset)

    @property
    def _key(self) -> Key:
        return Key(self.cache.topic, self.id)


class AppendBatch(ABC):
    """Appends that are sent together: the callback of the log, which determines the outcome of each.

    Objects and calls for each of thousands of appends are expensive, so a `PendingAppend` is created only if needed.
    """

    def __init__(
        self,
        ids: Sequence[str],
        caches: Sequence[HeadCache],
        columns: RecordColumns,
        confirms: Sequence[bool],
    ) -> None:
        self._ids = ids
        #: The head caches of all partitions, by number.
        self._caches = caches
        self._columns = columns
        self._confirms = confirms
        self._confirms_any = True in confirms
        #: Actions by index, decoded from the records; most are never needed.
        self._actions: dict[int, Append] = {}
        #: By partition, the highest offset that this process had seen when the batch was sent.
        self._sent_after: dict[int, int] = {}

    def send(self, log: Log) -> None:
        """Send the records."""
        partitions, caches = self._columns.partitions, self._caches
        self._sent_after = {partition: caches[partition].seen for partition in set(partitions)}
        if self._confirms_any or any(caches[partition].next_offset >= 0 for partition in self._sent_after):
            for index, partition in enumerate(partitions):
                # Without a tail nothing folds the record, which sets the outcome, and nothing would remove it.
                if self._confirms[index] or caches[partition].next_offset >= 0:
                    caches[partition].pending_outcomes[self._action(index).append_id] = None
        log.send_many(self._columns, self)

    def __call__(self, indexes: Sequence[int], results: Sequence[Acknowledged | TidebookError]) -> None:
        """Handle the acknowledgements of one partition; the log calls this in the event loop, in offset order."""
        partition = self._columns.partitions[indexes[0]]
        cache = self._caches[partition]
        if (
            isinstance(results, AcknowledgedBatch)
            and not self._confirms_any
            and cache.next_offset < 0
            and not cache.is_recreated(min(results.offsets), self._sent_after[partition])
        ):
            # Without a tail only the offsets are known.
            cache.seen = max(cache.seen, *results.offsets)
            self.set_outcomes(indexes, map(Appended, repeat(None), repeat(None), repeat(partition), results.offsets))
            return
        for index, sent in zip(indexes, results, strict=True):
            self._pending(index)(sent)

    def _action(self, index: int) -> Append:
        action = self._actions.get(index)
        if action is None:
            decoded = decode_record(self._columns.values[index])
            assert isinstance(decoded, Append)
            action = self._actions[index] = decoded
        return action

    def _pending(self, index: int) -> PendingAppend:
        record = self._columns.record(index)
        return PendingAppend(
            self,
            index,
            self._caches[record.partition],
            self._ids[index],
            self._action(index),
            record,
            self._confirms[index],
            self._sent_after[record.partition],
        )

    @abstractmethod
    def set_outcomes(self, indexes: Sequence[int], outcomes: Iterable[Appended | TidebookError]) -> None:
        """Set the outcomes of the appends at these indexes."""


#: The placeholder of an outcome that is not known yet.
_PENDING = Appended(None, None, -1, -1)


class AppendManyBatch(AppendBatch):
    """Appends of one `append_many`, which share a future."""

    def __init__(
        self, ids: Sequence[str], caches: Sequence[HeadCache], columns: RecordColumns, *, confirm: bool
    ) -> None:
        super().__init__(ids, caches, columns, [confirm] * len(ids))
        self._remaining = len(ids)
        self._outcomes: list[Appended | TidebookError] = [_PENDING] * self._remaining
        self._future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def set_outcomes(self, indexes: Sequence[int], outcomes: Iterable[Appended | TidebookError]) -> None:
        for index, outcome in zip(indexes, outcomes, strict=True):
            self._outcomes[index] = outcome
        self._remaining -= len(indexes)
        if not self._remaining and not self._future.done():
            self._future.set_result(None)

    async def outcomes(self) -> list[Appended | TidebookError]:
        """Wait for all outcomes and return them by index."""
        await self._future
        return self._outcomes


class CollectedBatch(AppendBatch):
    """Single appends, each with the future of its caller."""

    def __init__(
        self,
        ids: Sequence[str],
        caches: Sequence[HeadCache],
        columns: RecordColumns,
        confirms: Sequence[bool],
        futures: Sequence[asyncio.Future[Appended]],
        on_resolved: Callable[[], None],
    ) -> None:
        super().__init__(ids, caches, columns, confirms)
        self._futures = futures
        self._on_resolved = on_resolved

    def set_outcomes(self, indexes: Sequence[int], outcomes: Iterable[Appended | TidebookError]) -> None:
        futures = self._futures
        for index, outcome in zip(indexes, outcomes, strict=True):
            resolve_future(futures[index], outcome)  # does nothing if the caller was cancelled
        self._on_resolved()


class AppendCollector:
    """Collects the single appends of one iteration of the event loop, and sends them as one batch."""

    def __init__(self, log: Log, topic: str, caches: Sequence[HeadCache]) -> None:
        self._log = log
        self._topic = topic
        self._caches = caches
        #: Cached, because up to Python 3.11 getting the loop costs every append a system call.
        self._loop = asyncio.get_running_loop()
        self._generation = generation()
        self._handle: asyncio.Handle | None = None
        #: For each append: id, partition, key, record, whether to confirm, future.
        self._appends: list[tuple[str, int, bytes, bytes, bool, asyncio.Future[Appended]]] = []

    def add(self, id: str, partition: int, key: bytes, value: bytes, *, confirm: bool) -> asyncio.Future[Appended]:
        """Send an append at the end of this iteration; return the future of its outcome."""
        refuse_fork(self._generation, "the journal")  # in a child this loop may not run
        if self._handle is None:
            self._send_soon()
        future: asyncio.Future[Appended] = self._loop.create_future()
        self._appends.append((id, partition, key, value, confirm, future))
        return future

    def _send_soon(self) -> None:
        """Send after the callers whose futures are resolved by now, which are likely to append again."""
        if self._handle is not None:
            self._handle.cancel()
        self._handle = self._loop.call_soon(self.send)

    def send(self) -> None:
        """Send the collected appends now."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        if self._appends:
            ids, partitions, keys, values, confirms, futures = map(list, zip(*self._appends, strict=True))
            self._appends = []
            columns = RecordColumns(self._topic, partitions, keys, values)
            CollectedBatch(ids, self._caches, columns, confirms, futures, self._send_soon).send(self._log)


#: References to running tasks, because the event loop holds only weak ones.
_outcome_tasks: set[asyncio.Task[Any]] = set()

#: Records that are encoded and sent together: few enough to stay in the processor's cache.
BATCH_RECORDS = 1000


class EncodedAppends:
    """Validated appends: a plain append is kept as payload and payload type, any other one as its encoded record.

    Plain records are encoded later, a batch at a time, which is much cheaper than one by one.
    """

    def __init__(self, appends: Sequence[Sequence[Event]], config: TopicConfig, ids: Ids) -> None:
        self._epoch = config.epoch
        self._ids = ids
        self._kinds, self._data = kinds, data = plain_payloads(appends)
        plain_max = config.limit_bytes - PLAIN_BYTES_MAX
        for index, size_bytes in enumerate(map(len, data)):
            if not 0 < size_bytes <= plain_max:
                kinds[index], data[index] = NOT_PLAIN, encode_append(config, ids, appends[index])

    def values(self, batch: slice) -> list[bytes]:
        """Return the encoded records of one batch, each with a new append id."""
        kinds, data = self._kinds[batch], self._data[batch]
        if NOT_PLAIN not in kinds:
            return encode_plain_appends(self._epoch, self._ids.several(len(kinds)), kinds, data)
        plain = [index for index, kind in enumerate(kinds) if kind != NOT_PLAIN]
        columns = [kinds[index] for index in plain], [data[index] for index in plain]
        encoded = encode_plain_appends(self._epoch, self._ids.several(len(plain)), *columns)
        for index, record in zip(plain, encoded, strict=True):
            data[index] = record
        return data
