"""Stored responses by Idempotency-Key: a repeated request gets the stored response, and changes nothing.

A key is stored before its request runs, and the response afterwards. A request that a crash interrupts is therefore
never run twice: its repeat gets `outcome-unknown`. A request that is refused leaves no key, so that its repeat runs.

For an append only the response is stored. The repeat of an append without a stored response runs again, and the journal
recognizes it by its append id, unless more than 16 appends came in between.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from hashlib import blake2b
from typing import Any, Final

import apsw
import msgspec

from tidebook.core.errors import InvalidInput, OutcomeUnknown, TidebookError, Unavailable
from tidebook.runtime.clock import Clock
from tidebook.server.database import ServerDatabase

logger = logging.getLogger("tidebook.server")

KEY_CHARS_MAX: Final = 200
#: A larger response is not stored: a repeat of its request gets `outcome-unknown`, and a repeated append runs again.
RESPONSE_BYTES_MAX: Final = 1_000_000
_PRUNE_ROWS: Final = 1_000


class EncodedResponse(msgspec.Struct, frozen=True):
    """A response as it is sent."""

    status: int
    body: bytes
    replayed: bool = False


def check_key(key: str) -> str:
    """Return an Idempotency-Key; raise `InvalidInput` unless it is 1 to 200 printable ASCII characters, no spaces."""
    if not 1 <= len(key) <= KEY_CHARS_MAX or not all("!" <= each <= "~" for each in key):
        raise InvalidInput(f"an Idempotency-Key must be 1 to {KEY_CHARS_MAX} printable ASCII characters without spaces")
    return key


class IdempotencyKeys:
    """Stores keys and the responses to their requests, for a limited time and up to a limited number of keys."""

    def __init__(self, database: ServerDatabase, clock: Clock, *, keys_max: int, keep_s: float) -> None:
        self._database = database
        self._clock = clock
        self._keys_max = keys_max
        self._keep_ms = round(keep_s * 1000)
        self._running: dict[bytes, asyncio.Future[None]] = {}
        self._begun = 0

    async def run_once(
        self, principal_id: str, key: str, request: bytes, run: Callable[[], Awaitable[EncodedResponse]]
    ) -> EncodedResponse:
        """Return the response to the first request of a principal with this key; call `run` if this is the first.

        `request` identifies the request: `InvalidInput` is raised if the key was first used with a different one.
        """
        hashed, digest = _hash(principal_id.encode(), check_key(key).encode()), _hash(request)
        async with self._exclusively(hashed):
            if (stored := self._stored_response(hashed, digest)) is not None:
                return stored
            if await self._begin(hashed, digest):
                return await self._run(hashed, run)
            if (stored := self._stored_response(hashed, digest)) is not None:
                return stored
            raise Unavailable("a request with this Idempotency-Key has just failed on another server: send it again")

    async def append_once(
        self, principal_id: str, key: str, request: bytes, run: Callable[[], Awaitable[tuple[EncodedResponse, bool]]]
    ) -> EncodedResponse:
        """Return the response to the first append of a principal with this key; call `run` if there is none.

        `run` also returns whether everything was appended; if not, a repeat appends the rest.
        """
        hashed, digest = _hash(b"append", principal_id.encode(), check_key(key).encode()), _hash(request)
        async with self._exclusively(hashed):
            if (stored := self._stored_response(hashed, digest)) is not None:
                return stored
            response, is_complete = await run()
            if is_complete and len(response.body) <= RESPONSE_BYTES_MAX:
                await self._store_response(hashed, digest, response)
            return response

    @asynccontextmanager
    async def _exclusively(self, hashed: bytes) -> AsyncIterator[None]:
        """Wait until no other request of this process uses the key."""
        while (running := self._running.get(hashed)) is not None:
            await asyncio.wait((running,))
        future = self._running[hashed] = asyncio.get_running_loop().create_future()
        try:
            yield
        finally:
            del self._running[hashed]
            future.cancel()

    async def _store_response(self, hashed: bytes, digest: bytes, response: EncodedResponse) -> None:
        now_ms, prune = self._clock.now_ms(), self._is_prune_due()

        def insert(connection: apsw.Connection) -> None:
            if prune:
                _prune(connection, now_ms - self._keep_ms, self._keys_max)
            row = (hashed, digest, now_ms, response.status, response.body)
            connection.execute(
                "INSERT OR REPLACE INTO answered (key, request, at, status, body) VALUES (?, ?, ?, ?, ?)", row
            )

        try:
            await asyncio.shield(self._database.change(insert, synced=False))
        except TidebookError as error:  # not raised: the events are appended, and the client must learn that
            logger.warning("the response for an Idempotency-Key could not be stored: %s", error)

    def _is_prune_due(self) -> bool:
        self._begun += 1
        return self._begun % 100 == 1

    async def _run(self, hashed: bytes, run: Callable[[], Awaitable[EncodedResponse]]) -> EncodedResponse:
        try:
            response = await run()
        except OutcomeUnknown:
            raise
        except TidebookError:  # refused, or done in part (`Call.has_parts`): a repeat runs again
            await self._change("DELETE FROM answered WHERE key = ?", (hashed,))
            raise
        if len(response.body) <= RESPONSE_BYTES_MAX:
            sql = "UPDATE answered SET status = ?, body = ? WHERE key = ?"
            try:
                await self._change(sql, (response.status, response.body, hashed))
            except TidebookError as error:  # not raised: the change was made, and the client must learn that
                logger.warning("the response for an Idempotency-Key could not be stored: %s", error)
        return response

    def _stored_response(self, hashed: bytes, digest: bytes) -> EncodedResponse | None:
        rows = self._database.select("SELECT request, at, status, body FROM answered WHERE key = ?", (hashed,))
        if not rows or rows[0][1] < self._clock.now_ms() - self._keep_ms:
            return None
        request, _, status, body = rows[0]
        if request != digest:
            raise InvalidInput("this Idempotency-Key was used for a different request: use a new key for each request")
        if status is None:
            raise OutcomeUnknown(
                "the first request with this Idempotency-Key was interrupted, or is still running on another server: "
                "check whether it has taken effect"
            )
        return EncodedResponse(status, body or b"", replayed=True)

    async def _begin(self, hashed: bytes, digest: bytes) -> bool:
        """Store a key before its request runs; return False if another server of the book has already stored it."""
        now_ms, prune = self._clock.now_ms(), self._is_prune_due()

        def insert(connection: apsw.Connection) -> bool:
            if prune:
                _prune(connection, now_ms - self._keep_ms, self._keys_max)
            connection.execute("DELETE FROM answered WHERE key = ? AND at < ?", (hashed, now_ms - self._keep_ms))
            row = (hashed, digest, now_ms)
            connection.execute("INSERT OR IGNORE INTO answered (key, request, at) VALUES (?, ?, ?)", row)
            return connection.changes() == 1

        inserted: bool = await self._database.change(insert)
        return inserted

    async def _change(self, sql: str, bindings: tuple[Any, ...]) -> None:
        # Not synced: after a power failure a repeat gets `outcome-unknown`, which is correct.
        await asyncio.shield(self._database.change(lambda connection: connection.execute(sql, bindings), synced=False))


def _prune(connection: apsw.Connection, before_ms: int, keys_max: int) -> None:
    """Delete keys that are too old, and the oldest ones if there are too many."""
    sql = "DELETE FROM answered WHERE key IN (SELECT key FROM answered WHERE at < ? ORDER BY at LIMIT ?)"
    connection.execute(sql, (before_ms, _PRUNE_ROWS))
    count: int = connection.execute("SELECT count(*) FROM answered").get
    if count > keys_max:
        sql = "DELETE FROM answered WHERE key IN (SELECT key FROM answered ORDER BY at LIMIT ?)"
        connection.execute(sql, (count - keys_max,))


def _hash(*parts: bytes) -> bytes:
    return blake2b(b"\0".join(parts), digest_size=32).digest()
