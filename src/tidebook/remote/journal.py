"""The journals of one topic on a server."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing
from datetime import timedelta
from typing import Any, Final, NoReturn

import msgspec

from tidebook.api.journals import (
    BATCH_APPENDS_MAX,
    AppendBatchBody,
    AppendBody,
    AppendResponse,
    BatchAppendBody,
    BatchAppendResponse,
    EventBody,
    EventLine,
    IdLine,
    RetryBody,
    SnapshotBody,
    TopicConfigResponse,
)
from tidebook.api.payload import encoded_payload_to, payload_from
from tidebook.api.problem import error_of
from tidebook.core import seq_nr as numbers
from tidebook.core.action import NEVER, expiry_ms
from tidebook.core.bounds import NUMBER_MAX
from tidebook.core.errors import InvalidInput, NotFound, OutcomeUnknown, TidebookError, Unavailable
from tidebook.core.event import Event, encode_event
from tidebook.core.head import Head
from tidebook.core.key import journal_id, topic_name
from tidebook.core.payload import encode_payload
from tidebook.core.position import Position
from tidebook.core.replication_plan import EventRow
from tidebook.core.seq_nr import FIRST, LAST
from tidebook.core.topic_config import TopicConfig
from tidebook.journal.append import encode_append
from tidebook.journal.journal import Journal, Snapshot
from tidebook.journal.outcome import Appended
from tidebook.journal.reader import DecodeRows, E
from tidebook.journal.settings import BarrierKind
from tidebook.journal.view import read_events
from tidebook.remote.connection import RETRY_FIRST_S, RETRY_MAX_S, RETRY_S, Connection, NoResponse, RetryLater
from tidebook.runtime import tracing
from tidebook.runtime.backoff import Backoff
from tidebook.runtime.clock import Ids

#: The last position is remembered for this many journals: `_send_append` needs it for the retry of an append.
POSITIONS_MAX: Final = 10_000
#: How many batches of `append_many` are in flight at once.
BATCHES_IN_FLIGHT_MAX: Final = 4

#: Appends are validated before they are sent, with a configuration that is never stricter than the server's.
_CHECKED_AS: Final = TopicConfig(topic_id="", partitions=1, limit_bytes=NUMBER_MAX)
_decode_ids = msgspec.json.Decoder(IdLine).decode_lines
_decode_events = msgspec.json.Decoder(EventLine).decode_lines
_decode_event = msgspec.json.Decoder(EventLine).decode


class RemoteJournal(Journal):
    """The journals of one topic on a server; each method is a request. `Journal` documents the methods."""

    def __init__(
        self, topic: str, connection: Connection, ids: Ids, *, on_open: Callable[[Journal], object] | None = None
    ) -> None:
        self.topic = topic_name(topic)
        self._connection = connection
        self._ids = ids
        #: Called after the first append: the book must keep this object, because it remembers positions from then on.
        self._on_open = on_open
        #: The partition and the offset in the last response for each journal.
        self._positions: OrderedDict[str, tuple[int, int]] = OrderedDict()
        #: The epoch of these positions: that of the topic after the first append.
        self._epoch: int | None = None

    async def topic_config(self) -> TopicConfig:
        response: TopicConfigResponse = await self._connection.call("topics.config", self.topic)
        return response.config()

    async def exists(self) -> bool:
        try:
            await self._connection.call("topics.describe", self.topic)
        except NotFound:
            return False
        return True

    async def create(self) -> TopicConfig:
        response: TopicConfigResponse = await self._connection.call("topics.create", self.topic)
        return response.config()

    async def append(
        self,
        id: str,
        events: Sequence[Event],
        *,
        expected: int | None = None,
        at: int | None = None,
        expire_after: timedelta | int | None = None,
        confirm: bool = True,
        append_id: bytes | None = None,
        retry: OutcomeUnknown | None = None,
        incarnation: Position | None = None,
    ) -> Appended:
        """Append events atomically, and return when the outcome is known. See `Journal.append`.

        A request without a response is repeated under the same append id, so the events are appended once.
        """
        journal_id(id)
        encode_append(_CHECKED_AS, self._ids, events, expected, at, expire_after, append_id, retry, incarnation)
        _refuse_incarnation(incarnation)
        with tracing.span("journal.append", topic=self.topic) as span:
            body = AppendBody(
                _event_bodies(tracing.with_context(events, span)),
                expected=expected,
                at=at,
                expire_after_s=_expiry_s(expiry_ms(expire_after)),
                confirm=confirm,
                append_id=None if retry is not None else append_id or self._ids.new(),
                retry=None if retry is None else _retry_body(retry),
            )
            return await self._send_append(id, body, _carried(span))

    async def _send_append(self, id: str, body: AppendBody, trace: str | None) -> Appended:
        """Send an append; repeat a request without a response under the same append id, so that it is applied once."""
        backoff, deadline_s = Backoff(first_s=RETRY_FIRST_S, max_s=RETRY_MAX_S), time.monotonic() + RETRY_S
        # The first attempt is appended after the journal's last known offset: by this floor the fold determines whether
        # it may have evicted that attempt from the appends that it remembers.
        partition, offset = self._positions.get(id, (None, -1))
        retry, unanswered = body.retry, False
        if retry is None:
            assert body.append_id is not None
            retry = RetryBody(body.append_id, floor=offset + 1, epoch=self._epoch, partition=partition)
        response: AppendResponse | None = None
        while response is None:
            try:
                response = await self._connection.send_once("journals.append", self.topic, id, body=body, trace=trace)
            except (NoResponse, RetryLater) as error:
                pause_s = max(backoff.next_s(), error.retry_after_s)
                unanswered = unanswered or isinstance(error, NoResponse)
                if time.monotonic() + pause_s > deadline_s:
                    if not unanswered:
                        raise Unavailable(str(error)) from error
                    raise self._unknown(id, retry, error) from error
                if unanswered and body.retry is None:
                    body = msgspec.structs.replace(body, append_id=None, retry=retry)
                await asyncio.sleep(pause_s)
            except Unavailable as error:
                if unanswered:  # an attempt before this one may have been applied
                    raise self._unknown(id, retry, error) from error
                raise
            except OutcomeUnknown as error:
                if error.append_id is not None:
                    raise
                raise self._unknown(id, retry, error) from error  # the request was cancelled at its deadline
        await self._remember(id, response.partition, response.offset)
        return Appended(response.first, response.last, response.partition, response.offset)

    def _unknown(self, id: str, retry: RetryBody, error: TidebookError) -> OutcomeUnknown:
        """Return the error of an append whose outcome is unknown, with what its retry needs."""
        return OutcomeUnknown(
            f"{self.topic}/{id}: {error}: whether the events were appended is unknown; retry with retry=",
            **msgspec.structs.asdict(retry),
        )

    async def _remember(self, id: str, partition: int, offset: int) -> None:
        if self._epoch is None:
            try:
                self._epoch = (await self._connection.call("topics.describe", self.topic)).epoch
            except TidebookError:  # a repeated append is then recognized only among the journal's recent appends
                return
            if self._on_open is not None:
                self._on_open(self)
        self._positions[id] = (partition, offset)
        self._positions.move_to_end(id)
        if len(self._positions) > POSITIONS_MAX:
            self._positions.popitem(last=False)

    async def append_many(
        self, items: Iterable[tuple[str, Sequence[Event]]], *, confirm: bool = True
    ) -> list[Appended | TidebookError]:
        try:
            pairs = [(id, events) for id, events in items]
        except (TypeError, ValueError) as error:
            raise InvalidInput(f"append_many takes pairs of an id and its events: {error}") from error
        for id, events in pairs:
            journal_id(id)
            encode_append(_CHECKED_AS, self._ids, events)
        with tracing.span("journal.append_many", topic=self.topic, appends=len(pairs)) as span:
            traced = [(id, tracing.with_context(events, span)) for id, events in pairs]
            return await self._send_batches(traced, confirm=confirm, trace=_carried(span))

    async def _send_batches(
        self, pairs: list[tuple[str, Sequence[Event]]], *, confirm: bool, trace: str | None
    ) -> list[Appended | TidebookError]:
        bodies = [BatchAppendBody(id=id, events=_event_bodies(events), confirm=confirm) for id, events in pairs]
        batches = [bodies[start : start + BATCH_APPENDS_MAX] for start in range(0, len(bodies), BATCH_APPENDS_MAX)]
        results: list[Appended | TidebookError] = []
        for start in range(0, len(batches), BATCHES_IN_FLIGHT_MAX):
            sending = [self._append_batch(batch, trace) for batch in batches[start : start + BATCHES_IN_FLIGHT_MAX]]
            for found in await asyncio.gather(*sending):
                results += found
        return results

    async def _append_batch(self, batch: list[BatchAppendBody], trace: str | None) -> list[Appended | TidebookError]:
        body = AppendBatchBody(tuple(batch))
        try:
            response = await self._connection.call("journals.append_batch", self.topic, body=body, trace=trace)
        except (OutcomeUnknown, Unavailable) as error:
            return [error] * len(batch)
        return [_batch_result(each) for each in response.results]

    async def delete(self, id: str, *, to: int) -> None:
        numbers.seq_nr(to, name="to")
        await self._connection.call("journals.delete", self.topic, journal_id(id), query={"to": to})

    async def purge(self, id: str) -> None:
        await self._connection.call("journals.purge", self.topic, journal_id(id))

    async def purge_expired(self, id: str, head: Head) -> bool:
        """Raise `InvalidInput`: expired journals are purged where the book is open."""
        raise InvalidInput("a remote book does not purge expired journals: 'tidebook up' does, where the book is")

    async def head(self, id: str, *, barrier: BarrierKind | None = None) -> Head | None:
        """Raise `InvalidInput`: heads, and the deciders that need them, need direct access to the store."""
        raise InvalidInput("a remote book has no heads: run deciders where the folder or .toml of the book is open")

    def read_decoded(
        self,
        id: str,
        decode: DecodeRows[E],
        *,
        start: int = FIRST,
        end: int = LAST,
        barrier: BarrierKind | None = None,
        incarnation: Position | None = None,
    ) -> AsyncIterator[E]:
        numbers.seq_nr(start, name="start")
        numbers.seq_nr(end, name="end")
        _check_barrier(barrier)
        _refuse_incarnation(incarnation)
        query: dict[str, object] = {
            "start": start if start != FIRST else None,
            "end": end if end != LAST else None,
            "barrier": barrier,
        }
        return self._read_lines(journal_id(id), decode, query)

    async def _read_lines(self, id: str, decode: DecodeRows[E], query: dict[str, object]) -> AsyncIterator[E]:
        async with aclosing(self._connection.lines("journals.read", self.topic, id, query=query)) as pages:
            async for page in pages:
                for event in _decode_page(_decode_events(page), decode):
                    yield event

    def tail_decoded(self, id: str, decode: DecodeRows[E], *, start: int = FIRST) -> AsyncIterator[E]:
        """Return what `tail` returns, with the rows decoded by `decode`.

        If the server restarts, the tail continues after the last event; after a purge in that time, with the events of
        the next incarnation.
        """
        numbers.seq_nr(start, name="start")
        return self._follow(journal_id(id), decode, start)

    async def _follow(self, id: str, decode: DecodeRows[E], start: int) -> AsyncIterator[E]:
        query: dict[str, object] = {"start": start, "follow": True}
        async with aclosing(self._connection.events("journals.read", self.topic, id, query=query)) as events:
            async for event in events:
                if event is not None:
                    for each in _decode_page([_decode_event(event.data)], decode):
                        yield each

    async def pointer(self, id: str, *, barrier: BarrierKind | None = None) -> int | None:
        _check_barrier(barrier)
        query = {"barrier": barrier}
        try:
            response = await self._connection.call("journals.pointer", self.topic, journal_id(id), query=query)
        except NotFound:
            return None
        seq_nr: int = response.seq_nr
        return seq_nr

    async def ids(self) -> AsyncIterator[str]:
        async with aclosing(self._connection.lines("journals.ids", self.topic)) as pages:
            async for page in pages:
                for line in _decode_ids(page):
                    yield line.id

    async def save_snapshot(
        self, id: str, *, seq_nr: int, payload: object, incarnation: Position | None = None
    ) -> None:
        _refuse_incarnation(incarnation)
        numbers.seq_nr(seq_nr)
        body = SnapshotBody(*encoded_payload_to(*encode_payload(payload)))
        await self._connection.call("journals.save_snapshot", self.topic, journal_id(id), seq_nr, body=body)

    async def load_snapshot(self, id: str, *, to: int = LAST) -> Snapshot | None:
        numbers.seq_nr(to, name="to")
        query = {"to": to if to != LAST else None}
        try:
            found = await self._connection.call("journals.load_snapshot", self.topic, journal_id(id), query=query)
        except NotFound:
            return None
        payload = found.payload if found.payload_base64 is msgspec.UNSET else found.payload_base64
        return Snapshot(found.seq_nr, payload, found.timestamp_ms)

    async def delete_snapshots(self, id: str, *, to: int = LAST) -> None:
        numbers.seq_nr(to, name="to")
        query = {"to": to if to != LAST else None}
        await self._connection.call("journals.delete_snapshots", self.topic, journal_id(id), query=query)

    async def snapshots(self, id: str, head: Head) -> NoReturn:
        """Raise `InvalidInput`: stored snapshots, and the deciders that need them, need direct access to the store."""
        raise InvalidInput("a remote book has no heads: use load_snapshot, or open the folder or .toml of the book")

    async def adopt(self) -> TopicConfig:
        """Raise `InvalidInput`: adopting a topic needs direct access to its log."""
        raise InvalidInput("a remote book does not adopt a topic: open the folder or .toml of the book")

    async def close(self) -> None:
        """Do nothing: the book closes the connection."""


def _check_barrier(barrier: BarrierKind | None) -> None:
    if barrier not in (None, "mark", "offset"):
        raise InvalidInput(f"barrier must be 'mark' or 'offset', not {barrier!r}")


def _refuse_incarnation(incarnation: Position | None) -> None:
    if incarnation is not None:
        raise InvalidInput("a remote book does not support incarnation: open the folder or .toml of the book")


def _carried(span: tracing.TraceSpan | None) -> str | None:
    return None if span is None else span.carried


def _event_bodies(events: Sequence[Event]) -> tuple[EventBody, ...]:
    """Return valid events as they are sent."""
    return tuple(
        EventBody(
            *encoded_payload_to(*encode_payload(event.payload)),
            tuple(sorted(event.tags)),
            None if event.metadata is None else dict(event.metadata),
            event.type,
            event.version,
        )
        for event in events
    )


def _expiry_s(ms: int | None) -> Any:
    if ms is None:
        return None
    return "never" if ms == NEVER else ms / 1000


def _retry_body(retry: OutcomeUnknown) -> RetryBody:
    assert retry.append_id is not None
    return RetryBody(retry.append_id, retry.floor, retry.epoch, retry.partition, retry.offset)


def _decode_page(lines: Sequence[EventLine], decode: DecodeRows[E]) -> Iterable[E]:
    """Decode the events of lines; `decode` takes stored rows, so each line is converted to a row first."""
    if decode is read_events:
        return [line.event() for line in lines]  # type: ignore[misc]
    return [event for line in lines for event in decode([_row(line)], line.partition)]


def _row(line: EventLine) -> EventRow:
    payload = payload_from(line.payload, line.payload_base64)
    event = Event(payload, tags=line.tags, metadata=line.metadata, type=line.type, version=line.version)
    return EventRow(line.seq_nr, encode_event(event), line.timestamp_ms, Position(1, line.offset), 0)


def _batch_result(response: BatchAppendResponse) -> Appended | TidebookError:
    if response.problem is not None:
        return error_of(response.problem)
    assert response.partition is not None
    assert response.offset is not None
    return Appended(response.first, response.last, response.partition, response.offset)
