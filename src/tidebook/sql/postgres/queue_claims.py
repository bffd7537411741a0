"""Claims: those that come while others are under way share the next call and its commit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby, starmap
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from tidebook.core.errors import TidebookError
from tidebook.core.gather import Gather
from tidebook.sql.port.queue import Claimed, QueueRef
from tidebook.sql.postgres.queue_calls import Calls
from tidebook.sql.postgres.queue_floors import Floors
from tidebook.sql.queries.queue.arguments import hashes, numbers
from tidebook.sql.queries.queue.statements import TableStatements

#: Entries that the claims of one call ask for, where few wait and where many do, and calls of a queue that are under
#: way at one time. Claims that all share one call stay in step: the server rests while they read, they while it works.
SHARED_LEAST, SHARED_MAX = 256, 1_000
FLIGHTS_MAX = 2

_ID, _DATE, _PRIORITY = itemgetter(1), itemgetter(8), itemgetter(4)
#: By id, then by date, then by priority: three sorts by a number are cheaper than one by three.
_ORDER = (_ID, _DATE, _PRIORITY)
_KEY = 3
_LIMIT = attrgetter("limit")


class Kind(NamedTuple):
    """What claims must have in common to share a call."""

    sql: TableStatements
    queue: QueueRef
    lease_ms: int
    together: bool


class Claim(NamedTuple):
    """What one asks for."""

    kind: Kind
    limit: int
    token: bytes


class Claims:
    """The claims of a process, queue by queue."""

    def __init__(self, calls: Calls, floors: Floors) -> None:
        self._calls = calls
        self._floors = floors
        self._gathers: dict[int, Gather[Claim, list[Claimed]]] = {}

    async def __call__(self, claim: Claim) -> list[Claimed]:
        """The entries of one claim, in order."""
        gather = self._gathers.get(claim.kind.queue.id)
        if gather is None:
            gather = Gather(
                self._run, group_max=SHARED_LEAST, share_max=SHARED_MAX, flights_max=FLIGHTS_MAX, weigh=_LIMIT
            )
            self._gathers[claim.kind.queue.id] = gather
        if gather.is_idle() and not claim.kind.together:  # those of one at a time were gathered on their way here
            return await gather.alone(claim)
        return await gather(claim)

    async def _run(self, claims: Sequence[Claim]) -> list[list[Claimed] | BaseException]:
        outcomes: list[list[Claimed] | BaseException] = [[] for _ in claims]
        for kind in dict.fromkeys(claim.kind for claim in claims):
            places = [place for place, claim in enumerate(claims) if claim.kind == kind]
            # Who got nothing asks again: slow entries are not mixed with others, and what a call brings is bounded.
            while places:
                try:
                    dealt = await self._claim(kind, [claims[place] for place in places])
                except TidebookError as error:
                    for place in places:
                        outcomes[place] = error
                    break
                for place, entries in zip(places, dealt, strict=True):
                    outcomes[place] = entries
                if not dealt[0]:
                    break
                places = [place for place, entries in zip(places, dealt, strict=True) if not entries]
        return outcomes

    async def _claim(self, kind: Kind, claims: Sequence[Claim]) -> list[list[Claimed]]:
        floors = self._floors.of(kind.queue)
        rows = await self._rows(kind, claims, floors)
        if not rows and floors:  # that nothing is due must be true
            rows = await self._rows(kind, claims, {})
        if rows:
            self._floors.claimed(kind.queue, _firsts(rows), len(rows))
        found: list[list[Claimed]] = []
        for claim in claims:
            mine, rows = rows[: claim.limit], rows[claim.limit :]
            for place in _ORDER:
                mine.sort(key=place)
            found.append(_claimed(mine, together=kind.together))
        return found

    async def _rows(self, kind: Kind, claims: Sequence[Claim], floors: Mapping[int, int]) -> list[tuple[Any, ...]]:
        settings = kind.queue.settings
        parameters = (
            kind.queue.id,
            numbers(claim.limit for claim in claims),
            kind.lease_ms,
            hashes(claim.token for claim in claims),
            settings.max_timeouts,
            not settings.parallel_keys,
            kind.together,
            numbers(floors),
            numbers(floors.values()),
        )
        return await self._calls.rows(kind.sql.claim, parameters, level=settings.synchronous)


def _firsts(rows: Sequence[tuple[Any, ...]]) -> dict[int, int]:
    """The first date of each priority among rows that come priority by priority."""
    if _PRIORITY(rows[0]) == _PRIORITY(rows[-1]):
        return {_PRIORITY(rows[0]): min(map(_DATE, rows))}
    return {priority: min(map(_DATE, group)) for priority, group in groupby(rows, key=_PRIORITY)}


def _claimed(rows: list[tuple[Any, ...]], *, together: bool) -> list[Claimed]:
    """What one claim got: its entries without a key lie in a bundle, if there are two or more and they may."""
    count = [row[_KEY] for row in rows].count(None) if together else 0
    if count > 1:
        bundled = (count,)
        rows = [row if row[_KEY] is not None else row + bundled for row in rows]
    return list(starmap(Claimed, rows))  # calls with tuples as they are: half the time of unpacking them
