"""`TypedJournal`: the journals of one topic with events as objects of declared classes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from datetime import timedelta
from typing import Any, Generic, TypeVar

from tidebook.core.errors import InvalidInput, OutcomeUnknown, TidebookError
from tidebook.core.event import Event
from tidebook.core.seq_nr import FIRST, LAST
from tidebook.domain.event_type import EventTypes
from tidebook.domain.typed_event import TypedEvent, row_decoder
from tidebook.journal.journal import Journal
from tidebook.journal.outcome import Appended
from tidebook.journal.settings import BarrierKind
from tidebook.runtime.blocking_facade import BlockingFacade, blocking, forwarded, iterating

E = TypeVar("E")


class TypedJournal(Generic[E]):
    """A typed view of the journals of one topic: the same journals, with objects instead of payloads.

    `untyped` has the rest: delete, purge, ids, snapshots.

    >>> async def deposit(book, Deposited):
    ...     accounts = book.journal("accounts", events=[Deposited])
    ...     await accounts.append("a-1", [Deposited(5)])
    ...     return [event.data async for event in accounts.read("a-1")]
    """

    def __init__(self, untyped: Journal, types: EventTypes) -> None:
        self.untyped = untyped
        self.types = types

    @property
    def topic(self) -> str:
        """The topic of these journals."""
        return self.untyped.topic

    async def append(
        self,
        id: str,
        events: Sequence[E | Event[E]],
        *,
        expected: int | None = None,
        at: int | None = None,
        expire_after: timedelta | int | None = None,
        append_id: bytes | None = None,
        retry: OutcomeUnknown | None = None,
    ) -> Appended:
        """Append objects atomically; wrap one as `Event(Deposited(5), tags={...})` to add tags or metadata.

        The arguments are those of `Journal.append`.
        """
        return await self.untyped.append(
            id, self.types.encode_all(events), expected=expected, at=at, expire_after=expire_after,
            append_id=append_id, retry=retry,
        )  # fmt: skip

    async def append_many(self, items: Iterable[tuple[str, Sequence[E | Event[E]]]]) -> list[Appended | TidebookError]:
        """Append to many journals in one call; each append is atomic, and its result or error is at its index."""
        try:
            encoded = [(id, self.types.encode_all(events)) for id, events in items]
        except (TypeError, ValueError) as error:
            if isinstance(error, InvalidInput):
                raise
            raise InvalidInput(f"append_many takes pairs of an id and its events: {error}") from error
        return await self.untyped.append_many(encoded)

    def read(
        self, id: str, *, start: int = FIRST, end: int = LAST, barrier: BarrierKind | None = None
    ) -> AsyncIterator[TypedEvent[E]]:
        """Return the events with start ≤ seq_nr ≤ end, in order, as of a moment after this call.

        Raise UnknownEventType for a type or a version that is not declared, unless the types are lenient.
        """
        decode: Any = row_decoder(self.types, self.topic, id)
        return self.untyped.read_decoded(id, decode, start=start, end=end, barrier=barrier)

    def tail(self, id: str, *, start: int = FIRST) -> AsyncIterator[TypedEvent[E]]:
        """Return the events from `start` on, then each new one as it is appended; the iterator does not end."""
        decode: Any = row_decoder(self.types, self.topic, id)
        return self.untyped.tail_decoded(id, decode, start=start)

    async def pointer(self, id: str, *, barrier: BarrierKind | None = None) -> int | None:
        """Return the last seq_nr, or None if there is no journal."""
        return await self.untyped.pointer(id, barrier=barrier)


class SyncTypedJournal(BlockingFacade[TypedJournal[Any]]):
    """The blocking form of `TypedJournal`."""

    topic = forwarded(TypedJournal[Any].topic)
    append = blocking(TypedJournal.append)
    append_many = blocking(TypedJournal.append_many)
    read = iterating(TypedJournal.read)
    tail = iterating(TypedJournal.tail)
    pointer = blocking(TypedJournal.pointer)
