"""The queue store in `queue.db`, for the processes of one machine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any

import apsw
import msgspec

from tidebook.core.errors import InvalidInput
from tidebook.queue.port import (
    Claimed,
    Counts,
    DeadLetterRow,
    Due,
    Failure,
    LeasedEntry,
    MaintenanceResult,
    NewEntry,
    Outcome,
    Put,
    QueueRef,
    QueueSettings,
    Step,
    WaitingEntry,
    WakeRequest,
)
from tidebook.queue.sqlite import reads
from tidebook.queue.sqlite.catalog import QueueCatalog, QueueRequest, ref_of
from tidebook.queue.sqlite.claims import ClaimHold, SqliteClaim, SqliteClaims
from tidebook.queue.sqlite.dead_letters import Edit, SqliteDeadLetters
from tidebook.queue.sqlite.expired_leases import ExpiredLeases, Failed
from tidebook.queue.sqlite.feed_marks import PutOnce, SqliteFeedMarks, marks
from tidebook.queue.sqlite.puts import NewEntries, Puts
from tidebook.queue.sqlite.tables import FILE, SCHEMA, channel_of
from tidebook.runtime.clock import Clock, SystemClock
from tidebook.runtime.metrics import Metrics
from tidebook.sqlite.shared_files import SharedFile
from tidebook.sqlite.writer import WriteTransaction


class SqliteQueues:
    """All queues of a folder, which several processes may open. The machine's clock is the store's clock."""

    takes_transactions = False

    def __init__(self, folder: str | Path, *, clock: Clock | None = None, metrics: Metrics | None = None) -> None:
        self._file = SharedFile.open(folder, FILE, SCHEMA, metrics=metrics)
        self._writer = self._file.writer
        self._clock = clock or SystemClock()
        self._puts = Puts(self._clock).run
        self._claims = SqliteClaims(self._clock)
        self._expired_leases = ExpiredLeases(self._clock)
        self._catalog = QueueCatalog(self._clock)
        self._dead_letters = SqliteDeadLetters(self._clock)
        self._marks = SqliteFeedMarks(self._clock)
        self._listeners: dict[int, asyncio.Task[None]] = {}
        self._wake_requests: asyncio.Queue[WakeRequest] = asyncio.Queue()
        self._closed = False

    async def queue(self, name: str, settings: QueueSettings | None = None) -> QueueRef:
        """Return a queue by name, created if it is missing; `settings`, if given, replace the stored ones."""
        found = self._select("SELECT id, name, settings FROM queue WHERE name = ?", (name,))
        if found and (settings is None or ref_of(found[0]).settings == settings):
            return ref_of(found[0])
        ref: QueueRef = await self._writer.run(self._catalog.open, QueueRequest(name, settings))
        return ref

    async def declare(self, queue: QueueRef, fields: bytes) -> QueueRef:
        """Bind a queue to a declaration of its fields; each entry stores the number of its declaration."""
        number: int = await self._writer.run(self._catalog.declare, (queue.id, fields))
        return msgspec.structs.replace(queue, format=number)

    async def queues(self) -> list[QueueRef]:
        """Return all queues, by name."""
        return [ref_of(row) for row in self._select("SELECT id, name, settings FROM queue ORDER BY name", ())]

    async def put(self, queue: QueueRef, entries: Sequence[NewEntry], *, inserted_at: int) -> Put:
        """Add entries in one transaction; merge an entry whose key is already waiting into the waiting one."""
        size_bytes = sum(len(entry.data) for entry in entries)
        put: Put = await self._writer.run(self._puts, NewEntries(queue, entries, inserted_at), size_bytes)
        return put

    async def put_once(
        self, queue: QueueRef, entries: Sequence[NewEntry], *, inserted_at: int, source: str, steps: Sequence[Step]
    ) -> Put | None:
        """Put, and move the marks of a source in the same transaction; return None if a mark has moved."""
        size_bytes = sum(len(entry.data) for entry in entries)
        call = PutOnce(NewEntries(queue, entries, inserted_at), source, steps)
        put: Put | None = await self._writer.run(self._marks.put, call, size_bytes)
        return put

    async def marks(self, queue: QueueRef, source: str) -> dict[int, str]:
        """Return the mark of each part of a source."""
        found: dict[int, str] = self._read(marks, queue, source)
        return found

    def put_within(
        self, transaction: object, queue: QueueRef, entries: Sequence[NewEntry], *, inserted_at: int
    ) -> Put | Awaitable[Put]:
        """Raise InvalidInput: a caller's transaction cannot include the folder's files."""
        raise InvalidInput("a queue in a folder cannot join your transaction: use PostgreSQL")

    async def claim(
        self, queue: QueueRef, *, limit: int, lease_ms: int, token: bytes, together: bool = True
    ) -> list[Claimed]:
        """Claim due entries in order of priority, process date and age; slow entries are never claimed with others."""
        claimed: list[Claimed] = await self._writer.run(self._claims.claim, SqliteClaim(queue, limit, lease_ms, token))
        return claimed

    async def heartbeat(self, queue: QueueRef, held: Sequence[LeasedEntry], *, lease_ms: int) -> dict[LeasedEntry, int]:
        """Extend leases; return the entries that are still held, with the new end of their lease."""
        extended: dict[LeasedEntry, int] = await self._writer.run(
            self._claims.heartbeat, ClaimHold(queue, held, lease_ms)
        )
        return extended

    async def finish(self, queue: QueueRef, held: Sequence[LeasedEntry]) -> set[LeasedEntry]:
        """Delete finished entries; return those that were still held."""
        finished: set[LeasedEntry] = await self._writer.run(self._claims.finish, ClaimHold(queue, held))
        return finished

    async def fail(self, queue: QueueRef, failures: Sequence[Failure]) -> list[Outcome]:
        """Return entries to the queue, merge them into a waiting one of their key, or make dead letters of them."""
        outcomes: list[Outcome] = await self._writer.run(self._expired_leases.fail, Failed(queue, failures))
        return outcomes

    async def due(self, queues: Sequence[QueueRef]) -> list[Due]:
        """Return, for each queue, when it next has work."""
        now_ms = self._clock.now_ms()
        return [self._read(reads.due, queue, now_ms) for queue in queues]

    async def sleep(self, sleeper: bytes, until: Mapping[int, tuple[int, bool]]) -> None:
        """Listen to the wake-up channels of these queues."""
        for queue in until:
            if queue not in self._listeners:
                self._listeners[queue] = asyncio.create_task(self._listen(queue))

    async def awake(self, sleeper: bytes, queues: Sequence[int]) -> None:
        """Stop listening to the wake-up channels of these queues."""
        for queue in queues:
            task = self._listeners.pop(queue, None)
            if task is not None:
                task.cancel()

    async def still_asleep(self, sleeper: bytes) -> None:
        """Do nothing: a locked file in the folder shows that this process listens."""

    async def wakes(self) -> AsyncIterator[WakeRequest]:
        """Yield a request for each queue that was written while this process listened."""
        yield WakeRequest(0, None)
        while True:
            yield await self._wake_requests.get()

    async def sweep(self, queue: QueueRef) -> MaintenanceResult:
        """Expire leases and entries."""
        swept: MaintenanceResult = await self._writer.run(self._expired_leases.sweep, queue)
        return swept

    async def entries(self, queue: QueueRef, *, limit: int) -> list[WaitingEntry]:
        """Return the first entries in claim order, those being processed first."""
        found: list[WaitingEntry] = self._read(reads.entries, queue, self._clock.now_ms(), limit)
        return found

    async def counts(self, queue: QueueRef) -> Counts:
        """Return the number of entries, by state."""
        found: Counts = self._read(reads.counts, queue, self._clock.now_ms())
        return found

    async def flags(self, queue: QueueRef | None = None, *, limit: int = 100) -> list[DeadLetterRow]:
        """Return dead letters, newest first."""
        found: list[DeadLetterRow] = self._read(reads.flags, queue, limit)
        return found

    async def retry(self, queue: QueueRef, flag: int) -> bool:
        """Put a dead letter back as a new entry; return False if the queue has no dead letter of this id."""
        return bool(await self._writer.run(self._dead_letters.retry, (queue, flag)))

    async def edit(self, queue: QueueRef, flag: int, kind: int, data: bytes) -> bool:
        """Replace a dead letter's user data; return False if the queue has no dead letter of this id."""
        return bool(await self._writer.run(self._dead_letters.edit, Edit(queue, flag, kind, data)))

    async def drop(self, queue: QueueRef, flag: int) -> bool:
        """Delete a dead letter; return False if the queue has no dead letter of this id."""
        return bool(await self._writer.run(self._dead_letters.drop, (queue, flag)))

    async def unannounced(self, *, limit: int = 100, hold_ms: int = 0) -> list[DeadLetterRow]:
        """Return dead letters that no hook has reported yet, and reserve them for the caller for `hold_ms`."""
        if not self._read(reads.any_unannounced, self._clock.now_ms()):
            return []
        found: list[DeadLetterRow] = await self._writer.run(self._dead_letters.unannounced, (limit, hold_ms))
        return found

    async def announced(self, flags: Sequence[int]) -> None:
        """Mark dead letters as reported."""
        await self._writer.run(self._dead_letters.announced, list(flags))

    async def close(self) -> None:
        """Finish the writes in flight, then release the file."""
        if self._closed or self._file.database.forked:
            return
        self._closed = True
        await self.awake(b"", list(self._listeners))
        await self._writer.run(_no_change, None)
        await asyncio.to_thread(self._file.release)

    async def _listen(self, queue: int) -> None:
        wakeups, channel = self._file.wakeups, channel_of(queue)
        while True:
            count = wakeups.count(channel)
            await wakeups.wait(channel, since=count)
            if wakeups.count(channel) != count:
                self._wake_requests.put_nowait(WakeRequest(queue, None))

    def _read(self, query: Any, *arguments: Any) -> Any:
        try:
            with self._file.database.reading() as connection:
                return query(connection, *arguments)
        except apsw.Error as error:
            raise self._file.database.failure(error) from error

    def _select(self, sql: str, parameters: tuple[Any, ...]) -> list[Any]:
        return self._read(lambda connection: connection.execute(sql, parameters).fetchall())  # type: ignore[no-any-return]


def _no_change(session: WriteTransaction, calls: Sequence[None]) -> list[None]:
    """Change nothing: the writer answers once all earlier writes are committed."""
    return [None] * len(calls)
