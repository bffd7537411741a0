"""Bounded listings of entries, claims, workers and dead letters, for queue stores on a SQL database."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import Any, ClassVar, Final, NamedTuple

from tidebook.queue.browse import (
    LETTERS_SCANNED_MAX,
    BrowsedEntry,
    ClaimSummary,
    EntryFilter,
    EntryPlace,
    LetterFilter,
    LetterPage,
)
from tidebook.queue.port import DeadLetterRow, QueueRef, WaitingEntry, WorkerRow

#: The maximum number of entries in processing that are searched for claims, or for a key inside bundles.
CLAIMED_MAX: Final = 20_000
_FIRST: Final = EntryPlace(0, 0, -1)


class BrowseStatements(NamedTuple):
    """The statements of one database, with named parameters. `range` selects waiting entries of one priority."""

    next_priority: str
    range: str
    range_count: str
    waiting_of_key: str
    #: Entries in processing after a date and id.
    held: str
    #: Entries in processing that may be of the key; a database without an index for it returns all, up to `limit`.
    held_of_key: str
    held_count: str
    claims: str
    workers: str
    letters: str
    letter_ids: str
    #: The id at which a page of dead letters ends its search.
    letter_floor: str
    letter: str
    letter_count: str


class SqlBrowser(ABC):
    """The methods of a store that list entries and dead letters page by page."""

    _statements: ClassVar[BrowseStatements]

    @abstractmethod
    async def _select(self, sql: str, queue: QueueRef, **parameters: object) -> list[Any]:
        """Return the rows of a statement with these parameters; `queue` is the queue's id."""

    @abstractmethod
    async def _time_ms(self) -> int:
        """Return the time of the store's clock."""

    async def browse(
        self, queue: QueueRef, wanted: EntryFilter, *, after: EntryPlace | None = None, limit: int = 100
    ) -> list[BrowsedEntry]:
        now_ms = await self._time_ms()
        if wanted.key is not None:
            return await self._of_key(queue, now_ms, wanted) if after is None else []
        found: list[BrowsedEntry] = []
        if wanted.state == "processing":
            place = after or _FIRST
            while len(found) < limit:
                page = await self._entries(self._statements.held, queue, date=place.date_ms, id=place.id, limit=limit)
                found += [each for each in page if wanted.selects(each, now_ms)]
                if len(page) < limit:
                    break
                place = page[-1].place
            return found[:limit]
        async for bounds in self._ranges(queue, now_ms, wanted, after):
            found += await self._entries(self._statements.range, queue, **bounds, limit=limit - len(found))
            if len(found) == limit:
                break
        return found

    async def _ranges(
        self, queue: QueueRef, now_ms: int, wanted: EntryFilter, after: EntryPlace | None
    ) -> AsyncIterator[dict[str, int]]:
        """Yield the parameters of `range` for each priority: dates are a range of the index only within one."""
        low, high = wanted.dates(now_ms)
        first = 0 if after is None else after.priority
        priority = wanted.priority
        if priority is None:
            priority = await self._next_priority(queue, first)
        while priority is not None:
            place = after if after is not None and after.priority == priority else EntryPlace(0, -1, -1)
            if priority >= first:
                # Either bound may be the one that the planner seeks by, so both are as tight as they can be.
                date, id = max((place.date_ms, place.id), (low, -1))
                yield {"priority": priority, "low": low, "high": high, "date": date, "id": id, "now": now_ms}
            if wanted.priority is not None:
                return
            priority = await self._next_priority(queue, priority + 1)

    async def _next_priority(self, queue: QueueRef, least: int) -> int | None:
        rows = await self._select(self._statements.next_priority, queue, least=least)
        return int(rows[0][0]) if rows else None

    async def _of_key(self, queue: QueueRef, now_ms: int, wanted: EntryFilter) -> list[BrowsedEntry]:
        held = wanted.state == "processing"
        sql = self._statements.held_of_key if held else self._statements.waiting_of_key
        parameters = {"now": now_ms, "date": _FIRST.date_ms, "id": _FIRST.id, "limit": CLAIMED_MAX}
        rows = await self._entries(sql, queue, keyhash=(wanted.keyhash or b"").hex(), **parameters)
        return [each for each in rows if wanted.selects(each, now_ms)]

    async def _entries(self, sql: str, queue: QueueRef, **parameters: object) -> list[BrowsedEntry]:
        return [BrowsedEntry(WaitingEntry(*row[:-1]), row[-1]) for row in await self._select(sql, queue, **parameters)]

    async def _read_count(self, sql: str, queue: QueueRef, **parameters: object) -> int:
        ((count,),) = await self._select(sql, queue, **parameters)
        return int(count)

    async def count_up_to(self, queue: QueueRef, wanted: EntryFilter, *, limit: int) -> int:
        now_ms = await self._time_ms()
        if wanted.key is not None:
            return min(limit, len(await self._of_key(queue, now_ms, wanted)))
        if wanted == EntryFilter(state="processing"):
            return await self._read_count(self._statements.held_count, queue, date=_FIRST.date_ms, limit=limit)
        if wanted.state == "processing":
            return len(await self.browse(queue, wanted, limit=limit))
        total = 0
        async for bounds in self._ranges(queue, now_ms, wanted, None):
            total += await self._read_count(self._statements.range_count, queue, **bounds, limit=limit - total)
            if total >= limit:
                break
        return total

    async def claims(self, queue: QueueRef, *, limit: int = 100) -> list[ClaimSummary]:
        rows = await self._select(self._statements.claims, queue, searched=CLAIMED_MAX, limit=limit)
        return [ClaimSummary(*row) for row in rows]

    async def workers(self, queue: QueueRef, *, limit: int = 100) -> list[WorkerRow]:
        return [WorkerRow(*row) for row in await self._select(self._statements.workers, queue, limit=limit)]

    async def letters(
        self, queue: QueueRef, wanted: LetterFilter, *, before: int | None = None, limit: int = 100
    ) -> LetterPage:
        rows, floor = await self._letter_rows(self._statements.letters, queue, wanted, before, limit=limit)
        found = [DeadLetterRow(*row) for row in rows]
        return LetterPage(letters=found, before=found[-1].id if len(found) == limit else floor)

    async def letter_ids(
        self, queue: QueueRef, wanted: LetterFilter, *, before: int | None = None
    ) -> tuple[list[int], int | None]:
        rows, floor = await self._letter_rows(self._statements.letter_ids, queue, wanted, before)
        return [id for (id,) in rows], floor

    async def _letter_rows(
        self, sql: str, queue: QueueRef, wanted: LetterFilter, before: int | None, **parameters: int
    ) -> tuple[list[Any], int | None]:
        below = 2**63 - 1 if before is None else before
        floors = await self._select(self._statements.letter_floor, queue, below=below, searched=LETTERS_SCANNED_MAX)
        floor = floors[0][0] if floors else None
        bounds = {"below": below, "floor": floor or 0, **parameters}
        return await self._select(sql, queue, key=wanted.key, reason=wanted.reason, **bounds), floor

    async def letter(self, queue: QueueRef, id: int) -> DeadLetterRow | None:
        rows = await self._select(self._statements.letter, queue, id=id)
        return DeadLetterRow(*rows[0]) if rows else None

    async def count_letters(self, queue: QueueRef, *, limit: int) -> int:
        return await self._read_count(self._statements.letter_count, queue, limit=limit)
