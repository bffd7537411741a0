"""The queue store in `queue.db`, for the processes of one machine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

import apsw
import msgspec

from tidebook.core.errors import InvalidInput
from tidebook.queue.browse import EntryPlace
from tidebook.queue.port import (
    WORKER_FORGOTTEN_MS,
    Claimed,
    Counts,
    DeadLetterRow,
    Due,
    Failure,
    FinishingClaim,
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
    WorkerReport,
)
from tidebook.queue.sql_browser import SqlBrowser
from tidebook.queue.sqlite import browse, claims, dead_letters, expired_leases, puts, reads
from tidebook.queue.sqlite.tables import FILE, SCHEMA, channel_of
from tidebook.runtime.clock import Clock, SystemClock
from tidebook.runtime.metrics import Metrics
from tidebook.sqlite.shared_files import SharedFile
from tidebook.sqlite.writer import WriteTransaction, unsynced

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
_Call = tuple[Callable[..., Any], tuple[Any, ...]]
_REPORT_WORKER = """INSERT INTO worker (queue, id, name, concurrency, running, done, failed, started_at, reported_at)
    VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?8) ON CONFLICT DO UPDATE SET name = excluded.name,
    concurrency = excluded.concurrency, running = excluded.running, done = excluded.done, failed = excluded.failed,
    reported_at = excluded.reported_at"""
_decode = msgspec.json.Decoder(QueueSettings).decode


class SqliteQueues(SqlBrowser):
    """All queues of a folder, which several processes may open. The machine's clock is the store's clock."""

    takes_transactions = False
    _statements = browse.STATEMENTS

    def __init__(self, folder: str | Path, *, clock: Clock | None = None, metrics: Metrics | None = None) -> None:
        self._file = SharedFile.open(folder, FILE, SCHEMA, metrics=metrics)
        self._writer = self._file.writer
        self._clock = clock or SystemClock()
        self._listeners: dict[int, asyncio.Task[None]] = {}
        self._wake_requests: asyncio.Queue[WakeRequest] = asyncio.Queue()
        self._closed = False

    async def queue(self, name: str, settings: QueueSettings | None = None) -> QueueRef:
        rows = self._rows("SELECT id, name, settings FROM queue WHERE name = ?", (name,))
        if rows and (settings is None or _ref(rows[0]).settings == settings):
            return _ref(rows[0])
        return await self._write(_open_queue, name, settings)

    async def queues(self) -> list[QueueRef]:
        return [_ref(row) for row in self._rows("SELECT id, name, settings FROM queue ORDER BY name", ())]

    async def declare(self, queue: QueueRef, fields: bytes) -> QueueRef:
        return msgspec.structs.replace(queue, format=await self._write(_declare, queue, fields))

    async def put(self, queue: QueueRef, entries: Sequence[NewEntry], *, inserted_at: int) -> Put:
        return await self._write(puts.put, queue, entries, inserted_at, size_bytes=_size_bytes(entries))

    async def put_once(
        self, queue: QueueRef, entries: Sequence[NewEntry], *, inserted_at: int, source: str, steps: Sequence[Step]
    ) -> Put | None:
        size_bytes = _size_bytes(entries)
        return await self._write(puts.put_once, queue, entries, inserted_at, source, steps, size_bytes=size_bytes)

    async def marks(self, queue: QueueRef, source: str) -> dict[int, str]:
        return self._read(puts.marks, queue, source)

    def put_within(
        self, transaction: object, queue: QueueRef, entries: Sequence[NewEntry], *, inserted_at: int
    ) -> Put | Awaitable[Put]:
        """Raise InvalidInput: a caller's transaction cannot include the folder's files."""
        raise InvalidInput("a queue in a folder cannot join your transaction: use PostgreSQL")

    async def claim(
        self, queue: QueueRef, limits: Mapping[bytes, int], *, lease_ms: int, together: bool = True
    ) -> list[Claimed]:
        claimed: list[Claimed] = await self._writer.run(self._run_unsynced, (claims.claim, (queue, limits, lease_ms)))
        return claimed

    async def pause(self, queue: QueueRef) -> int:
        return await self._write(_pause, queue)

    async def resume(self, queue: QueueRef) -> bool:
        return await self._write(_resume, queue)

    async def paused_at(self, queue: QueueRef) -> int | None:
        return self._read(reads.paused_at, queue)

    async def report_worker(self, queue: QueueRef, report: WorkerReport) -> None:
        await self._writer.run(self._run_unsynced, (_report_worker, (queue, report)))

    async def remove_worker(self, queue: QueueRef, id: bytes) -> None:
        await self._writer.run(self._run_unsynced, (_remove_worker, (queue, id)))

    async def heartbeat(self, queue: QueueRef, held: Sequence[LeasedEntry], *, lease_ms: int) -> dict[LeasedEntry, int]:
        call = (claims.heartbeat, (held, lease_ms))
        extended: dict[LeasedEntry, int] = await self._writer.run(self._run_unsynced, call)
        return extended

    async def finish(self, queue: QueueRef, held: Sequence[LeasedEntry]) -> set[LeasedEntry]:
        return await self._write(claims.finish, queue, held)

    async def finish_and_claim(
        self, queue: QueueRef, calls: Sequence[FinishingClaim], *, lease_ms: int, together: bool = True
    ) -> tuple[Set[LeasedEntry], list[Claimed]]:
        return await self._write(claims.finish_and_claim, queue, calls, lease_ms)

    async def fail(self, queue: QueueRef, failures: Sequence[Failure]) -> list[Outcome]:
        return await self._write(expired_leases.fail, queue, failures)

    async def due(self, queues: Sequence[QueueRef]) -> list[Due]:
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
        return await self._write(expired_leases.sweep, queue)

    async def entries(self, queue: QueueRef, *, limit: int) -> list[WaitingEntry]:
        return self._read(reads.entries, queue, self._clock.now_ms(), limit)

    async def counts(self, queue: QueueRef) -> Counts:
        return self._read(reads.counts, queue, self._clock.now_ms())

    async def dead_letters(self, queue: QueueRef | None = None, *, limit: int = 100) -> list[DeadLetterRow]:
        return self._read(dead_letters.newest, queue, limit)

    async def remove(self, queue: QueueRef, places: Sequence[EntryPlace]) -> int:
        return await self._write(browse.remove, queue, places)

    async def retry_all(self, queue: QueueRef, ids: Sequence[int]) -> int:
        return await self._write(dead_letters.retry_all, queue, ids)

    async def drop_all(self, queue: QueueRef, ids: Sequence[int]) -> int:
        return await self._write(dead_letters.drop_all, queue, ids)

    async def retry(self, queue: QueueRef, id: int) -> bool:
        return await self.retry_all(queue, [id]) == 1

    async def edit(self, queue: QueueRef, id: int, kind: int, data: bytes) -> bool:
        return await self._write(dead_letters.edit, queue, id, kind, data)

    async def drop(self, queue: QueueRef, id: int) -> bool:
        return await self.drop_all(queue, [id]) == 1

    async def unannounced(self, *, limit: int = 100, hold_ms: int = 0) -> list[DeadLetterRow]:
        if not self._read(dead_letters.any_unannounced, self._clock.now_ms()):
            return []
        return await self._write(dead_letters.unannounced, limit, hold_ms)

    async def announced(self, ids: Sequence[int]) -> None:
        await self._write(dead_letters.announced, ids)

    async def close(self) -> None:
        if self._closed or self._file.database.forked:
            return
        self._closed = True
        await self.awake(b"", list(self._listeners))
        await self._write(lambda session, now_ms: None)  # it returns once all earlier writes are committed
        await asyncio.to_thread(self._file.release)

    async def _write(
        self, function: Callable[[WriteTransaction, int, *Ts], T], *arguments: *Ts, size_bytes: int = 0
    ) -> T:
        """Call a function in the writer thread, with its transaction, the time and these arguments."""
        result: T = await self._writer.run(self._run, (function, arguments), size_bytes)
        return result

    def _run(self, session: WriteTransaction, calls: Sequence[_Call]) -> list[Any]:
        return [function(session, self._clock.now_ms(), *arguments) for function, arguments in calls]

    @unsynced  # safe for claims, heartbeats and reports: a power cut that loses one also ends the process that made it
    def _run_unsynced(self, session: WriteTransaction, calls: Sequence[_Call]) -> list[Any]:
        return self._run(session, calls)

    async def _listen(self, queue: int) -> None:
        wakeups, channel = self._file.wakeups, channel_of(queue)
        while True:
            count = wakeups.count(channel)
            await wakeups.wait(channel, since=count)
            if wakeups.count(channel) != count:
                self._wake_requests.put_nowait(WakeRequest(queue, None))

    def _read(self, query: Callable[[apsw.Connection, *Ts], T], *arguments: *Ts) -> T:
        try:
            with self._file.database.reading() as connection:
                return query(connection, *arguments)
        except apsw.Error as error:
            raise self._file.database.failure(error) from error

    def _rows(self, sql: str, parameters: tuple[Any, ...] | dict[str, Any]) -> list[Any]:
        return self._read(lambda connection: connection.execute(sql, parameters).fetchall())

    async def _select(self, sql: str, queue: QueueRef, **parameters: object) -> list[Any]:
        return self._rows(sql, {"queue": queue.id, "now": self._clock.now_ms(), **parameters})

    async def _time_ms(self) -> int:
        return self._clock.now_ms()


def _open_queue(session: WriteTransaction, now_ms: int, name: str, settings: QueueSettings | None) -> QueueRef:
    """Create or find a queue; settings that are given replace the stored ones."""
    execute = session.connection.execute
    encoded = msgspec.json.encode(settings or QueueSettings())
    execute("INSERT INTO queue (name, settings) VALUES (?, ?) ON CONFLICT DO NOTHING", (name, encoded))
    if settings is not None:
        execute("UPDATE queue SET settings = ? WHERE name = ?", (encoded, name))
    found: Any = execute("SELECT id, name, settings FROM queue WHERE name = ?", (name,)).fetchone()
    return _ref(found)


def _pause(session: WriteTransaction, now_ms: int, queue: QueueRef) -> int:
    sql = "UPDATE queue SET paused_at = coalesce(paused_at, ?) WHERE id = ? RETURNING paused_at"
    paused_at: int = session.connection.execute(sql, (now_ms, queue.id)).get
    return paused_at


def _resume(session: WriteTransaction, now_ms: int, queue: QueueRef) -> bool:
    sql = "UPDATE queue SET paused_at = NULL WHERE id = ? AND paused_at IS NOT NULL"
    session.connection.execute(sql, (queue.id,))
    session.channels.add(channel_of(queue.id))
    return session.connection.changes() > 0


def _declare(session: WriteTransaction, now_ms: int, queue: QueueRef, fields: bytes) -> int:
    """Return the number of a declaration; a known declaration keeps its number."""
    execute = session.connection.execute
    found: Any = execute(
        "SELECT max(format), max(format) FILTER (WHERE fields = ?) FROM declaration WHERE queue = ?", (fields, queue.id)
    ).fetchone()
    newest, number = found
    if number is None:
        number = (newest or 0) + 1
        execute("INSERT INTO declaration VALUES (?, ?, ?, ?)", (queue.id, number, fields, now_ms))
    return int(number)


def _report_worker(session: WriteTransaction, now_ms: int, queue: QueueRef, report: WorkerReport) -> None:
    forget = "DELETE FROM worker WHERE queue = ? AND reported_at < ?"
    session.connection.execute(forget, (queue.id, now_ms - WORKER_FORGOTTEN_MS))
    session.connection.execute(_REPORT_WORKER, (queue.id, *msgspec.structs.astuple(report), now_ms))


def _remove_worker(session: WriteTransaction, now_ms: int, queue: QueueRef, id: bytes) -> None:
    session.connection.execute("DELETE FROM worker WHERE queue = ? AND id = ?", (queue.id, id))


def _ref(row: tuple[int, str, bytes]) -> QueueRef:
    id, name, settings = row
    return QueueRef(id, name, _decode(settings))


def _size_bytes(entries: Sequence[NewEntry]) -> int:
    return sum(len(entry.data) for entry in entries)
