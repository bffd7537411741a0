"""The audit: every call that changes or unmasks something, as an event of topic `tidebook-audit`, hash-chained.

Each server process has a separate chain, the journal of its id, so that servers never conflict. Entries are appended
in groups; a destructive call waits until its entry is durable, others may lose theirs in a crash.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections import deque
from datetime import UTC, datetime
from typing import Any, Final

import apsw
import msgspec

from tidebook.core.errors import OutcomeUnknown, TidebookError, TooLarge, Unavailable
from tidebook.core.event import Event
from tidebook.core.payload import EncodedJson
from tidebook.runtime.backoff import Backoff
from tidebook.server.audit_entry import AUDIT_TOPIC, GENESIS, TARGET_CHARS_MAX, AuditEntry, hash_fields
from tidebook.server.database import ServerDatabase
from tidebook.server.principal import Principal
from tidebook.wiring.book import Book

logger = logging.getLogger("tidebook.server.audit")

#: How many entries may wait; calls that change something are refused while more are waiting.
WAITING_MAX: Final = 50_000
GROUP_MAX: Final = 500
#: How long entries that nobody waits for are collected.
COLLECT_S: Final = 0.05
CLOSE_S: Final = 10.0
#: How many ends of earlier chains the first entry names.
PREVIOUS_MAX: Final = 10

#: Fields of a waiting entry: at_ms, who, token, role, client, action, target, status, unmask, detail.
_Fields = tuple[int, str, str, str, str, str, str, int, bool, Any]
_encode = msgspec.json.Encoder().encode


class Audit:
    """Writes the chain of this process."""

    def __init__(self, book: Book, database: ServerDatabase) -> None:
        self._book = book
        self._database = database
        self._id = ""
        self._n = 0
        self._hash = GENESIS
        self._waiting: deque[tuple[_Fields, asyncio.Future[None] | None]] = deque()
        self._wanted = asyncio.Event()
        self._urgent = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closing = False

    @property
    def chain(self) -> str:
        """The id of this process's chain; empty before its first entry."""
        return self._id

    def check_room(self) -> None:
        """Raise `Unavailable` while the audit cannot be written, because no change may go unrecorded."""
        if len(self._waiting) >= WAITING_MAX:
            raise Unavailable(
                f"{WAITING_MAX:,} entries of the audit wait to be written: until then changes are refused"
            )

    def record(self, who: Principal, client: str, action: str, target: str, status: int) -> None:
        """Record a call; its entry becomes durable soon."""
        self._put(self._fields(who, client, action, target, status, False), None)

    async def record_durably(
        self, who: Principal, client: str, action: str, target: str, status: int, *, unmask: bool = False
    ) -> None:
        """Record a call, and return when its entry is durable."""
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._put(self._fields(who, client, action, target, status, unmask), written)
        self._urgent.set()
        await asyncio.shield(written)

    def _fields(self, who: Principal, client: str, action: str, target: str, status: int, unmask: bool) -> _Fields:
        now_ms = self._book.clock.now_ms()
        target = target[:TARGET_CHARS_MAX]
        return now_ms, who.name, who.id, who.role.label, client, action, target, status, unmask, None

    def _put(self, fields: _Fields, written: asyncio.Future[None] | None) -> None:
        if self._task is None:
            self._begin()
        self._waiting.append((fields, written))
        if not self._wanted.is_set():
            self._wanted.set()

    def _begin(self) -> None:
        """Start a chain; its first entry names the ends of earlier ones, so that removing them is noticed."""
        now = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
        self._id = f"{now}-{socket.gethostname()[:60]}-{os.getpid()}-{secrets.token_hex(4)}"
        rows = self._database.select("SELECT id, entries, hash FROM chain ORDER BY id DESC LIMIT ?", (PREVIOUS_MAX,))
        previous = [{"id": id, "entries": entries, "hash": hash_} for id, entries, hash_ in rows]
        self._task = asyncio.create_task(self._write_groups())
        self._put(self._own_fields("server.start", {"previous": previous}), None)

    def _own_fields(self, action: str, detail: Any) -> _Fields:
        return self._book.clock.now_ms(), "server", "", "", "", action, "", 0, False, detail

    async def close(self) -> None:
        """Write the waiting entries and the end of the chain."""
        if self._task is None:
            return
        self._closing = True
        self._put(self._own_fields("server.stop", None), None)
        self._urgent.set()
        try:
            await asyncio.wait_for(self._task, CLOSE_S)
        except TimeoutError:
            logger.warning("%d entries of the audit were not written", len(self._waiting))

    async def _write_groups(self) -> None:
        while True:
            if not self._waiting:
                if self._closing:
                    return
                self._wanted.clear()
                await self._wanted.wait()
            if not self._urgent.is_set():
                try:
                    await asyncio.wait_for(self._urgent.wait(), COLLECT_S)
                except TimeoutError:
                    pass
            self._urgent.clear()
            while self._waiting:
                await self._write_group()

    async def _write_group(self) -> None:
        count = min(GROUP_MAX, len(self._waiting))
        while not await self._write_first(count):
            count //= 2

    async def _write_first(self, count: int) -> bool:
        """Write the entries that have waited longest; return False if so many do not fit in a record."""
        group = [self._waiting[index] for index in range(count)]
        events, n, last = list[Event](), self._n, self._hash
        for fields, _ in group:
            n += 1
            entry, last = _entry(n, fields, last)
            events.append(Event(entry))
        if not await self._append(events):
            return False
        self._n, self._hash = n, last
        for _, written in group:
            self._waiting.popleft()
            if written is not None and not written.done():
                written.set_result(None)
        await self._write_end()
        return True

    async def _append(self, events: list[Event]) -> bool:
        """Append, and retry until it is known to have succeeded; the append id keeps a retry from a second copy.

        Return False if the events do not fit in a record, but fewer may.
        """
        journal = self._book.journal(AUDIT_TOPIC)
        retry: OutcomeUnknown | None = None
        backoff = Backoff(first_s=0.05, max_s=5.0)
        while True:
            try:
                await journal.append(self._id, events, retry=retry)
                return True
            except OutcomeUnknown as error:
                retry = error if error.append_id is not None else retry
                reason: TidebookError = error
            except TidebookError as error:
                if isinstance(error, TooLarge) and len(events) > 1:
                    return False
                reason = error
            pause_s = backoff.next_s()
            logger.warning("the audit is not written, next try in %.1f s: %s", pause_s, reason)
            await asyncio.sleep(pause_s)

    async def _write_end(self) -> None:
        row = (self._id, self._n, self._hash)
        sql = "INSERT OR REPLACE INTO chain (id, entries, hash) VALUES (?, ?, ?)"

        def insert(connection: apsw.Connection) -> None:
            connection.execute(sql, row)

        try:
            await self._database.change(insert, synced=False)
        except TidebookError as error:  # the chain itself is written; only its tail is not protected yet
            logger.warning("the end of the audit's chain is not written: %s", error)


def _entry(n: int, fields: _Fields, prev: str) -> tuple[EncodedJson, str]:
    """Return an entry, encoded as the payload of its event, and its hash."""
    found = hash_fields([n, *fields, prev])
    return EncodedJson(_encode(AuditEntry(n, *fields, prev, found))), found
