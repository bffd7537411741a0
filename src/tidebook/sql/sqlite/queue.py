"""The queue on one machine, in `queue.db` of a folder."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any

import apsw
import msgspec

from tidebook.core.clock import Clock, SystemClock
from tidebook.core.errors import InvalidInput
from tidebook.core.metrics import Metrics
from tidebook.folder.opened import File
from tidebook.folder.writer import Session
from tidebook.sql.port.queue import (
    Claimed,
    Counts,
    Due,
    Failure,
    Flag,
    Held,
    NewEntry,
    Outcome,
    Put,
    QueueRef,
    QueueSettings,
    Step,
    Swept,
    Waiting,
    Wake,
)
from tidebook.sql.sqlite import queue_looks as looks
from tidebook.sql.sqlite.queue_claims import Claim, Claims, Hold
from tidebook.sql.sqlite.queue_flags import Edit, Letters, Wanted, open_queues, ref_of
from tidebook.sql.sqlite.queue_marks import Marks, Once, marks
from tidebook.sql.sqlite.queue_puts import NewEntries, Puts
from tidebook.sql.sqlite.queue_runouts import Failed, RunOuts
from tidebook.sql.sqlite.queue_tables import FILE, SCHEMA, channel_of


class SqliteQueues:
    """All queues of a folder, which several processes may have open. The machine's clock is the store's."""

    takes_transactions = False

    def __init__(self, folder: str | Path, *, clock: Clock | None = None, metrics: Metrics | None = None) -> None:
        self._file = File.open(folder, FILE, SCHEMA, metrics=metrics)
        self._writer = self._file.writer
        self._clock = clock or SystemClock()
        self._puts = Puts(self._clock).run
        self._claims = Claims(self._clock)
        self._run_outs = RunOuts(self._clock)
        self._letters = Letters(self._clock)
        self._marks = Marks(self._clock)
        self._asleep: dict[int, asyncio.Task[None]] = {}
        self._woken: asyncio.Queue[Wake] = asyncio.Queue()
        self._closed = False

    async def queue(self, name: str, settings: QueueSettings | None = None) -> QueueRef:
        """A queue by name, made where it is missing; settings that are given replace the ones that are kept."""
        found = self._select("SELECT id, name, settings FROM queue WHERE name = ?", (name,))
        if found and (settings is None or ref_of(found[0]).settings == settings):
            return ref_of(found[0])
        ref: QueueRef = await self._writer.run(open_queues, Wanted(name, settings))
        return ref

    async def declare(self, queue: QueueRef, fields: bytes) -> QueueRef:
        """Bind a queue to a declaration of its fields; entries carry the number of theirs."""
        number: int = await self._writer.run(self._letters.declare, (queue.id, fields))
        return msgspec.structs.replace(queue, format=number)

    async def queues(self) -> list[QueueRef]:
        """All queues, by name."""
        return [ref_of(row) for row in self._select("SELECT id, name, settings FROM queue ORDER BY name", ())]

    async def put(self, queue: QueueRef, entries: Sequence[NewEntry], *, inserted_at: int) -> Put:
        """Add entries in one transaction; one whose key waits already is merged into the waiting one."""
        size_bytes = sum(len(entry.data) for entry in entries)
        put: Put = await self._writer.run(self._puts, NewEntries(queue, entries, inserted_at), size_bytes)
        return put

    async def put_once(
        self, queue: QueueRef, entries: Sequence[NewEntry], *, inserted_at: int, source: str, steps: Sequence[Step]
    ) -> Put | None:
        """`put`, and in the same transaction the marks of a source move on; None where one has moved."""
        size_bytes = sum(len(entry.data) for entry in entries)
        once = Once(NewEntries(queue, entries, inserted_at), source, steps)
        put: Put | None = await self._writer.run(self._marks.put, once, size_bytes)
        return put

    async def marks(self, queue: QueueRef, source: str) -> dict[int, str]:
        """Where the parts of a source stand."""
        found: dict[int, str] = self._look(marks, queue, source)
        return found

    def put_within(
        self, transaction: object, queue: QueueRef, entries: Sequence[NewEntry], *, inserted_at: int
    ) -> Put | Awaitable[Put]:
        """Refused: no transaction of the caller's reaches into the folder."""
        raise InvalidInput("a queue in a folder takes no part in your transaction: use PostgreSQL for it")

    async def claim(
        self, queue: QueueRef, *, limit: int, lease_ms: int, token: bytes, together: bool = True
    ) -> list[Claimed]:
        """Hand out due entries in order of priority, process date and age. Slow ones never come with others."""
        claimed: list[Claimed] = await self._writer.run(self._claims.claim, Claim(queue, limit, lease_ms, token))
        return claimed

    async def heartbeat(self, queue: QueueRef, held: Sequence[Held], *, lease_ms: int) -> dict[Held, int]:
        """Extend leases; the ones that are still held, with their new end."""
        kept: dict[Held, int] = await self._writer.run(self._claims.heartbeat, Hold(queue, held, lease_ms))
        return kept

    async def finish(self, queue: QueueRef, held: Sequence[Held]) -> set[Held]:
        """Delete entries; the ones that were still held."""
        finished: set[Held] = await self._writer.run(self._claims.finish, Hold(queue, held))
        return finished

    async def fail(self, queue: QueueRef, failures: Sequence[Failure]) -> list[Outcome]:
        """Return entries to wait, merge them into a waiting one of their key, or make dead letters of them."""
        outcomes: list[Outcome] = await self._writer.run(self._run_outs.fail, Failed(queue, failures))
        return outcomes

    async def due(self, queues: Sequence[QueueRef]) -> list[Due]:
        """When something becomes due, queue by queue."""
        now_ms = self._clock.now_ms()
        return [self._look(looks.due, queue, now_ms) for queue in queues]

    async def sleep(self, sleeper: bytes, until: Mapping[int, tuple[int, bool]]) -> None:
        """Listen to these queues: a ping tells that something was put."""
        for queue in until:
            if queue not in self._asleep:
                self._asleep[queue] = asyncio.create_task(self._hear(queue))

    async def awake(self, sleeper: bytes, queues: Sequence[int]) -> None:
        """Listen to these no more."""
        for queue in queues:
            task = self._asleep.pop(queue, None)
            if task is not None:
                task.cancel()

    async def still_asleep(self, sleeper: bytes) -> None:
        """A locked file in the folder says so."""

    async def wakes(self) -> AsyncIterator[Wake]:
        """What was put while this process slept."""
        yield Wake(0, None)
        while True:
            yield await self._woken.get()

    async def sweep(self, queue: QueueRef) -> Swept:
        """Notice leases that ran out and entries that expired."""
        swept: Swept = await self._writer.run(self._run_outs.sweep, queue)
        return swept

    async def entries(self, queue: QueueRef, *, limit: int) -> list[Waiting]:
        """The first entries in the order in which they would be handed out, those being processed first."""
        found: list[Waiting] = self._look(looks.entries, queue, self._clock.now_ms(), limit)
        return found

    async def counts(self, queue: QueueRef) -> Counts:
        """A queue in numbers."""
        found: Counts = self._look(looks.counts, queue, self._clock.now_ms())
        return found

    async def flags(self, queue: QueueRef | None = None, *, limit: int = 100) -> list[Flag]:
        """Dead letters, newest first."""
        found: list[Flag] = self._look(looks.flags, queue, limit)
        return found

    async def retry(self, queue: QueueRef, flag: int) -> bool:
        """Put a dead letter back as a new entry; False where the queue has none of this number."""
        return bool(await self._writer.run(self._letters.retry, (queue, flag)))

    async def edit(self, queue: QueueRef, flag: int, kind: int, data: bytes) -> bool:
        """Replace a dead letter's user data; False where the queue has none of this number."""
        return bool(await self._writer.run(self._letters.edit, Edit(queue, flag, kind, data)))

    async def drop(self, queue: QueueRef, flag: int) -> bool:
        """Delete a dead letter; False where the queue has none of this number."""
        return bool(await self._writer.run(self._letters.drop, (queue, flag)))

    async def unannounced(self, *, limit: int = 100, hold_ms: int = 0) -> list[Flag]:
        """Dead letters that no hook has been told of yet; for `hold_ms` they are the caller's alone to tell of."""
        if not self._look(looks.any_unannounced, self._clock.now_ms()):
            return []
        found: list[Flag] = await self._writer.run(self._letters.unannounced, (limit, hold_ms))
        return found

    async def announced(self, flags: Sequence[int]) -> None:
        """These were told."""
        await self._writer.run(self._letters.announced, list(flags))

    async def close(self) -> None:
        """Finish what was begun, then let go."""
        if self._closed:
            return
        self._closed = True
        await self.awake(b"", list(self._asleep))
        await self._writer.run(_nothing, None)
        await asyncio.to_thread(self._file.release)

    async def _hear(self, queue: int) -> None:
        pings, channel = self._file.pings, channel_of(queue)
        while True:
            heard = pings.count(channel)
            await pings.wait(channel, since=heard)
            if pings.count(channel) != heard:
                self._woken.put_nowait(Wake(queue, None))

    def _look(self, look: Any, *arguments: Any) -> Any:
        try:
            return look(self._file.database.reader(), *arguments)
        except apsw.Error as error:
            raise self._file.database.failure(error) from error

    def _select(self, sql: str, parameters: tuple[Any, ...]) -> list[Any]:
        return self._look(lambda connection: connection.execute(sql, parameters).fetchall())  # type: ignore[no-any-return]


def _nothing(session: Session, asked: Sequence[None]) -> list[None]:
    """Changes nothing: answered once all that was posted before it is done."""
    return [None] * len(asked)
