"""A queue: put, claim, heartbeat, done, fail, listen."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Iterable, Sequence
from contextlib import aclosing
from datetime import datetime, timedelta
from typing import Any, Final

from tidebook.core.errors import InvalidInput, LeaseLost, NotFound, TidebookError, TooLarge
from tidebook.core.gather import Gather
from tidebook.queue.entry import Date, Entry, chunks, duration_ms, encoded_data
from tidebook.queue.flag import DeadLetter
from tidebook.queue.job import Job
from tidebook.queue.listed import Listed, Status, list_limit
from tidebook.queue.priority import DEFAULT
from tidebook.queue.service import Service
from tidebook.queue.source import checked_steps, source_name
from tidebook.sql.port.queue import (
    ENTRIES_MAX,
    PUT_BYTES_MAX,
    Failure,
    Held,
    NewEntry,
    Outcome,
    Put,
    QueueRef,
    Step,
)

CLAIM_MAX: Final = 10_000
#: Claims of at most this many entries are gathered with those that come at the same time.
SMALL_CLAIM: Final = 10
_FINISHES_MAX: Final = 500


class Queue:
    """One queue of a book; it is made when it is first used."""

    def __init__(self, name: str, service: Service) -> None:
        self.name = name
        self._service = service
        self._finish: Gather[Held, bool] = Gather(self._finish_group, group_max=_FINISHES_MAX)
        self._claim: Gather[tuple[int, int], list[Job]] = Gather(
            self._claim_group, group_max=100, unwanted=self._release
        )
        self._releasing: set[asyncio.Task[None]] = set()

    async def put(
        self,
        data: Any,
        *,
        key: str | None = None,
        priority: int = DEFAULT,
        process_at: Date = None,
        expires_at: Date = None,
        transaction: object = None,
    ) -> Put:
        """Add an entry. While one of the same key waits, it is merged into that one.

        `transaction` is a session or connection of yours on the same PostgreSQL: the entry is put with what you commit
        there. Await it with a sync one, too: nothing is put before, and the loop waits meanwhile. Or call `put_in`.
        """
        entry = Entry(data=data, key=key, priority=priority, process_at=process_at, expires_at=expires_at)
        return await self.put_many([entry], transaction=transaction)

    async def put_many(self, entries: Iterable[Entry | Any], *, transaction: object = None) -> Put:
        """Add entries, a thousand or 16 MB of them in one transaction; entries of the same key are merged.

        What is no `Entry` is the data of one without a key.
        """
        ref = await self._ref()
        store = await self._service.store()
        inserted_at = self._service.clock.now_ms()
        new = self._service.new_entries(self.name, entries)
        put = Put(0, 0, 0)
        for chunk in chunks(new):
            if transaction is not None:
                put = _sum(put, await _awaited(store.put_within(transaction, ref, chunk, inserted_at=inserted_at)))
                continue
            asked_at = time.monotonic()
            result = await store.put(ref, chunk, inserted_at=inserted_at)
            self._service.told(ref, _first(chunk, result.now_ms), result.now_ms, asked_at)
            put = _sum(put, result)
        self._service.metrics.count("queue_put", len(new), queue=self.name)
        return put

    async def put_once(self, entries: Iterable[Entry | Any], *, source: str, steps: Sequence[Step]) -> Put | None:
        """Add entries, a thousand and 16 MB at most, and move the marks of their source in the same transaction.

        None where a mark stands elsewhere: somebody has put what comes next, and nothing was put here.
        """
        name, moves = source_name(source), checked_steps(steps)
        ref = await self._ref()
        new = self._service.new_entries(self.name, entries)
        if len(new) > ENTRIES_MAX:
            raise InvalidInput(f"{len(new):,} entries do not go into one transaction: {ENTRIES_MAX:,} do")
        size_bytes = sum(len(entry.data) for entry in new)
        if size_bytes > PUT_BYTES_MAX and len(new) > 1:
            raise TooLarge("what goes into one transaction", size_bytes=size_bytes, limit_bytes=PUT_BYTES_MAX)
        asked_at, inserted_at = time.monotonic(), self._service.clock.now_ms()
        store = await self._service.store()
        put = await store.put_once(ref, new, inserted_at=inserted_at, source=name, steps=moves)
        if put is not None and new:
            self._service.told(ref, _first(new, put.now_ms), put.now_ms, asked_at)
            self._service.metrics.count("queue_put", len(new), queue=self.name)
        return put

    async def marks(self, source: str) -> dict[int, str]:
        """How far each part of a source was put."""
        name, ref = source_name(source), await self._ref()
        return await (await self._service.store()).marks(ref, name)

    def put_in(self, transaction: object, data: Any, **entry: Any) -> Put:
        """Add an entry inside your own sync transaction, without await; the queue must have been opened before."""
        return self.put_many_in(transaction, [Entry(data=data, **entry)])

    def put_many_in(self, transaction: object, entries: Iterable[Entry | Any]) -> Put:
        """Add entries inside your own sync transaction, without await; the queue must have been opened before."""
        return self._service.put_in(transaction, self.name, entries)

    async def open(self) -> Queue:
        """Make the queue where it is missing, and return it."""
        await self._ref()
        return self

    async def claim(
        self, limit: int = 1, lease: timedelta | float | None = None, *, together: bool = True
    ) -> list[Job]:
        """Take due entries, by priority, then process date. Each is yours until its lease ends.

        None come when none is due. Fewer than `limit` come where no more are due, or where their data is large (a claim
        brings some 64 MB); entries of priority SLOW and above come only alone.
        `together` says that you mean to finish many of them in one call of `done`, which is cheaper then; say False
        where you finish one by one. Either way both are possible.
        """
        if type(limit) is not int or not 1 <= limit <= CLAIM_MAX:
            raise InvalidInput(f"a claim is for 1 to {CLAIM_MAX:,} entries, not {limit!r}")
        ref = self._service.known(self.name) or await self._ref()
        lease_ms = ref.settings.lease_ms if lease is None else duration_ms(lease, "lease", least_ms=1)
        if limit <= SMALL_CLAIM:
            return await self._claim((limit, lease_ms))
        claiming = asyncio.ensure_future(self._claim_now(limit, lease_ms, together=together))
        try:
            return await asyncio.shield(claiming)
        except asyncio.CancelledError:
            claiming.add_done_callback(self._release_claimed)
            raise

    async def heartbeat(self, jobs: Job | Sequence[Job], lease: timedelta | float | None = None) -> None:
        """Extend the lease of jobs that are still worked on; LeaseLost where another worker has taken one."""
        ref = await self._ref()
        lease_ms = ref.settings.lease_ms if lease is None else duration_ms(lease, "lease", least_ms=1)
        ours = self._own(jobs)
        store, kept = await self._service.store(), dict[Held, int]()
        for held in _rounds(ours):
            kept |= await store.heartbeat(ref, held, lease_ms=lease_ms)
        for job in ours:
            if job.held in kept:
                job.extended(kept[job.held])
        _refuse_lost([job for job in ours if job.held not in kept])

    async def done(self, jobs: Job | Sequence[Job]) -> None:
        """The work is done: the entry is deleted. LeaseLost where another worker has it now."""
        ours = self._own(jobs)
        if len(ours) == 1:
            if not await self._finish(ours[0].held):
                _refuse_lost(ours)
            return
        ref = await self._ref()
        store = await self._service.store()
        finished = await store.finish(ref, [job.held for job in ours])
        if len(finished) < len(ours):
            for held in _rounds(ours)[1:]:  # a key in two hands: one of them may be the right one
                finished |= await store.finish(ref, held)
        self._service.finished(ref, len(finished))
        if len(finished) < len(ours):
            _refuse_lost([job for job in ours if job.held not in finished])

    async def fail(
        self, jobs: Job | Sequence[Job], *, delay: timedelta | float = 0, reason: str = "it failed"
    ) -> list[Outcome]:
        """The work failed: the entry waits again, for `delay` at least; past `max_timeouts` it is a dead letter."""
        ref = await self._ref()
        ours = self._own(jobs)
        delay_ms = duration_ms(delay, "delay")
        failures = [Failure(job.held, delay_ms, _reason(reason)) for job in ours]
        outcomes = await (await self._service.store()).fail(ref, failures)
        self._service.failed(ref, outcomes, delay_ms)
        self._service.metrics.count("queue_failed", len(ours), queue=self.name)
        _refuse_lost([job for job, outcome in zip(ours, outcomes, strict=True) if outcome == "lost"])
        return outcomes

    async def listen(self) -> AsyncGenerator[datetime, None]:
        """Yields the store's time whenever work becomes due: at once, if some is. Then claim until nothing comes."""
        ref = await self._ref()
        waker = await self._service.waker()
        async with aclosing(waker.listen(ref)) as dues:
            async for due in dues:
                yield due

    async def entries(self, limit: int = 100) -> list[Listed]:
        """The first entries: those being processed, then those that wait, in their order."""
        ref = await self._ref()
        return [Listed.of(each) for each in await (await self._service.store()).entries(ref, limit=list_limit(limit))]

    async def status(self) -> Status:
        """The queue in numbers."""
        ref = await self._ref()
        return Status.of(ref, await (await self._service.store()).counts(ref))

    async def flags(self, limit: int = 100) -> list[DeadLetter]:
        """Dead letters, newest first."""
        ref = await self._ref()
        return [DeadLetter.of(each) for each in await (await self._service.store()).flags(ref, limit=list_limit(limit))]

    async def retry(self, flag: int) -> None:
        """Put a dead letter back; it waits from now on, its counter at 0.

        Where a newer entry of its key is in the queue, it is merged into that one, whose data stays.
        """
        ref = await self._ref()
        if not _is_flag(flag) or not await (await self._service.store()).retry(ref, flag):
            raise NotFound(f"queue {self.name!r} has no flag {flag}")
        self._service.look(ref)

    async def edit(self, flag: int, data: Any) -> None:
        """Replace a dead letter's data."""
        ref = await self._ref()
        kind, encoded = encoded_data(self._service.checker(self.name)(data))
        if not _is_flag(flag) or not await (await self._service.store()).edit(ref, flag, kind, encoded):
            raise NotFound(f"queue {self.name!r} has no flag {flag}")

    async def drop(self, flag: int) -> None:
        """Delete a dead letter."""
        ref = await self._ref()
        if not _is_flag(flag) or not await (await self._service.store()).drop(ref, flag):
            raise NotFound(f"queue {self.name!r} has no flag {flag}")

    async def close(self) -> None:
        """Wait for what is under way."""
        await self._finish.close()
        await self._claim.close()
        while self._releasing:
            await asyncio.gather(*self._releasing, return_exceptions=True)

    async def _ref(self) -> QueueRef:
        return await self._service.ref(self.name)

    async def _claim_now(self, limit: int, lease_ms: int, *, together: bool) -> list[Job]:
        ref, store, token = await self._ref(), await self._service.store(), self._service.ids.new()
        claimed = await store.claim(ref, limit=limit, lease_ms=lease_ms, token=token, together=together)
        self._service.claimed(ref, len(claimed), lease_ms)
        read = self._service.reader(self.name)
        return [Job(self.name, each, token, read) for each in claimed]

    def _release_claimed(self, claiming: asyncio.Future[list[Job]]) -> None:
        if not claiming.cancelled() and claiming.exception() is None:
            self._release(claiming.result())

    def _release(self, jobs: list[Job]) -> None:
        """Nobody waits for these any more: they are given back, instead of being held until their lease ends."""
        if jobs:
            releasing = asyncio.ensure_future(self._give_back(jobs))
            self._releasing.add(releasing)
            releasing.add_done_callback(self._releasing.discard)

    async def _give_back(self, jobs: list[Job]) -> None:
        try:
            await self.fail(jobs, reason="its claim was cancelled")
        except TidebookError:  # they come again when their lease has run out
            pass

    async def _claim_group(self, asked: Sequence[tuple[int, int]]) -> list[list[Job] | BaseException]:
        """One claim for those who ask for the same lease; what it brings is dealt out in the order they came."""
        outcomes: list[list[Job] | BaseException] = [[] for _ in asked]
        for lease_ms in dict.fromkeys(lease for _, lease in asked):
            places = [place for place, (_, lease) in enumerate(asked) if lease == lease_ms]
            # Who got nothing asks again: slow entries are not mixed with others, and large ones come by parts.
            while places:
                try:
                    jobs = await self._claim_now(sum(asked[place][0] for place in places), lease_ms, together=False)
                except TidebookError as error:
                    for place in places:
                        outcomes[place] = error
                    break
                if not jobs:
                    break
                for place in places:
                    limit = asked[place][0]
                    outcomes[place], jobs = jobs[:limit], jobs[limit:]
                places = [place for place in places if not outcomes[place]]
        return outcomes

    async def _finish_group(self, held: Sequence[Held]) -> list[bool | BaseException]:
        """One delete for all; a key that occurs twice, in two hands, takes two."""
        ref = await self._ref()
        store = await self._service.store()
        finished: set[Held] = set()
        left = list(held)
        while left:
            by_key = {each.keyhash: each for each in left}
            finished |= await store.finish(ref, list(by_key.values()))
            left = [each for each in left if by_key[each.keyhash] is not each]
        self._service.finished(ref, len(finished))
        return [each in finished for each in held]

    def _own(self, jobs: Job | Sequence[Job]) -> list[Job]:
        several: object = jobs or ()
        given: list[Any] = list(several) if isinstance(several, Iterable) else [several]
        if not given:
            raise InvalidInput("no job was given")
        for job in given:
            if getattr(job, "queue", None) != self.name:
                raise InvalidInput(f"{job!r} is no job of queue {self.name!r}")
        return given


def _refuse_lost(lost: list[Job]) -> None:
    if lost:
        names = ", ".join(str(job.key or job.id) for job in lost[:5])
        raise LeaseLost(
            f"{names}{' and more' if len(lost) > 5 else ''} is not held here: it was finished or given back before, or "
            "its lease ran out and another worker has it: take a longer lease, or send heartbeats"
        )


def _first(entries: list[NewEntry], now_ms: int) -> int:
    return min(now_ms if entry.process_at is None else max(entry.process_at, now_ms) for entry in entries)


def _sum(a: Put, b: Put) -> Put:
    return Put(a.inserted + b.inserted, a.merged + b.merged, b.now_ms)


async def _awaited(put: Put | Awaitable[Put]) -> Put:
    return put if isinstance(put, Put) else await put


def _rounds(jobs: Sequence[Job]) -> list[list[Held]]:
    """What is held, in as many lists as it takes for no key to occur twice in one."""
    rounds: list[dict[bytes, Held]] = []
    for job in jobs:
        free = next((each for each in rounds if job.held.keyhash not in each), None)
        if free is None:
            rounds.append(free := {})
        free[job.held.keyhash] = job.held
    return [list(each.values()) for each in rounds]


def _reason(text: object) -> str:
    """What a handler's error says may hold anything; a table does not."""
    return str(text).replace("\x00", "")[:1_000].encode(errors="replace").decode()


def _is_flag(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63
