"""Appending: from the caller's events to a record in the log, and from its acknowledgement to an outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from tidebook.core.action import NEVER, Append
from tidebook.core.errors import InvalidInput, OutcomeUnknown, TidebookError
from tidebook.core.event import Event, count_tags, encode_event, pack_events
from tidebook.core.key import Key
from tidebook.core.position import Position
from tidebook.core.seq_nr import LAST, seq_nr
from tidebook.journal.outcome import Appended, answer, answer_from_head
from tidebook.journal.topic import OpenPartition
from tidebook.log.port import Log, Outgoing, Sent

EVENTS_MAX = 10_000


def expiry_ms(expire_after: timedelta | int | None) -> int | None:
    """An expiry as the envelope has it."""
    if expire_after is None or (type(expire_after) is int and expire_after == NEVER):
        return expire_after
    if not isinstance(expire_after, timedelta):
        raise InvalidInput("expire_after is a timedelta, or tidebook.NEVER to remove an expiry")
    ms = expire_after // timedelta(milliseconds=1)
    if not 1 <= ms <= LAST:
        raise InvalidInput(f"expire_after must be at least a millisecond and within reason, not {expire_after}")
    return ms


def append_action(
    events: Sequence[Event],
    *,
    epoch: int,
    append_id: bytes,
    expected: int | None,
    at: int | None,
    expire_after: timedelta | int | None,
    floor: int | None,
) -> Append:
    """Check what the caller gave and make the action of it."""
    if type(events) is not list and (isinstance(events, (Event, str, bytes)) or not isinstance(events, Sequence)):
        raise InvalidInput("events are a list of tidebook.Event objects")
    if not events:
        raise InvalidInput("an append needs at least one event")
    if len(events) > EVENTS_MAX:
        raise InvalidInput(f"an append takes at most {EVENTS_MAX:,} events, not {len(events):,}: split it")
    if expected is not None and at is not None:
        raise InvalidInput("give either expected or at, not both")
    if expected is not None:
        seq_nr(expected, name="expected", least=0)
    if at is not None and seq_nr(at, name="at") + len(events) - 1 > LAST:
        raise InvalidInput(f"at {at} leaves no room for {len(events)} events: the last number is {LAST}")
    if type(append_id) is not bytes or len(append_id) != 16:
        raise InvalidInput("append_id must be 16 bytes")
    return Append(
        epoch,
        append_id,
        len(events),
        pack_events([encode_event(event) for event in events]),
        expected,
        at,
        expiry_ms(expire_after),
        floor,
        count_tags(events),
    )


def floor_of(retry: OutcomeUnknown, epoch: int) -> int:
    """Where the log ended before the first attempt, or -1 where that says nothing in this epoch."""
    return retry.floor if retry.floor is not None and retry.epoch == epoch else -1


class Pending:
    """An append on its way: called back by the log, it settles the caller's future."""

    __slots__ = ("_action", "_confirm", "_id", "_partition", "_record", "floor", "future")

    def __init__(self, partition: OpenPartition, id: str, action: Append, record: Outgoing, *, confirm: bool) -> None:
        self._partition = partition
        self._id = id
        self._action = action
        self._record = record
        self._confirm = confirm
        cache = partition.cache
        self.floor = action.floor if action.floor is not None else max(cache.next_offset, cache.seen + 1, 0)
        self.future: asyncio.Future[Appended] = asyncio.get_running_loop().create_future()
        cache.watch(action.append_id)

    def send(self, log: Log) -> None:
        """Hand it to the log."""
        log.send(self._record, self)

    def __call__(self, sent: Sent | TidebookError) -> None:
        """The log's answer, in the loop's thread, in offset order."""
        if isinstance(sent, TidebookError):
            self._settle(self._with_identity(sent))
            return
        cache = self._partition.cache
        change = cache.take_own(sent, self._record, self._id, self._action)
        if change is None:  # the tail may have met it already
            change = cache.outcome(self._action.append_id, sent.offset)
        if change is not None:
            self._settle(answer(change, cache.topic, self._id, self._action, sent.partition, self._position(sent)))
            return
        if self._confirm:
            task = asyncio.get_running_loop().create_task(self._learn(sent))
            task.add_done_callback(_keep.discard)
            _keep.add(task)
        else:
            self._settle(Appended(None, None, sent.partition, sent.offset))

    async def _learn(self, sent: Sent) -> None:
        """Others wrote in between, or the head is not at hand: read up to the record, then fold."""
        cache, append_id = self._partition.cache, self._action.append_id
        position = self._position(sent)
        try:
            await cache.reach(sent.offset)
            change = cache.outcome(append_id, sent.offset)
            if change is None:
                head = await cache.head(self._id)
                change = cache.outcome(append_id, sent.offset)
                if change is None:
                    self._settle(answer_from_head(head, self._key, self._action, sent.partition, position))
                    return
            self._settle(answer(change, cache.topic, self._id, self._action, sent.partition, position))
        except TidebookError as error:
            unknown = OutcomeUnknown(
                f"{self._key}: the append is in the log at offset {sent.offset}, but whether it counts could not be "
                f"learned: {error}",
                append_id=append_id,
                partition=sent.partition,
                offset=sent.offset,
                floor=self.floor,
                epoch=self._action.epoch,
            )
            unknown.__cause__ = error
            self._settle(unknown)

    def _settle(self, outcome: Appended | TidebookError) -> None:
        self._partition.cache.unwatch(self._action.append_id)
        if self.future.done():  # its caller was cancelled; the write goes on
            return
        if isinstance(outcome, Appended):
            self.future.set_result(outcome)
        else:
            self.future.set_exception(outcome)

    def _with_identity(self, error: TidebookError) -> TidebookError:
        if isinstance(error, OutcomeUnknown):
            known = OutcomeUnknown(
                f"{self._key}: {error}",
                append_id=self._action.append_id,
                partition=self._partition.number,
                floor=self.floor,
                epoch=self._action.epoch,
            )
            known.__cause__ = error
            return known
        return error

    def _position(self, sent: Sent) -> Position:
        return Position(self._partition.cache.facts.epoch, sent.offset)

    @property
    def _key(self) -> Key:
        return Key(self._partition.cache.topic, self._id)


_keep: set[asyncio.Task[Any]] = set()
