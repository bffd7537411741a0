"""Claims on PostgreSQL: claims that arrive while others are in flight share the next call and its commit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby, starmap
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from tidebook.queue.port import Claimed, QueueRef
from tidebook.queue.postgres.arguments import number_array, uuid_array
from tidebook.queue.postgres.claim_watermarks import ClaimWatermarks
from tidebook.queue.postgres.statement_runner import StatementRunner
from tidebook.queue.postgres.statements import TableStatements
from tidebook.queue.shared_claims import share_claims
from tidebook.runtime.micro_batcher import MicroBatcher

#: How many entries the claims of one call request together, with few and with many claims waiting, and how many calls
#: of a queue are in flight at once. With one call only, the server would idle while the claims read, and vice versa.
BATCH_LIMIT, BATCH_LIMIT_MAX = 256, 1_000
CALLS_MAX = 2

_ID, _DATE, _PRIORITY = itemgetter(1), itemgetter(8), itemgetter(4)
#: By id, then by date, then by priority: three stable sorts by a number are cheaper than one by a tuple.
_SORT_KEYS = (_ID, _DATE, _PRIORITY)
_KEY = 3
_LIMIT = attrgetter("limit")


class ClaimKind(NamedTuple):
    """What claims must have in common to share a call."""

    sql: TableStatements
    queue: QueueRef
    lease_ms: int
    together: bool


class PostgresClaim(NamedTuple):
    """The arguments of one claim."""

    kind: ClaimKind
    limit: int
    token: bytes


class PostgresClaims:
    """Batches the claims of a process, queue by queue."""

    def __init__(self, runner: StatementRunner, watermarks: ClaimWatermarks) -> None:
        self._runner = runner
        self._watermarks = watermarks
        self._batchers: dict[int, MicroBatcher[PostgresClaim, list[Claimed]]] = {}

    async def __call__(self, claim: PostgresClaim) -> list[Claimed]:
        """Return the entries of one claim, in order."""
        batcher = self._batchers.get(claim.kind.queue.id)
        if batcher is None:
            batcher = MicroBatcher(
                self._run, group_max=BATCH_LIMIT, share_max=BATCH_LIMIT_MAX, flights_max=CALLS_MAX, weigh=_LIMIT
            )
            self._batchers[claim.kind.queue.id] = batcher
        if batcher.is_idle() and not claim.kind.together:  # small claims were batched by the queue already
            return await batcher.alone(claim)
        return await batcher(claim)

    async def _run(self, claims: Sequence[PostgresClaim]) -> list[list[Claimed] | BaseException]:
        return await share_claims(claims, attrgetter("kind"), self._claim)

    async def _claim(self, kind: ClaimKind, claims: Sequence[PostgresClaim]) -> list[list[Claimed]]:
        watermarks = self._watermarks.for_claim(kind.queue)
        rows = await self._rows(kind, claims, watermarks)
        if not rows and watermarks:  # an empty claim must prove that nothing is due
            rows = await self._rows(kind, claims, {})
        if rows:
            self._watermarks.record_claim(kind.queue, _first_dates(rows), len(rows))
        shares: list[list[Claimed]] = []
        for claim in claims:
            share, rows = rows[: claim.limit], rows[claim.limit :]
            for sort_key in _SORT_KEYS:
                share.sort(key=sort_key)
            shares.append(_make_claimed(share, together=kind.together))
        return shares

    async def _rows(
        self, kind: ClaimKind, claims: Sequence[PostgresClaim], watermarks: Mapping[int, int]
    ) -> list[tuple[Any, ...]]:
        settings = kind.queue.settings
        parameters = (
            kind.queue.id,
            number_array(claim.limit for claim in claims),
            kind.lease_ms,
            uuid_array(claim.token for claim in claims),
            settings.max_timeouts,
            not settings.parallel_keys,
            kind.together,
            number_array(watermarks),
            number_array(watermarks.values()),
        )
        return await self._runner.rows(kind.sql.claim, parameters, level=settings.synchronous)


def _first_dates(rows: Sequence[tuple[Any, ...]]) -> dict[int, int]:
    """Return the first date of each priority; the rows are grouped by priority."""
    if _PRIORITY(rows[0]) == _PRIORITY(rows[-1]):
        return {_PRIORITY(rows[0]): min(map(_DATE, rows))}
    return {priority: min(map(_DATE, group)) for priority, group in groupby(rows, key=_PRIORITY)}


def _make_claimed(rows: list[tuple[Any, ...]], *, together: bool) -> list[Claimed]:
    """Return the entries of one claim; with `together`, two or more of them without a key form a bundle."""
    count = [row[_KEY] for row in rows].count(None) if together else 0
    if count > 1:
        bundle_size = (count,)
        rows = [row if row[_KEY] is not None else row + bundle_size for row in rows]
    return list(starmap(Claimed, rows))  # starmap takes half the time of unpacking each row
