"""The audit: every call that changes or unmasks something, as an event of topic `tidebook-audit`, hash-chained.

Each server process writes a separate chain, which is one journal, so that servers never conflict. Entries are appended
in groups, each with one hash. A call that destroys or unmasks something waits until its entry is durable; a crash may
lose the entries of other calls.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections import deque
from datetime import UTC, datetime
from itertools import islice
from typing import Any, Final

import apsw

from tidebook.core.errors import OutcomeUnknown, TidebookError, TooLarge, Unavailable
from tidebook.core.event import Event
from tidebook.core.payload import EncodedJson
from tidebook.runtime.backoff import Backoff
from tidebook.server.audit_entry import AUDIT_TOPIC, GENESIS, TARGET_CHARS_MAX, AuditEntry, encode_group
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


class Audit:
    """Writes the chain of this process."""

    def __init__(self, book: Book, database: ServerDatabase) -> None:
        self._book = book
        self._database = database
        self._id = ""
        #: The number of the latest entry.
        self._n = 0
        #: The hash of the latest group that was written.
        self._hash = GENESIS
        self._waiting: deque[AuditEntry] = deque()
        #: The calls that wait until an entry is durable, each with the number of that entry.
        self._awaited: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._wanted = asyncio.Event()
        self._urgent = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closing = False

    @property
    def chain(self) -> str:
        """The id of this process's chain; empty before its first entry."""
        return self._id

    def check_room(self) -> None:
        """Raise `Unavailable` if too many entries wait to be written, because no change may go unrecorded."""
        if len(self._waiting) >= WAITING_MAX:
            raise Unavailable(
                f"{WAITING_MAX:,} entries of the audit wait to be written: until then changes are refused"
            )

    def record(self, who: Principal, client: str, action: str, target: str, status: int) -> None:
        """Record a call; its entry becomes durable soon."""
        self._put(who.name, who.role.label, client, action, target[:TARGET_CHARS_MAX], status, who.id)

    async def record_durably(
        self, who: Principal, client: str, action: str, target: str, status: int, *, unmask: bool = False
    ) -> None:
        """Record a call, and return when its entry is durable."""
        self._put(who.name, who.role.label, client, action, target[:TARGET_CHARS_MAX], status, who.id, unmask)
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._awaited.append((self._n, written))
        self._urgent.set()
        await asyncio.shield(written)

    def _put(self, *fields: Any) -> None:
        """Add an entry with these fields, which follow its number and its time."""
        if self._task is None:
            self._begin()
        self._n += 1
        self._waiting.append(AuditEntry(self._n, self._book.clock.now_ms(), *fields))
        if not self._wanted.is_set():
            self._wanted.set()

    def _begin(self) -> None:
        """Start a chain; its first entry names the ends of earlier ones, so that removing them is noticed."""
        now = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
        self._id = f"{now}-{socket.gethostname()[:60]}-{os.getpid()}-{secrets.token_hex(4)}"
        rows = self._database.select("SELECT id, entries, hash FROM chain ORDER BY id DESC LIMIT ?", (PREVIOUS_MAX,))
        previous = [{"id": id, "entries": entries, "hash": hash_} for id, entries, hash_ in rows]
        self._task = asyncio.create_task(self._write_groups())
        self._put(*_own_call("server.start"), "", False, {"previous": previous})

    async def close(self) -> None:
        """Write the waiting entries and the end of the chain."""
        if self._task is None:
            return
        self._closing = True
        self._put(*_own_call("server.stop"))
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
        group = list(islice(self._waiting, count))
        payloads, found = encode_group(group, self._hash)
        if not await self._append([Event(EncodedJson(each)) for each in payloads]):
            return False
        self._hash = found
        for _ in group:
            self._waiting.popleft()
        n = group[-1].n
        while self._awaited and self._awaited[0][0] <= n:
            _, written = self._awaited.popleft()
            if not written.done():
                written.set_result(None)
        await self._write_end(n)
        return True

    async def _append(self, events: list[Event]) -> bool:
        """Append, and retry until it is known to have succeeded; the append id prevents a second copy.

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

    async def _write_end(self, n: int) -> None:
        row = (self._id, n, self._hash)
        sql = "INSERT OR REPLACE INTO chain (id, entries, hash) VALUES (?, ?, ?)"

        def insert(connection: apsw.Connection) -> None:
            connection.execute(sql, row)

        try:
            await self._database.change(insert, synced=False)
        except TidebookError as error:  # the chain itself is written; only its tail is not protected yet
            logger.warning("the end of the audit's chain is not written: %s", error)


def _own_call(action: str) -> tuple[str, str, str, str, str, int]:
    """Return the first fields of an entry that the server adds by itself."""
    return "server", "", "", action, "", 0
