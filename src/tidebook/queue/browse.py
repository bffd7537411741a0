"""Browse the entries of a queue page by page, however many there are: by state, priority, date and key.

Every read follows an index and is bounded, so that a queue of a million entries is browsed as fast as a small one.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from functools import wraps
from typing import Any, Concatenate, Final, Literal, NamedTuple, ParamSpec, Protocol, TypeVar

import msgspec

from tidebook.core.errors import InvalidInput
from tidebook.queue.entry import hash_key
from tidebook.queue.port import PRIORITY_MAX, DeadLetterRow, QueueRef, QueueStore, WaitingEntry

P = ParamSpec("P")
T = TypeVar("T")

#: The maximum number of entries in a page, and of dead letters that are examined for one page.
BROWSE_MAX: Final = 1_000
LETTERS_SCANNED_MAX: Final = 20_000
#: The latest date that an entry can have.
DATE_MAX: Final = 2**63 - 1

#: `due`: its date has come; `later`: it has not; `processing`: a worker holds it, or its lease has expired.
EntryState = Literal["due", "later", "processing"]


class EntryPlace(NamedTuple):
    """The place of an entry in the order of its listing; if it is being processed, the date is the end of its lease."""

    priority: int
    date_ms: int
    id: int


class EntryFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which entries of a queue to list: all fields must match."""

    state: EntryState = "due"
    #: The whole key.
    key: str | None = None
    priority: int | None = None
    #: The process date, both ends included.
    from_ms: int = 0
    to_ms: int = DATE_MAX
    #: The first bytes of the id of the worker that holds the entries.
    worker: bytes | None = None

    def __post_init__(self) -> None:
        if self.priority is not None and not 0 <= self.priority <= PRIORITY_MAX:
            raise InvalidInput(f"a priority must be 0 to {PRIORITY_MAX}, not {self.priority}")

    @property
    def keyhash(self) -> bytes | None:
        """The hash of the key."""
        return None if self.key is None else hash_key(self.key)

    def dates(self, now_ms: int) -> tuple[int, int]:
        """Return the first and the last process date that match."""
        match self.state:
            case "due":
                return self.from_ms, min(self.to_ms, now_ms)
            case "later":
                return max(self.from_ms, now_ms + 1), self.to_ms
            case "processing":
                return self.from_ms, self.to_ms

    def selects(self, found: BrowsedEntry, now_ms: int) -> bool:
        """Return whether an entry that was found by its key or its lease matches the other fields."""
        row, (low, high) = found.row, self.dates(now_ms)
        if not low <= row.process_at <= high or self.priority not in (None, row.priority):
            return False
        held = self.worker is None or (found.token is not None and found.token.startswith(self.worker))
        return held and self.key in (None, row.key)


class BrowsedEntry(msgspec.Struct, frozen=True):
    """An entry of a listing, its place, and the token of the claim that holds it."""

    row: WaitingEntry
    token: bytes | None

    @property
    def place(self) -> EntryPlace:
        """The place from which the next page continues."""
        row = self.row
        if row.status == "P":
            return EntryPlace(0, row.lease_until or 0, row.id)
        return EntryPlace(row.priority, row.process_at, row.id)


class ClaimSummary(msgspec.Struct, frozen=True):
    """A claim that holds entries: its token, their number and its dates."""

    token: bytes
    entries: int
    started_at: int
    #: The earliest end of its leases; a heartbeat moves it.
    lease_until: int


class LetterFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which dead letters to list: the whole key, and a part of the reason."""

    key: str | None = None
    reason: str = ""


class LetterPage(msgspec.Struct, frozen=True, kw_only=True):
    """Dead letters, newest first; `before` continues, and is None at the end."""

    letters: list[DeadLetterRow]
    before: int | None


class QueueBrowser(Protocol):
    """The bounded reads of a queue store, and the removal of entries that wait."""

    async def browse(
        self, queue: QueueRef, wanted: EntryFilter, *, after: EntryPlace | None = None, limit: int = 100
    ) -> list[BrowsedEntry]:
        """Return entries in claim order, those being processed by the end of their lease, after a place."""
        ...

    async def count_up_to(self, queue: QueueRef, wanted: EntryFilter, *, limit: int) -> int:
        """Return how many entries match, or `limit` if there are as many or more."""
        ...

    async def claims(self, queue: QueueRef, *, limit: int = 100) -> list[ClaimSummary]:
        """Return the claims that hold entries, the oldest lease first."""
        ...

    async def remove(self, queue: QueueRef, places: Sequence[EntryPlace]) -> int:
        """Delete the waiting entries at these places, and return how many; those claimed since are not affected."""
        ...

    async def letters(
        self, queue: QueueRef, wanted: LetterFilter, *, before: int | None = None, limit: int = 100
    ) -> LetterPage:
        """Return dead letters with an id below `before`; a page examines a bounded number and may be empty."""
        ...

    async def letter_ids(
        self, queue: QueueRef, wanted: LetterFilter, *, before: int | None = None
    ) -> tuple[list[int], int | None]:
        """Return the ids of matching dead letters below `before`, newest first, and the id to continue before.

        That is None at the end. A call examines a bounded number of dead letters.
        """
        ...

    async def retry_all(self, queue: QueueRef, ids: Sequence[int]) -> int:
        """Put dead letters back in this order, in one transaction; return how many still existed."""
        ...

    async def drop_all(self, queue: QueueRef, ids: Sequence[int]) -> int:
        """Delete dead letters; return how many still existed."""
        ...

    async def letter(self, queue: QueueRef, id: int) -> DeadLetterRow | None:
        """Return one dead letter; None if the queue has none of this id."""
        ...

    async def count_letters(self, queue: QueueRef, *, limit: int) -> int:
        """Return how many dead letters there are, or `limit` if there are as many or more."""
        ...

    async def paused_at(self, queue: QueueRef) -> int | None:
        """Return since when the queue is paused; None if it is not."""
        ...


class BrowsableStore(QueueStore, QueueBrowser, Protocol):
    """A queue store that can be browsed, as all adapters can."""


def _bound(
    method: Callable[Concatenate[BrowsableStore, QueueRef, P], Coroutine[Any, Any, T]], *, page: bool = False
) -> Callable[Concatenate[BoundBrowser, P], Coroutine[Any, Any, T]]:
    """Return a method that calls the store's method of the same name; if it returns a page, its `limit` is checked."""

    @wraps(method)
    async def call(self: BoundBrowser, /, *args: P.args, **kwargs: P.kwargs) -> T:
        limit = kwargs.get("limit", BROWSE_MAX)
        if page and (type(limit) is not int or not 1 <= limit <= BROWSE_MAX):
            raise InvalidInput(f"a page must have 1 to {BROWSE_MAX:,} entries, not {limit!r}")
        found: T = await getattr(self._store, method.__name__)(self.queue, *args, **kwargs)
        return found

    return call


class BoundBrowser:
    """Lists the entries and dead letters of one existing queue, and changes them, through its store."""

    def __init__(self, store: BrowsableStore, queue: QueueRef) -> None:
        self._store = store
        self.queue = queue

    browse = _bound(QueueBrowser.browse, page=True)
    claims = _bound(QueueBrowser.claims, page=True)
    letters = _bound(QueueBrowser.letters, page=True)
    workers = _bound(QueueStore.workers, page=True)
    count_up_to = _bound(QueueBrowser.count_up_to)
    remove = _bound(QueueBrowser.remove)
    letter_ids = _bound(QueueBrowser.letter_ids)
    retry_all = _bound(QueueBrowser.retry_all)
    drop_all = _bound(QueueBrowser.drop_all)
    letter = _bound(QueueBrowser.letter)
    count_letters = _bound(QueueBrowser.count_letters)
    paused_at = _bound(QueueBrowser.paused_at)
