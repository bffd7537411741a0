"""Claiming, heartbeats and finishing: what the writer does for those who work.

Rows come out as one JSON value: each step of a statement lets go of the interpreter's lock, and a busy loop's thread
gives it back late.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

import apsw
import msgspec

from tidebook.core.clock import Clock
from tidebook.folder.writer import Session, unsynced
from tidebook.sql.port.queue import SLOW_PRIORITY, Claimed, Held, QueueRef
from tidebook.sql.sqlite.queue_runouts import run_out
from tidebook.sql.sqlite.queue_tables import channel_of

#: A claim stops at so many bytes of data. What is longer than INLINE_BYTES_MAX is fetched by itself, and at most
#: PICK_MAX entries are picked at once: so their text stays small beside what a claim may hold.
CLAIM_BYTES_MAX = 64_000_000
INLINE_BYTES_MAX = 32_000
PICK_MAX = 1_000

_ROWS = f"""SELECT json_group_array(json_array(id, hex(keyhash), key, priority, timeouts, format, inserted_at,
    process_at, expires_at, kind, CASE WHEN length(data) <= {INLINE_BYTES_MAX} THEN hex(data) ELSE length(data) END))"""
_NEXT_PRIORITY = """SELECT priority FROM entry INDEXED BY entry_order WHERE queue = ? AND status = 'W' AND priority >= ?
    ORDER BY priority LIMIT 1"""
_PICK = f"""{_ROWS} FROM (SELECT e.* FROM entry AS e INDEXED BY entry_order
    WHERE e.queue = ?1 AND e.status = 'W' AND e.priority = ?2 AND e.process_at <= ?3 AND e.expires_at > ?3
    AND (e.key IS NULL OR NOT ?4 OR NOT EXISTS (SELECT 1 FROM entry AS h INDEXED BY entry_held
        WHERE h.queue = ?1 AND h.status = 'P' AND h.key IS NOT NULL AND h.keyhash = e.keyhash))
    ORDER BY e.process_at, e.id LIMIT ?5)"""
_ANY_RUN_OUT = (
    "SELECT 1 FROM entry INDEXED BY entry_lease WHERE queue = ? AND status = 'P' AND lease_until <= ? LIMIT 1"
)
_NEXT_RUN_OUT = """SELECT min(priority) FROM entry INDEXED BY entry_lease
    WHERE queue = ? AND status = 'P' AND lease_until = 0 AND priority >= ?"""
_PICK_RUN_OUT = f"""{_ROWS} FROM (SELECT e.* FROM entry AS e INDEXED BY entry_lease
    WHERE e.queue = ? AND e.status = 'P' AND e.lease_until = 0 AND e.priority = ? AND e.expires_at > ?
    ORDER BY e.process_at, e.id LIMIT ?)"""
_DATA = "SELECT data FROM entry WHERE id = ?"
_TAKE = """UPDATE entry SET status = 'P', token = ?, started_at = ?, lease_until = ?, serial = ?
    WHERE id IN (SELECT value FROM json_each(?))"""
# Ids that are held under one token; and whether an entry waits for one of their keys.
_FIND = """SELECT json_group_array(e.id), max(e.key IS NOT NULL AND EXISTS (
        SELECT 1 FROM entry AS w INDEXED BY entry_waiting
        WHERE w.queue = e.queue AND w.status = 'W' AND w.key IS NOT NULL AND w.keyhash = e.keyhash))
    FROM json_each(?) AS asked CROSS JOIN entry AS e ON e.id = asked.value WHERE e.status = 'P' AND e.token = ?"""
_DELETE = "DELETE FROM entry WHERE id IN (SELECT value FROM json_each(?))"
_DELETE_KEYLESS = """DELETE FROM entry WHERE id IN (SELECT value FROM json_each(?))
    AND status = 'P' AND token = ? AND key IS NULL"""
_EXTEND = "UPDATE entry SET lease_until = ? WHERE id IN (SELECT value FROM json_each(?))"

_encode = msgspec.json.Encoder().encode
_Row = tuple[int, str, str | None, int, int, int, int, int, int, int, str | int]
_decode_rows = msgspec.json.Decoder(list[_Row]).decode
_decode_ids = msgspec.json.Decoder(list[int]).decode


class Claim(msgspec.Struct, frozen=True, gc=False):
    """Who wants how many, for how long."""

    queue: QueueRef
    limit: int
    lease_ms: int
    token: bytes


class Hold(msgspec.Struct, frozen=True, gc=False):
    """Entries that somebody says he holds."""

    queue: QueueRef
    held: Sequence[Held]
    lease_ms: int = 0


class Claims:
    """Hands entries out, extends their leases and takes them back."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    @unsynced  # a claim that a power cut undoes was made by a process that is gone with it
    def claim(self, session: Session, claims: Sequence[Claim]) -> list[list[Claimed]]:
        """Each claim in turn."""
        return [self._claim(session.connection, claim) for claim in claims]

    def _claim(self, connection: apsw.Connection, claim: Claim) -> list[Claimed]:
        now_ms, ref = self._clock.now_ms(), claim.queue
        any_run_out = connection.execute(_ANY_RUN_OUT, (ref.id, now_ms)).fetchone() is not None
        if any_run_out:
            run_out(connection, ref, now_ms)
        found: list[Claimed] = []
        lowest, room_bytes = 0, CLAIM_BYTES_MAX
        while len(found) < claim.limit and room_bytes > 0:
            left = min(claim.limit - len(found), PICK_MAX)
            priority, here = _next(connection, ref.id, lowest, run_out=any_run_out)
            if priority is None or (priority >= SLOW_PRIORITY and found and found[0].priority < SLOW_PRIORITY):
                break
            rows = _rows(connection, _PICK, (ref.id, priority, now_ms, not ref.settings.parallel_keys, left))
            if here:
                rows += _rows(connection, _PICK_RUN_OUT, (ref.id, priority, now_ms, left))
                rows.sort(key=_by_date)
            rows, room_bytes = _fitting(rows[:left], room_bytes)
            found += self._take(connection, claim, now_ms, rows)
            lowest = priority if len(rows) == PICK_MAX else priority + 1
        found.sort(key=attrgetter("priority", "process_at", "id"))
        return found

    def _take(self, connection: apsw.Connection, claim: Claim, now_ms: int, rows: list[_Row]) -> list[Claimed]:
        if not rows:
            return []
        until = now_ms + claim.lease_ms
        serial = None if claim.queue.settings.parallel_keys else 1
        ids = _encode([row[0] for row in rows]).decode()
        connection.execute(_TAKE, (claim.token, now_ms, until, serial, ids))
        return [
            Claimed(id, id, bytes.fromhex(hash_), key, priority, timeouts, format, inserted_at, process_at, expires_at,
                now_ms, until, kind,
                bytes.fromhex(data) if type(data) is str else connection.execute(_DATA, (id,)).get)
            for id, hash_, key, priority, timeouts, format, inserted_at, process_at, expires_at, kind, data in rows
        ]  # fmt: skip

    def finish(self, session: Session, holds: Sequence[Hold]) -> list[set[Held]]:
        """Delete what is held, many holds in one statement."""
        connection = session.connection
        asked = [each for hold in holds for each in hold.held]
        gone: set[Held] = set()
        if len(holds) == 1 and _finish_keyless(connection, asked):
            return [set(asked)]
        for found, ids, sibling in _find(connection, asked):
            connection.execute(_DELETE, (ids,))
            gone.update(found)
            if sibling:  # somebody may sleep though work is due, since its key was held
                session.channels.update(channel_of(hold.queue.id) for hold in holds)
        if len(holds) == 1:
            return [gone]
        finished: list[set[Held]] = []
        for hold in holds:
            finished.append(gone.intersection(hold.held))
            gone -= finished[-1]  # what is named twice was the first one's
        return finished

    @unsynced
    def heartbeat(self, session: Session, holds: Sequence[Hold]) -> list[dict[Held, int]]:
        """Extend what is held."""
        now_ms = self._clock.now_ms()
        kept: list[dict[Held, int]] = []
        for hold in holds:
            until = now_ms + hold.lease_ms
            kept.append({})
            for found, ids, _ in _find(session.connection, hold.held):
                session.connection.execute(_EXTEND, (until, ids))
                kept[-1].update(dict.fromkeys(found, until))
        return kept


def _finish_keyless(connection: apsw.Connection, asked: Sequence[Held]) -> bool:
    """Delete entries without a key, all held under one token: nobody waits for them. False: none was deleted."""
    token, ids = asked[0].token, {each.slot for each in asked}
    if len(ids) < len(asked) or any(each.token != token for each in asked):
        return False
    connection.execute("SAVEPOINT keyless")
    connection.execute(_DELETE_KEYLESS, (_encode(list(ids)).decode(), token))
    complete: bool = connection.changes() == len(asked)
    connection.execute("RELEASE keyless" if complete else "ROLLBACK TO keyless; RELEASE keyless")
    return complete


def _rows(connection: apsw.Connection, pick: str, parameters: tuple[Any, ...]) -> list[_Row]:
    text: str = connection.execute(pick, parameters).get
    return _decode_rows(text)


def _fitting(rows: list[_Row], room_bytes: int) -> tuple[list[_Row], int]:
    """The first rows, until their data has filled the room, and the room that is left."""
    for place, row in enumerate(rows):
        data = row[10]
        room_bytes -= data if type(data) is int else len(data) // 2  # type: ignore[arg-type]
        if room_bytes <= 0:
            return rows[: place + 1], 0
    return rows, room_bytes


def _by_date(row: _Row) -> tuple[int, int]:
    return row[7], row[0]


def _next(connection: apsw.Connection, queue: int, lowest: int, *, run_out: bool) -> tuple[int | None, bool]:
    """The next priority that has entries, and whether a lease that ran out is among them."""
    waiting: int | None = connection.execute(_NEXT_PRIORITY, (queue, lowest)).get
    if not run_out:
        return waiting, False
    out: int | None = connection.execute(_NEXT_RUN_OUT, (queue, lowest)).get
    if out is None or (waiting is not None and waiting < out):
        return waiting, False
    return out, True


def _find(connection: apsw.Connection, held: Sequence[Held]) -> Iterator[tuple[list[Held], str, int | None]]:
    """Token by token: what is held, its ids as JSON, and whether an entry waits for one of the keys."""
    by_token: dict[bytes, dict[int, Held]] = {}
    for each in held:
        by_token.setdefault(each.token, {})[each.slot] = each
    for token, asked in by_token.items():
        row: Any = connection.execute(_FIND, (_encode(list(asked)).decode(), token)).fetchone()
        ids, sibling = row
        found = (
            list(asked.values())
            if ids.count(",") == len(asked) - 1 and ids != "[]"
            else [asked[id] for id in _decode_ids(ids)]
        )
        yield found, ids, sibling
