"""Appending: from the caller's events to a record in the log, and from its acknowledgement to an outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import repeat
from typing import Any

import msgspec

from tidebook.core.action import NEVER, Append
from tidebook.core.errors import InvalidInput, OutcomeUnknown, TidebookError
from tidebook.core.event import Event, encode_events
from tidebook.core.key import Key
from tidebook.core.position import Position
from tidebook.core.record import decode_record
from tidebook.core.seq_nr import LAST, seq_nr
from tidebook.core.settle import settle
from tidebook.journal.head_cache import HeadCache
from tidebook.journal.outcome import Appended, answer, answer_from_head
from tidebook.log.port import Log, Many, Outgoing, Sent, SentTogether

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
    epoch: int,
    append_id: bytes,
    expected: int | None,
    at: int | None,
    expire_after: timedelta | int | None,
    floor: int | None,
) -> Append:
    """Check what the caller gave and make the action of it."""
    if type(events) is not list or not 0 < len(events) <= EVENTS_MAX:
        _check_events(events)
    if expected is not None or at is not None:
        _check_numbers(expected, at, len(events))
    body, tagged = encode_events(events)
    expiry = None if expire_after is None else expiry_ms(expire_after)
    return Append(epoch, append_id, len(events), body, expected, at, expiry, floor, tagged)


def _check_events(events: Sequence[Event]) -> None:
    if isinstance(events, (Event, str, bytes)) or not isinstance(events, Sequence):
        raise InvalidInput("events are a list of tidebook.Event objects")
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


def check_append_id(append_id: object) -> bytes:
    """An id that a caller brings along."""
    if type(append_id) is not bytes or len(append_id) != 16:
        raise InvalidInput("append_id must be 16 bytes")
    return append_id


def floor_of(retry: OutcomeUnknown, epoch: int) -> int:
    """Where the log ended before the first attempt, or -1 where that says nothing in this epoch."""
    return retry.floor if retry.floor is not None and retry.epoch == epoch else -1


class Pending(msgspec.Struct, gc=False):
    """An append on its way: called back by the log, it learns what came of it and settles its caller's future.

    Thousands may be on their way at once, so it is a struct that the garbage collector need not look at.
    """

    cache: HeadCache
    id: str
    action: Append
    record: Outgoing
    confirm: bool
    waiter: Any
    floor: int = -1

    def send(self, log: Log) -> None:
        """Hand it to the log."""
        cache, action = self.cache, self.action
        # What this process has seen of the log lies before anything that it has yet to send.
        self.floor = cache.seen + 1 if action.floor is None else action.floor
        if self.confirm or cache.next_offset >= 0:  # else there is no tail that could meet it
            cache.open[action.append_id] = None
        log.send(self.record, self)

    def __call__(self, sent: Sent | TidebookError) -> None:
        """The log's answer, in the loop's thread, in offset order."""
        if isinstance(sent, TidebookError):
            self._settle(self._with_identity(sent))
            return
        cache, action = self.cache, self.action
        if cache.next_offset < 0 and not self.confirm:  # no tail, so nothing is known but where it lies
            if sent.offset > cache.seen:
                cache.seen = sent.offset
            self._settle(Appended(None, None, sent.partition, sent.offset))
            return
        change = cache.take_own(sent, self.record, self.id, action)
        if change is None:  # the tail may have met it already
            change = cache.outcome(action.append_id, sent.offset)
        if change is not None:
            self._settle(answer(change, cache.topic, self.id, action, sent.partition, self._position(sent)))
        elif self.confirm:
            task = asyncio.get_running_loop().create_task(self._learn(sent))
            task.add_done_callback(_keep.discard)
            _keep.add(task)
        else:
            self._settle(Appended(None, None, sent.partition, sent.offset))

    def _settle(self, outcome: Appended | TidebookError) -> None:
        self.cache.open.pop(self.action.append_id, None)
        settle(self.waiter, outcome)  # unless its caller was cancelled; the write goes on

    async def _learn(self, sent: Sent) -> None:
        """Others wrote in between, or the head is not at hand: read up to the record, then fold."""
        cache, append_id = self.cache, self.action.append_id
        position = self._position(sent)
        try:
            await cache.reach(sent.offset, follow=cache.meets_others())
            change = cache.outcome(append_id, sent.offset)
            if change is None:
                head = await cache.head(self.id)
                change = cache.outcome(append_id, sent.offset)
                if change is None:
                    self._settle(answer_from_head(head, self._key, self.action, sent.partition, position))
                    return
            self._settle(answer(change, cache.topic, self.id, self.action, sent.partition, position))
        except BaseException as error:  # whatever ended this, the caller still waits
            self._settle(self._not_learned(sent, error))
            if not isinstance(error, TidebookError):
                raise

    def _not_learned(self, sent: Sent, error: BaseException) -> OutcomeUnknown:
        unknown = OutcomeUnknown(
            f"{self._key}: the append is in the log at offset {sent.offset}, but whether it counts could not be "
            f"learned: {str(error) or type(error).__name__}",
            append_id=self.action.append_id,
            partition=sent.partition,
            offset=sent.offset,
            floor=self.floor,
            epoch=self.action.epoch,
        )
        unknown.__cause__ = error
        return unknown

    def _with_identity(self, error: TidebookError) -> TidebookError:
        if isinstance(error, OutcomeUnknown):
            known = OutcomeUnknown(
                f"{self._key}: {error}",
                append_id=self.action.append_id,
                partition=self.cache.partition,
                floor=self.floor,
                epoch=self.action.epoch,
            )
            known.__cause__ = error
            return known
        return error

    def _position(self, sent: Sent) -> Position:
        return Position(self.cache.facts.epoch, sent.offset)

    @property
    def _key(self) -> Key:
        return Key(self.cache.topic, self.id)


#: In the place of an outcome that has not come.
_NOT_YET = Appended(None, None, -1, -1)


class Together:
    """Appends that are sent together, each in its place: called back by the log, it learns what came of them.

    With thousands of them it matters how little is made and called for each: one is `Pending` only where it has to be.
    """

    def __init__(self, ids: Sequence[str], caches: Mapping[int, HeadCache], many: Many, *, confirm: bool) -> None:
        self._ids = ids
        #: By partition.
        self._caches = caches
        self._many = many
        self._confirm = confirm
        self._floors: dict[int, int] = {}
        self._left = len(ids)
        self._outcomes: list[Appended | TidebookError] = [_NOT_YET] * self._left
        self._future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def send(self, log: Log) -> None:
        """Hand them to the log, as `Pending.send` does."""
        self._floors = {partition: cache.seen + 1 for partition, cache in self._caches.items()}
        if self._confirm or any(cache.next_offset >= 0 for cache in self._caches.values()):
            for place, partition in enumerate(self._many.partitions):
                cache = self._caches[partition]
                if self._confirm or cache.next_offset >= 0:  # else nobody would take it out again
                    cache.open[self._action(place).append_id] = None
        log.send_many(self._many, self)

    def __call__(self, places: Sequence[int], results: Sequence[Sent | TidebookError]) -> None:
        """The log's answer, in the loop's thread, in offset order."""
        partition = self._many.partitions[places[0]]
        cache, outcomes = self._caches[partition], self._outcomes
        if isinstance(results, SentTogether) and not self._confirm and cache.next_offset < 0:
            # No tail, so nothing is known but where they lie.
            told = map(Appended, repeat(None), repeat(None), repeat(partition), results.offsets)
            for place, outcome in zip(places, told, strict=True):
                outcomes[place] = outcome
            cache.seen = max(cache.seen, *results.offsets)
            self._settle(len(places))
            return
        for place, sent in zip(places, results, strict=True):
            self._pending(place)(sent)

    def _action(self, place: int) -> Append:
        """What its record says: most are never asked."""
        action = decode_record(self._many.values[place])
        assert isinstance(action, Append)
        return action

    def _pending(self, place: int) -> PendingOfMany:
        record = self._many.record(place)
        cache, floor = self._caches[record.partition], self._floors[record.partition]
        return PendingOfMany(cache, self._ids[place], self._action(place), record, self._confirm, self, floor, place)

    def take(self, place: int, outcome: Appended | TidebookError) -> None:
        """What came of the append in this place."""
        self._outcomes[place] = outcome
        self._settle(1)

    def _settle(self, told: int) -> None:
        self._left -= told
        if not self._left and not self._future.done():
            self._future.set_result(None)

    async def told(self) -> list[Appended | TidebookError]:
        """What came of all of them, in their places."""
        await self._future
        return self._outcomes


class PendingOfMany(Pending, gc=False):
    """One of the appends of a call."""

    waiter: Together
    place: int = 0

    def _settle(self, outcome: Appended | TidebookError) -> None:
        self.cache.open.pop(self.action.append_id, None)
        self.waiter.take(self.place, outcome)


_keep: set[asyncio.Task[Any]] = set()
