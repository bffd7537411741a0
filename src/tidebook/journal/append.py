"""Encode appends as records, send them, and derive the outcome of each from its acknowledgement.

An append in flight is a `PendingAppend`. The appends of one `append_many` call form a `PendingBatch`, which creates a
`PendingAppend` only for a record whose outcome needs more than its offset.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import repeat
from typing import Any

import msgspec

from tidebook.core.action import Append, expiry_ms
from tidebook.core.bounds import EVENTS_MAX, IDENTITY_BYTES
from tidebook.core.errors import InvalidInput, OutcomeUnknown, TidebookError
from tidebook.core.event import NOT_PLAIN, Event, encode_events, plain_payload, plain_payloads
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
) -> tuple[Append, bytes]:
    """Validate the arguments of an append; return its action and its encoded record.

    A plain append is encoded from a template, and its action has no body: the fold, which determines the outcome, does
    not need it.
    """
    is_unconditional = expected is None and at is None and incarnation is None
    if is_unconditional and expire_after is None and append_id is None and retry is None:
        payload_type, payload = plain_payload(events)
        if payload_type != NOT_PLAIN and 0 < len(payload) <= config.limit_bytes - PLAIN_BYTES_MAX:
            new_id = ids.new()
            return Append(config.epoch, new_id, 1, b""), encode_plain_append(
                config.epoch, new_id, payload_type, payload
            )
    if type(events) is not list or not 0 < len(events) <= EVENTS_MAX:
        _check_events(events)
    if expected is not None or at is not None:
        _check_numbers(expected, at, len(events))
    floor = None
    if retry is not None:
        if append_id is not None or getattr(retry, "append_id", None) is None:
            raise InvalidInput("retry must be the OutcomeUnknown of an append, and excludes append_id")
        append_id, floor = retry.append_id, retry_floor(retry, config.epoch)
    if append_id is None:
        append_id = ids.new()
    elif type(append_id) is not bytes or len(append_id) != IDENTITY_BYTES:
        raise InvalidInput("append_id must be 16 bytes")
    body, tagged = encode_events(events)
    expiry = None if expire_after is None else expiry_ms(expire_after)
    action = Append(config.epoch, append_id, len(events), body, expected, at, expiry, floor, tagged, incarnation)
    return action, encode_record(action, limit_bytes=config.limit_bytes)


def _check_events(events: Sequence[Event]) -> None:
    if isinstance(events, (Event, str, bytes)) or not isinstance(events, Sequence):
        raise InvalidInput("events must be a list of tidebook.Event objects")
    if not events:
        raise InvalidInput("an append needs at least one event")
    if len(events) > EVENTS_MAX:
        raise InvalidInput(f"an append must have at most {EVENTS_MAX:,} events, not {len(events):,}: split it")


def _check_numbers(expected: int | None, at: int | None, count: int) -> None:
    if expected is not None and at is not None:
        raise InvalidInput("pass either expected or at, not both")
    if expected is not None:
        seq_nr(expected, name="expected", least=0)
    if at is not None and seq_nr(at, name="at") + count - 1 > LAST:
        raise InvalidInput(f"at {at} leaves no room for {count} events: the last number is {LAST}")


def retry_floor(retry: OutcomeUnknown, epoch: int) -> int:
    """Return the offset at which the log ended before the first attempt, or -1 if it is of another epoch or unknown."""
    return retry.floor if retry.floor is not None and retry.epoch == epoch else -1


class PendingAppend(msgspec.Struct, gc=False):
    """An append in flight: the callback of the log, which determines the outcome and resolves the caller's future.

    Thousands may be in flight at once, so it is a struct that the garbage collector does not track.
    """

    cache: HeadCache
    id: str
    #: None until it is needed: `_action` decodes it from the record.
    decoded: Append | None
    record: Outgoing
    confirm: bool
    waiter: asyncio.Future[Any] | PendingBatch
    #: The highest offset that this process had seen when the record was sent; the record's own must be higher.
    sent_after: int = -1
    #: Whether the head cache waits to fold this append.
    is_pending: bool = False
    #: The index of the append in a `PendingBatch`.
    index: int = 0

    def send(self, log: Log) -> None:
        """Send the record."""
        cache = self.cache
        self.sent_after = cache.seen
        if self.confirm or cache.next_offset >= 0:  # without a tail, no fold would set the outcome
            cache.pending_outcomes[self._action.append_id] = None
            self.is_pending = True
        log.send(self.record, self)

    def __call__(self, sent: Acknowledged | TidebookError) -> None:
        """Handle the acknowledgement or the error; the log calls this in the event loop, in offset order."""
        if isinstance(sent, TidebookError):
            self._resolve(self._unknown(str(sent), None, sent) if isinstance(sent, OutcomeUnknown) else sent)
            return
        cache = self.cache
        if (sent.offset <= self.sent_after or cache.recreated) and cache.is_recreated(sent.offset, self.sent_after):
            self._resolve(cache.recreated_error())
            return
        if cache.next_offset < 0 and not self.confirm:  # without a tail only the offset is known
            if sent.offset > cache.seen:
                cache.seen = sent.offset
            self._resolve(Appended(None, None, sent.partition, sent.offset))
            return
        action = self._action
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
        if self.is_pending:
            self.cache.pending_outcomes.pop(self._action.append_id, None)
        waiter = self.waiter
        if isinstance(waiter, PendingBatch):
            waiter.set_outcome(self.index, outcome)
        elif type(outcome) is Appended and not waiter.done():  # done if the caller was cancelled
            waiter.set_result(outcome)
        else:
            resolve_future(waiter, outcome)

    async def _read_outcome(self, sent: Acknowledged) -> None:
        """Read and fold the log up to the record: other writers wrote before it, or the head is not cached."""
        cache, append_id = self.cache, self._action.append_id
        position = self._position(sent)
        try:
            await cache.reach(sent.offset, follow=cache.note_competing_writer())
            change = cache.outcome(append_id, sent.offset)
            if change is None:
                head = await cache.head(self.id)
                change = cache.outcome(append_id, sent.offset)
                if change is None:
                    self._resolve(outcome_from_head(head, self._key, self._action, sent.partition, position))
                    return
            self._resolve(outcome_of(change, cache.topic, self.id, self._action, sent.partition, position))
        except BaseException as error:  # including a cancellation: the caller must not wait forever
            why = (
                f"the append is in the log at offset {sent.offset}, but whether it took effect is unknown: "
                f"{str(error) or type(error).__name__}"
            )
            self._resolve(self._unknown(why, sent.offset, error))
            if not isinstance(error, TidebookError):
                raise

    def _unknown(self, why: str, offset: int | None, error: BaseException) -> OutcomeUnknown:
        action = self._action
        unknown = OutcomeUnknown(
            f"{self._key}: {why}",
            append_id=action.append_id,
            partition=self.cache.partition,
            offset=offset,
            # The record's offset is above all offsets that this process had seen when the record was sent.
            floor=self.sent_after + 1 if action.floor is None else action.floor,
            epoch=action.epoch,
        )
        unknown.__cause__ = error
        return unknown

    def _position(self, sent: Acknowledged) -> Position:
        return Position(self.cache.config.epoch, sent.offset)

    @property
    def _action(self) -> Append:
        if self.decoded is None:
            action = decode_record(self.record.value)
            assert isinstance(action, Append)
            self.decoded = action
        return self.decoded

    @property
    def _key(self) -> Key:
        return Key(self.cache.topic, self.id)


#: The placeholder of an outcome that is not known yet.
_PENDING = Appended(None, None, -1, -1)


class PendingBatch:
    """Appends in flight together: the callback of the log, which collects the outcome of each at its index.

    An object and a call for each of thousands of appends would be expensive.
    """

    def __init__(
        self, ids: Sequence[str], caches: Mapping[int, HeadCache], columns: RecordColumns, *, confirm: bool
    ) -> None:
        self._ids = ids
        #: The head cache of each partition.
        self._caches = caches
        self._columns = columns
        self._confirm = confirm
        self._floors: dict[int, int] = {}
        self._remaining = len(ids)
        self._outcomes: list[Appended | TidebookError] = [_PENDING] * self._remaining
        self._future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def send(self, log: Log) -> None:
        """Send the records, as `PendingAppend.send` does."""
        self._floors = {partition: cache.seen + 1 for partition, cache in self._caches.items()}
        if self._confirm or any(cache.next_offset >= 0 for cache in self._caches.values()):
            for index, partition in enumerate(self._columns.partitions):
                cache = self._caches[partition]
                if self._confirm or cache.next_offset >= 0:  # without a tail, it would never be removed
                    cache.pending_outcomes[self._action(index).append_id] = None
        log.send_many(self._columns, self)

    def __call__(self, indexes: Sequence[int], results: Sequence[Acknowledged | TidebookError]) -> None:
        """Handle the acknowledgements of one partition; the log calls this in the event loop, in offset order."""
        partition = self._columns.partitions[indexes[0]]
        cache, outcomes = self._caches[partition], self._outcomes
        if (
            isinstance(results, AcknowledgedBatch)
            and not self._confirm
            and cache.next_offset < 0
            and not cache.is_recreated(min(results.offsets), self._floors[partition] - 1)
        ):
            # Without a tail only the offsets are known.
            appended = map(Appended, repeat(None), repeat(None), repeat(partition), results.offsets)
            for index, outcome in zip(indexes, appended, strict=True):
                outcomes[index] = outcome
            cache.seen = max(cache.seen, *results.offsets)
            self._count_down(len(indexes))
            return
        for index, sent in zip(indexes, results, strict=True):
            self._pending(index)(sent)

    def _action(self, index: int) -> Append:
        """Decode the action of a record; most are never needed."""
        action = decode_record(self._columns.values[index])
        assert isinstance(action, Append)
        return action

    def _pending(self, index: int) -> PendingAppend:
        record = self._columns.record(index)
        cache, sent_after = self._caches[record.partition], self._floors[record.partition] - 1
        return PendingAppend(cache, self._ids[index], None, record, self._confirm, self, sent_after, True, index)

    def set_outcome(self, index: int, outcome: Appended | TidebookError) -> None:
        """Set the outcome of the append at this index."""
        self._outcomes[index] = outcome
        self._count_down(1)

    def _count_down(self, count: int) -> None:
        self._remaining -= count
        if not self._remaining and not self._future.done():
            self._future.set_result(None)

    async def outcomes(self) -> list[Appended | TidebookError]:
        """Wait for all outcomes and return them by index."""
        await self._future
        return self._outcomes


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
        self._payload_types, self._data = types, data = plain_payloads(appends)
        plain_max = config.limit_bytes - PLAIN_BYTES_MAX
        for index, size_bytes in enumerate(map(len, data)):
            if not 0 < size_bytes <= plain_max:
                types[index], data[index] = NOT_PLAIN, encode_append(config, ids, appends[index])[1]

    def values(self, batch: slice) -> list[bytes]:
        """Return the encoded records of one batch, each with a new append id."""
        types, data = self._payload_types[batch], self._data[batch]
        if NOT_PLAIN not in types:
            return encode_plain_appends(self._epoch, self._ids.several(len(types)), types, data)
        plain = [index for index, type_ in enumerate(types) if type_ != NOT_PLAIN]
        columns = [types[index] for index in plain], [data[index] for index in plain]
        encoded = encode_plain_appends(self._epoch, self._ids.several(len(plain)), *columns)
        for index, record in zip(plain, encoded, strict=True):
            data[index] = record
        return data
