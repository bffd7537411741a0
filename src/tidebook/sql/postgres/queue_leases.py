"""What is held: finishing it, and extending its lease. Whole bundles are one row; of others, single entries count."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from tidebook.core.gather import Gather
from tidebook.sql.port.queue import Held, QueueRef
from tidebook.sql.postgres.queue_calls import Calls
from tidebook.sql.queries.queue.arguments import hashes, held_parameters
from tidebook.sql.queries.queue.statements import TableStatements

Group = list[Held]
#: Bundles that one statement deletes, and such statements that are under way at one time.
BUNDLES_MAX = 64
FLIGHTS_MAX = 2


class Whole(NamedTuple):
    """A bundle of which everything is finished."""

    sql: TableStatements
    queue: QueueRef
    token: bytes


class Leases:
    """Entries that somebody says he holds."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._finish_whole: Gather[Whole, bool] = Gather(
            self._finish_bundles, group_max=BUNDLES_MAX, flights_max=FLIGHTS_MAX
        )

    async def finish(self, sql: TableStatements, queue: QueueRef, held: Sequence[Held]) -> set[Held]:
        """Delete entries; the ones that were still held."""
        if is_one_bundle(held) and await self._finish_whole(Whole(sql, queue, held[0].token)):
            return set(held)
        bundles, alone = split(held)
        finished: set[Held] = set()
        if bundles:
            wholes = [Whole(sql, queue, token) for token in bundles]
            for whole, deleted in zip(wholes, await asyncio.gather(*map(self._finish_whole, wholes)), strict=True):
                if deleted:
                    finished.update(bundles[whole.token])
        for (slot, token), group in alone.items():
            finished |= await self._finish_at(sql, queue, slot, token, group)
        missing = [] if len(finished) == len(held) else [each for each in held if each not in finished]
        if missing:  # part of a bundle, moved to another period's table since, or lost
            parameters = (f"{queue.id}", queue.id, queue.id, *held_parameters(missing))
            rows = await self._calls.rows(sql.finish, parameters, level=queue.settings.synchronous)
            gone = {row[0] for row in rows}
            finished |= {each for each in missing if each.keyhash in gone}
        return finished

    async def _finish_bundles(self, wholes: Sequence[Whole]) -> list[bool | BaseException]:
        """One delete for the bundles of a queue, whoever finishes them."""
        gone: set[bytes] = set()
        for sql, queue in {(whole.sql, whole.queue): None for whole in wholes}:
            tokens = [whole.token for whole in wholes if whole.queue == queue]
            rows = await self._calls.rows(
                sql.finish_bundles, (queue.id, hashes(tokens)), level=queue.settings.synchronous
            )
            gone.update(token for (token,) in rows)
        return [whole.token in gone for whole in wholes]

    async def _finish_at(
        self, sql: TableStatements, queue: QueueRef, slot: int, token: bytes, held: Sequence[Held]
    ) -> set[Held]:
        parameters = (slot, queue.id, hashes(each.keyhash for each in held), token.hex(), f"{queue.id}", queue.id)
        rows = await self._calls.rows(sql.finish_at, parameters, level=queue.settings.synchronous)
        if len(rows) == len(held):
            return set(held)
        gone = {row[0] for row in rows}
        return {each for each in held if each.keyhash in gone}

    async def heartbeat(
        self, sql: TableStatements, queue: QueueRef, held: Sequence[Held], lease_ms: int
    ) -> dict[Held, int]:
        """Extend leases; the ones that are still held, with their new end."""
        bundles, _ = split(held)
        kept: dict[Held, int] = {}
        level = queue.settings.synchronous
        if bundles:
            rows = await self._calls.rows(sql.extend_bundles, (lease_ms, queue.id, hashes(bundles)), level=level)
            for token, until in rows:
                kept.update(dict.fromkeys(bundles[token], until))
        missing = [each for each in held if each not in kept]
        if missing:
            parameters = (queue.id, lease_ms, *held_parameters(missing))
            rows = await self._calls.rows(sql.heartbeat, parameters, level=level)
            by_pair = {(each.keyhash, each.token): each for each in missing}
            kept |= {by_pair[keyhash, token]: until for keyhash, token, until in rows}
        return kept


def split(held: Sequence[Held]) -> tuple[dict[bytes, Group], dict[tuple[int, bytes], Group]]:
    """Whole bundles by token, and entries kept for themselves by table and token. Parts of bundles are in neither."""
    bundles: dict[bytes, Group] = {}
    alone: dict[tuple[int, bytes], Group] = {}
    for each in held:
        if each.together:
            bundles.setdefault(each.token, []).append(each)
        else:
            alone.setdefault((each.slot, each.token), []).append(each)
    return {token: group for token, group in bundles.items() if _is_whole(group)}, alone


def is_one_bundle(held: Sequence[Held]) -> bool:
    """Whether this is all of one bundle, as most finish it."""
    token, count = held[0].token, len(held)
    return all(each.token == token and each.together == count for each in held) and _is_whole(held)


def _is_whole(group: Sequence[Held]) -> bool:
    """Whether all of a bundle is there: one that is named twice does not stand for another."""
    return len(group) == group[0].together == len({each.keyhash for each in group})
