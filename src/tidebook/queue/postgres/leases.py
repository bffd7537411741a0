"""Finishing entries and extending leases on PostgreSQL, by whole bundles where possible, else entry by entry."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from tidebook.queue.port import LeasedEntry, QueueRef
from tidebook.queue.postgres.arguments import held_parameters, uuid_array
from tidebook.queue.postgres.statement_runner import StatementRunner
from tidebook.queue.postgres.statements import TableStatements
from tidebook.runtime.micro_batcher import MicroBatcher

Group = list[LeasedEntry]
#: Bundles that one statement deletes, and such statements in flight at once.
BUNDLES_MAX = 64
CALLS_MAX = 2


class WholeBundle(NamedTuple):
    """A bundle of which every entry is finished."""

    sql: TableStatements
    queue: QueueRef
    token: bytes


class Leases:
    """Finishes entries and extends leases, if the token proves that they are held."""

    def __init__(self, runner: StatementRunner) -> None:
        self._runner = runner
        self._finish_bundle: MicroBatcher[WholeBundle, bool] = MicroBatcher(
            self._finish_bundles, group_max=BUNDLES_MAX, flights_max=CALLS_MAX
        )

    async def finish(self, sql: TableStatements, queue: QueueRef, held: Sequence[LeasedEntry]) -> set[LeasedEntry]:
        """Delete finished entries; return those that were still held."""
        if is_one_bundle(held) and await self._finish_bundle(WholeBundle(sql, queue, held[0].token)):
            return set(held)
        bundles, singles = split_bundles(held)
        finished: set[LeasedEntry] = set()
        if bundles:
            bundles_to_finish = [WholeBundle(sql, queue, token) for token in bundles]
            for bundle, deleted in zip(
                bundles_to_finish, await asyncio.gather(*map(self._finish_bundle, bundles_to_finish)), strict=True
            ):
                if deleted:
                    finished.update(bundles[bundle.token])
        for (slot, token), group in singles.items():
            finished |= await self._finish_in_slot(sql, queue, slot, token, group)
        missing = [] if len(finished) == len(held) else [entry for entry in held if entry not in finished]
        if missing:  # part of a bundle, moved to another partition since, or lost
            parameters = (f"{queue.id}", queue.id, queue.id, *held_parameters(missing))
            rows = await self._runner.rows(sql.finish, parameters, level=queue.settings.synchronous)
            found = {row[0] for row in rows}
            finished |= {entry for entry in missing if entry.keyhash in found}
        return finished

    async def _finish_bundles(self, bundles_to_finish: Sequence[WholeBundle]) -> list[bool | BaseException]:
        """Delete whole bundles of several callers, with one statement for each queue."""
        deleted: set[bytes] = set()
        for sql, queue in {(bundle.sql, bundle.queue): None for bundle in bundles_to_finish}:
            tokens = [bundle.token for bundle in bundles_to_finish if bundle.queue == queue]
            rows = await self._runner.rows(
                sql.finish_bundles, (queue.id, uuid_array(tokens)), level=queue.settings.synchronous
            )
            deleted.update(token for (token,) in rows)
        return [bundle.token in deleted for bundle in bundles_to_finish]

    async def _finish_in_slot(
        self, sql: TableStatements, queue: QueueRef, slot: int, token: bytes, held: Sequence[LeasedEntry]
    ) -> set[LeasedEntry]:
        parameters = (slot, queue.id, uuid_array(entry.keyhash for entry in held), token.hex(), f"{queue.id}", queue.id)
        rows = await self._runner.rows(sql.finish_in_slot, parameters, level=queue.settings.synchronous)
        if len(rows) == len(held):
            return set(held)
        deleted = {row[0] for row in rows}
        return {entry for entry in held if entry.keyhash in deleted}

    async def heartbeat(
        self, sql: TableStatements, queue: QueueRef, held: Sequence[LeasedEntry], lease_ms: int
    ) -> dict[LeasedEntry, int]:
        """Extend leases; return the entries that are still held, with the new end of their lease."""
        bundles, _ = split_bundles(held)
        extended: dict[LeasedEntry, int] = {}
        level = queue.settings.synchronous
        if bundles:
            rows = await self._runner.rows(sql.extend_bundles, (lease_ms, queue.id, uuid_array(bundles)), level=level)
            for token, until in rows:
                extended.update(dict.fromkeys(bundles[token], until))
        missing = [entry for entry in held if entry not in extended]
        if missing:
            parameters = (queue.id, lease_ms, *held_parameters(missing))
            rows = await self._runner.rows(sql.heartbeat, parameters, level=level)
            by_pair = {(entry.keyhash, entry.token): entry for entry in missing}
            extended |= {by_pair[keyhash, token]: until for keyhash, token, until in rows}
        return extended


def split_bundles(held: Sequence[LeasedEntry]) -> tuple[dict[bytes, Group], dict[tuple[int, bytes], Group]]:
    """Return whole bundles by token, and single entries by partition and token. Parts of bundles are in neither."""
    bundles: dict[bytes, Group] = {}
    singles: dict[tuple[int, bytes], Group] = {}
    for entry in held:
        if entry.together:
            bundles.setdefault(entry.token, []).append(entry)
        else:
            singles.setdefault((entry.slot, entry.token), []).append(entry)
    return {token: group for token, group in bundles.items() if _is_whole(group)}, singles


def is_one_bundle(held: Sequence[LeasedEntry]) -> bool:
    """Return whether the entries are exactly one whole bundle, the common case."""
    token, count = held[0].token, len(held)
    return all(entry.token == token and entry.together == count for entry in held) and _is_whole(held)


def _is_whole(group: Sequence[LeasedEntry]) -> bool:
    """Return whether every entry of a bundle is present; one that occurs twice does not replace another."""
    return len(group) == group[0].together == len({entry.keyhash for entry in group})
