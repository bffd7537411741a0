"""A queue: put, claim, heartbeat, done, fail, listen."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext, suppress
from datetime import datetime, timedelta
from itertools import islice
from operator import attrgetter
from typing import Any, Final, Generic, NamedTuple

from tidebook.core.errors import InvalidInput, LeaseLost, NotFound, TidebookError, TooLarge
from tidebook.queue import port
from tidebook.queue.entry import (
    Date,
    Entry,
    check_source_name,
    check_steps,
    check_worker,
    chunks,
    duration_ms,
    encode_data,
    with_trace,
)
from tidebook.queue.job import D, Job
from tidebook.queue.priority import DEFAULT
from tidebook.queue.runtime import QueueRuntime
from tidebook.queue.views import DeadLetter, EntryView, QueueStatus, WorkerView, check_list_limit
from tidebook.runtime import tracing
from tidebook.runtime.micro_batcher import MicroBatcher

CLAIM_MAX: Final = 10_000
#: Claims of at most this many entries are stored entry by entry, since their callers seldom finish them together.
SMALL_CLAIM: Final = 10
#: How many entries one call requests for the claims that wait, if they are few and if they are many, and how many calls
#: are in flight at once. With only one call, the store would idle while the callers work, and vice versa.
CLAIM_GROUP, CLAIM_GROUP_MAX, CALLS_MAX = 256, 1_000, 2
FINISH_GROUP: Final = 500


class ClaimCall(NamedTuple):
    """The arguments of one claim."""

    limit: int
    lease_ms: int
    together: bool
    #: The first bytes of its token.
    holder: bytes = b""
    #: The jobs that its caller has finished.
    finished: Sequence[Job[Any]] = ()

    @property
    def weight(self) -> int:
        """Return how many entries it finishes and claims."""
        return self.limit + len(self.finished)

    @property
    def held(self) -> list[port.LeasedEntry]:
        """Return the hashes and tokens that prove the leases of the finished jobs."""
        return [job.held for job in self.finished]


class Queue(Generic[D]):
    """One queue of a book, with user data of type `D`; it is created when it is first used."""

    def __init__(self, name: str, runtime: QueueRuntime) -> None:
        self.name = name
        self._runtime = runtime
        self._finish: MicroBatcher[list[port.LeasedEntry], list[port.LeasedEntry]] = MicroBatcher(
            self._finish_group, group_max=FINISH_GROUP, flights_max=CALLS_MAX, weigh=len
        )
        self._claim = self._claim_batcher(CALLS_MAX)
        # One call at a time: its callers work between their calls, so two calls would be two commits of half the size.
        self._finish_and_claim = self._claim_batcher(1)
        self._releasing: set[asyncio.Task[None]] = set()

    def _claim_batcher(self, flights_max: int) -> MicroBatcher[ClaimCall, list[Job[D]]]:
        return MicroBatcher(
            self._claim_group,
            group_max=CLAIM_GROUP,
            share_max=CLAIM_GROUP_MAX,
            flights_max=flights_max,
            weigh=attrgetter("weight"),
            unwanted=self._release,
        )

    async def put(
        self,
        data: D,
        *,
        key: str | None = None,
        priority: int = DEFAULT,
        process_at: Date = None,
        expires_at: Date = None,
        transaction: object = None,
    ) -> port.Put:
        """Add an entry. If an entry of the same key is waiting, the new one is merged into it.

        `transaction` is your session or connection on the same PostgreSQL: the entry is put when you commit. Await the
        call even with a sync transaction: nothing is put before that, and the event loop is blocked during the call. Or
        call `put_in`.
        """
        entry = Entry(data=data, key=key, priority=priority, process_at=process_at, expires_at=expires_at)
        return await self.put_many([entry], transaction=transaction)

    async def put_many(self, entries: Iterable[Entry | D], *, transaction: object = None) -> port.Put:
        """Add entries, up to a thousand or 16 MB in one transaction; entries of the same key are merged.

        An item that is not an `Entry` is the data of an entry without a key.
        """
        new = self._runtime.new_entries(self.name, entries)
        with tracing.span("queue.put", **self._put_attributes(new)) as span:
            return await self._put(with_trace(new, _carried(span)), transaction)

    def _put_attributes(self, new: list[port.NewEntry]) -> dict[str, Any]:
        """Return the attributes of the span of a put, which links to the traces that entries already carry."""
        if not tracing.is_on():
            return {}
        carried = dict.fromkeys(each.trace for each in new if each.trace is not None)
        return {"carried": carried, "queue": self.name, "entries": len(new)}

    async def _put(self, new: list[port.NewEntry], transaction: object) -> port.Put:
        ref, store = await self._ref(), await self._runtime.store()
        inserted_at, total = self._runtime.clock.now_ms(), port.Put(0, 0, 0)
        for chunk in chunks(new):
            if transaction is not None:
                put = store.put_within(transaction, ref, chunk, inserted_at=inserted_at)
                total = _add(total, put if isinstance(put, port.Put) else await put)
                continue
            asked_at = time.monotonic()
            result = await store.put(ref, chunk, inserted_at=inserted_at)
            self._runtime.entries_put(ref, chunk, result.now_ms, asked_at)
            total = _add(total, result)
        self._runtime.metrics.count("queue_put", total.inserted + total.merged, queue=self.name)
        return total

    async def put_once(
        self, entries: Iterable[Entry | D], *, source: str, steps: Sequence[port.Step]
    ) -> port.Put | None:
        """Add entries, at most a thousand and 16 MB, and move the marks of their source in the same transaction.

        Return None, and put nothing, if a mark has moved: another process has put these entries.
        """
        name, moves = check_source_name(source), check_steps(steps)
        ref = await self._ref()
        new = self._runtime.new_entries(self.name, entries)
        if len(new) > port.ENTRIES_MAX:
            raise InvalidInput(
                f"{len(new):,} entries are too many for one transaction: the limit is {port.ENTRIES_MAX:,}"
            )
        size_bytes = sum(len(entry.data) for entry in new)
        if size_bytes > port.PUT_BYTES_MAX and len(new) > 1:
            raise TooLarge("the data of one transaction", size_bytes=size_bytes, limit_bytes=port.PUT_BYTES_MAX)
        asked_at, inserted_at = time.monotonic(), self._runtime.clock.now_ms()
        store = await self._runtime.store()
        with tracing.span("queue.put", **self._put_attributes(new)) as span:
            new = with_trace(new, _carried(span))
            put = await store.put_once(ref, new, inserted_at=inserted_at, source=name, steps=moves)
        if put is not None and new:
            self._runtime.entries_put(ref, new, put.now_ms, asked_at)
            self._runtime.metrics.count("queue_put", len(new), queue=self.name)
        return put

    async def marks(self, source: str) -> dict[int, str]:
        """Return the mark of each part of a source: how far it was put into the queue."""
        name, ref = check_source_name(source), await self._ref()
        return await (await self._runtime.store()).marks(ref, name)

    def put_in(self, transaction: object, data: D, **entry: Any) -> port.Put:
        """Add an entry inside your sync transaction, without await; open the queue first."""
        return self.put_many_in(transaction, [Entry(data=data, **entry)])

    def put_many_in(self, transaction: object, entries: Iterable[Entry | D]) -> port.Put:
        """Add entries inside your sync transaction, without await; open the queue first."""
        ref, store = self._runtime.opened(self.name)
        inserted_at, total = self._runtime.clock.now_ms(), port.Put(0, 0, 0)
        new = self._runtime.new_entries(self.name, entries)
        with tracing.span("queue.put", **self._put_attributes(new)) as span:
            for chunk in chunks(with_trace(new, _carried(span))):
                put = store.put_within(transaction, ref, chunk, inserted_at=inserted_at)
                if not isinstance(put, port.Put):
                    if isinstance(put, Coroutine):
                        put.close()  # it has not started
                    raise InvalidInput(
                        "this transaction's driver is async: use 'await queue.put(..., transaction=...)'"
                    )
                total = _add(total, put)
        return total

    async def open(self) -> Queue[D]:
        """Create the queue if it is missing, and return it."""
        await self._ref()
        return self

    async def claim(
        self,
        limit: int = 1,
        lease: timedelta | float | None = None,
        *,
        together: bool = True,
        worker: bytes = b"",
        finished: Job[D] | Sequence[Job[D]] = (),
    ) -> list[Job[D]]:
        """Claim due entries, by priority, then process date. Each is yours until its lease ends.

        The list is empty if nothing is due. It is shorter than `limit` if fewer entries are due or their data is large
        (a claim returns at most about 64 MB); entries of priority SLOW and above are never claimed with others.
        `together` says that you intend to finish many of them in one call of `done`, which is then cheaper; pass False
        if you finish them one by one. Both are possible in either case.
        `worker` is the id of the `Worker` that claims: a console then shows which entries it holds.
        `finished` are jobs to finish first, as `done` does; a queue in a folder does both in one transaction. If one is
        no longer held, raise LeaseLost and claim nothing. If they are finished and the claim fails, the list is empty.
        """
        if type(limit) is not int or not 1 <= limit <= CLAIM_MAX:
            raise InvalidInput(f"a claim must be for 1 to {CLAIM_MAX:,} entries, not {limit!r}")
        if type(worker) is not bytes or len(worker) not in (0, 16):
            raise InvalidInput(f"worker must be the id of a worker, 16 bytes, not {worker!r:.60}")
        ref = await self._ref()
        lease_ms = ref.settings.lease_ms if lease is None else duration_ms(lease, "lease", least_ms=1)
        together, holder = together and limit > SMALL_CLAIM, worker[: port.HOLDER_BYTES]
        if not finished:
            return await self._run_claim(ClaimCall(limit, lease_ms, together, holder))
        own_jobs = self._own_jobs(finished)
        with self._ending("queue.done", own_jobs):
            return await self._run_claim(ClaimCall(limit, lease_ms, together, holder, own_jobs))

    async def _run_claim(self, call: ClaimCall) -> list[Job[D]]:
        start_ns = time.time_ns() if tracing.is_on() else None
        claiming = (self._finish_and_claim if call.finished else self._claim)(call)
        try:
            jobs = await claiming
            if start_ns is not None and jobs:  # an empty claim belongs to no trace
                _trace_claim(self.name, jobs, start_ns)
            return jobs
        except asyncio.CancelledError:
            if not claiming.cancelled() and claiming.exception() is None:  # it ended before the cancellation
                self._release(claiming.result())
            raise

    async def heartbeat(self, jobs: Job[D] | Sequence[Job[D]], lease: timedelta | float | None = None) -> None:
        """Extend the leases of running jobs; raise LeaseLost if one is no longer held."""
        ref = await self._ref()
        lease_ms = ref.settings.lease_ms if lease is None else duration_ms(lease, "lease", least_ms=1)
        own_jobs = self._own_jobs(jobs)
        store, extended = await self._runtime.store(), dict[port.LeasedEntry, int]()
        for held in port.split_by_key([job.held for job in own_jobs]):
            extended |= await store.heartbeat(ref, held, lease_ms=lease_ms)
        for job in own_jobs:
            if job.held in extended:
                job.extended(extended[job.held])
        _raise_if_lost([job for job in own_jobs if job.held not in extended])

    async def done(self, jobs: Job[D] | Sequence[Job[D]]) -> None:
        """Delete the entries of finished jobs; raise LeaseLost if one is no longer held."""
        own_jobs = self._own_jobs(jobs)
        with self._ending("queue.done", own_jobs):
            lost = await self._finish([job.held for job in own_jobs])
            if lost:
                _raise_if_lost([job for job in own_jobs if job.held in lost])

    async def fail(
        self, jobs: Job[D] | Sequence[Job[D]], *, delay: timedelta | float = 0, reason: str = "it failed"
    ) -> list[port.Outcome]:
        """Return the entries to the queue, to wait for at least `delay`; past `max_timeouts` they are dead letters."""
        ref = await self._ref()
        own_jobs = self._own_jobs(jobs)
        delay_ms = duration_ms(delay, "delay")
        # Without the characters that a database rejects: NUL and lone surrogates.
        text = str(reason).replace("\x00", "")[:1_000].encode(errors="replace").decode()
        failures = [port.Failure(job.held, delay_ms, text) for job in own_jobs]
        with self._ending("queue.fail", own_jobs):
            outcomes = await (await self._runtime.store()).fail(ref, failures)
            self._runtime.failed(ref, outcomes, delay_ms)
            _raise_if_lost([job for job, outcome in zip(own_jobs, outcomes, strict=True) if outcome == "lost"])
        return outcomes

    def _ending(self, name: str, jobs: list[Job[D]]) -> AbstractContextManager[object]:
        """Trace the end of jobs: as a child of the put of a single job, or with links to the puts of several."""
        if not tracing.is_on():
            return nullcontext()
        carried = [getattr(job, "traceparent", None) for job in jobs]  # a lease over HTTP carries none
        parent, links = (carried[0], ()) if len(jobs) == 1 else (None, carried)
        return tracing.span(name, parent=parent, carried=links, queue=self.name, entries=len(jobs))

    async def listen(self) -> AsyncGenerator[datetime, None]:
        """Yield the store's time whenever work becomes due, immediately if some is; then claim until none is left."""
        ref = await self._ref()
        waker = await self._runtime.waker()
        async with aclosing(waker.listen(ref)) as dues:
            async for due in dues:
                yield due

    async def entries(self, limit: int = 100) -> list[EntryView]:
        """Return the first entries: those being processed, then the waiting ones, in claim order."""
        limit, ref = check_list_limit(limit), await self._runtime.find(self.name)
        if ref is None:
            return []
        return [EntryView.of(each) for each in await (await self._runtime.store()).entries(ref, limit=limit)]

    async def status(self) -> QueueStatus:
        """Return the number of entries by state, all 0 if the queue was never used."""
        ref = await self._runtime.find(self.name)
        if ref is None:
            return QueueStatus(self.name, 0, 0, 0, 0, 0.0, None, 0)
        return QueueStatus.of(ref, await (await self._runtime.store()).counts(ref))

    async def workers(self, limit: int = 100) -> list[WorkerView]:
        """Return the workers of this queue in all processes, the latest heartbeat first."""
        limit, ref = check_list_limit(limit), await self._runtime.find(self.name)
        if ref is None:
            return []
        rows = await (await self._runtime.store()).workers(ref, limit=limit)
        return [WorkerView.of(self.name, row) for row in rows]

    async def report_worker(self, report: port.WorkerReport) -> None:
        """Record that a worker is alive; a `Worker` does this every few seconds."""
        await (await self._runtime.store()).report_worker(await self._ref(), check_worker(report))

    async def remove_worker(self, id: bytes) -> None:
        """Forget a worker that has ended."""
        await (await self._runtime.store()).remove_worker(await self._ref(), id)

    async def pause(self) -> None:
        """Prevent all processes from claiming entries until `resume`; the pause survives restarts.

        Running jobs continue, and entries can still be put. Raise NotFound if there is no such queue. A second pause
        changes nothing.
        """
        ref = await self._existing()
        await (await self._runtime.store()).pause(ref)

    async def resume(self) -> None:
        """Allow claims again, and wake the workers; do nothing if the queue is not paused."""
        ref = await self._existing()
        if await (await self._runtime.store()).resume(ref):
            self._runtime.wake_listeners(ref)

    async def dead_letters(self, limit: int = 100) -> list[DeadLetter]:
        """Return dead letters, newest first."""
        limit, ref = check_list_limit(limit), await self._runtime.find(self.name)
        if ref is None:
            return []
        return [DeadLetter.of(each) for each in await (await self._runtime.store()).dead_letters(ref, limit=limit)]

    async def retry(self, id: int) -> None:
        """Put a dead letter back: it waits from now on, with 0 timeouts.

        If a newer entry of its key is in the queue, the letter is merged into that one, which keeps its data.
        """
        ref = await self._runtime.find(self.name)
        if ref is None or not await (await self._runtime.store()).retry(ref, self._checked(id)):
            raise self._no_letter(id)
        self._runtime.wake_listeners(ref)

    async def edit(self, id: int, data: D) -> None:
        """Replace a dead letter's data."""
        ref = await self._ref()
        kind, encoded = encode_data(self._runtime.check(self.name, data))
        if not await (await self._runtime.store()).edit(ref, self._checked(id), kind, encoded):
            raise self._no_letter(id)

    async def drop(self, id: int) -> None:
        """Delete a dead letter."""
        ref = await self._runtime.find(self.name)
        if ref is None or not await (await self._runtime.store()).drop(ref, self._checked(id)):
            raise self._no_letter(id)

    def _checked(self, id: int) -> int:
        """Return the id of a dead letter; raise NotFound if none can have it."""
        if type(id) is not int or not 0 <= id < 2**63:
            raise self._no_letter(id)
        return id

    def _no_letter(self, id: int) -> NotFound:
        return NotFound(f"queue {self.name!r} has no dead letter {id}")

    async def close(self) -> None:
        """Wait for the calls in flight."""
        await self._finish.close()
        await self._claim.close()
        await self._finish_and_claim.close()
        while self._releasing:
            await asyncio.gather(*self._releasing, return_exceptions=True)

    async def _ref(self) -> port.QueueRef:
        return await self._runtime.ref(self.name)

    async def _existing(self) -> port.QueueRef:
        ref = await self._runtime.find(self.name)
        if ref is None:
            raise NotFound(f"there is no queue {self.name!r}: the first put creates it")
        return ref

    def _release(self, jobs: list[Job[D]]) -> None:
        """Return jobs whose claim was cancelled to the queue, instead of holding them until their lease ends."""
        if jobs:
            releasing = asyncio.ensure_future(self._give_back(jobs))
            self._releasing.add(releasing)
            releasing.add_done_callback(self._releasing.discard)

    async def _give_back(self, jobs: list[Job[D]]) -> None:
        with suppress(TidebookError):  # they are due again when their lease expires
            await self.fail(jobs, reason="its claim was cancelled")

    async def _claim_group(self, calls: Sequence[ClaimCall]) -> Sequence[list[Job[D]] | BaseException]:
        """Serve concurrent claims; those with the same lease and `together` share calls of the store.

        The first call also deletes the entries that callers have finished; a caller that has lost one claims nothing.

        Callers that got nothing are served again while others got something: a call never mixes slow entries with
        others and returns a bounded number of bytes, so only an empty result proves that nothing is due.
        """
        ref, store, decode = await self._ref(), await self._runtime.store(), self._runtime.decoder(self.name)
        shares: list[list[Job[D]]] = [[] for _ in calls]
        errors: dict[int, TidebookError] = {}
        for lease_ms, together in dict.fromkeys(call[1:3] for call in calls):
            unserved = [index for index, call in enumerate(calls) if call[1:3] == (lease_ms, together)]
            finishes = any(calls[index].finished for index in unserved)
            while unserved:
                if together:  # only entries that are stored together need a token for each caller
                    tokens = {index: self._new_token(calls[index].holder) for index in unserved}
                else:
                    holders = {calls[index].holder for index in unserved}
                    of_holder = {holder: self._new_token(holder) for holder in holders}
                    tokens = {index: of_holder[calls[index].holder] for index in unserved}
                limits = dict[bytes, int]()
                for index, token in tokens.items():
                    limits[token] = limits.get(token, 0) + calls[index].limit
                try:
                    if finishes:
                        claims = [port.FinishingClaim(tokens[i], calls[i].limit, calls[i].held) for i in unserved]
                        finished, claimed = await store.finish_and_claim(
                            ref, claims, lease_ms=lease_ms, together=together
                        )
                        self._runtime.finished(ref, len(finished))
                        for index, lost in zip(unserved, port.find_lost(map(_held_by, claims), finished), strict=True):
                            if lost:
                                errors[index] = _lease_lost([job for job in calls[index].finished if job.held in lost])
                        unserved = [index for index in unserved if index not in errors]
                    else:
                        claimed = await store.claim(ref, limits, lease_ms=lease_ms, together=together)
                except TidebookError as error:
                    # If a later call fails, jobs finished by the first one stay finished: report no error for them.
                    errors.update({i: error for i in unserved if finishes or not calls[i].finished})
                    break
                finishes = False
                self._runtime.claimed(ref, len(claimed), lease_ms)
                jobs: dict[bytes, list[Job[D]]] = {token: [] for token in limits}
                for each in claimed:
                    jobs[each.token].append(Job(self.name, each, decode))
                undelivered = {token: iter(found) for token, found in jobs.items()}
                for index in unserved:
                    shares[index] = list(islice(undelivered[tokens[index]], calls[index].limit))
                unserved = [index for index in unserved if not shares[index]] if claimed else []
        return [errors.get(index, share) for index, share in enumerate(shares)]

    def _new_token(self, holder: bytes) -> bytes:
        """Return a new token; it begins with the bytes that identify its holder, if there is one."""
        return holder + os.urandom(16 - len(holder)) if holder else self._runtime.ids.new()

    async def _finish_group(
        self, calls: Sequence[list[port.LeasedEntry]]
    ) -> list[list[port.LeasedEntry] | BaseException]:
        """Finish the entries of several callers in one call of the store; return those that each caller has lost.

        A key that occurs twice, because it was claimed twice, takes two calls.
        """
        ref, store = await self._ref(), await self._runtime.store()
        finished: set[port.LeasedEntry] = set()
        for held in port.split_by_key([each for call in calls for each in call]):
            finished |= await store.finish(ref, held)
        self._runtime.finished(ref, len(finished))
        if len(finished) == sum(map(len, calls)):
            return [[] for _ in calls]
        return list(port.find_lost(calls, finished))

    def _own_jobs(self, jobs: Job[D] | Sequence[Job[D]]) -> list[Job[D]]:
        several: object = jobs or ()
        given: list[Any] = list(several) if isinstance(several, Iterable) else [several]
        if not given:
            raise InvalidInput("no job was given")
        for job in given:
            if getattr(job, "queue", None) != self.name:
                raise InvalidInput(f"{job!r} is not a job of queue {self.name!r}")
        return given


def _carried(span: tracing.TraceSpan | None) -> str | None:
    return None if span is None else span.carried


def _trace_claim(queue: str, jobs: Sequence[Job[Any]], start_ns: int) -> None:
    carried = [job.traceparent for job in jobs]
    span = tracing.begin("queue.claim", carried=carried, start_ns=start_ns, queue=queue, entries=len(jobs))
    if span is not None:
        span.end()


def _raise_if_lost(lost: Sequence[Job[Any]]) -> None:
    if lost:
        raise _lease_lost(lost)


def _lease_lost(lost: Sequence[Job[Any]]) -> LeaseLost:
    names = ", ".join(str(job.key or job.id) for job in lost[:5])
    return LeaseLost(
        f"{names}{' and more' if len(lost) > 5 else ''} is no longer held: it was finished or returned before, or "
        "its lease expired: use a longer lease, or send heartbeats"
    )


def _held_by(claim: port.FinishingClaim) -> Sequence[port.LeasedEntry]:
    return claim.finished


def _add(a: port.Put, b: port.Put) -> port.Put:
    return port.Put(a.inserted + b.inserted, a.merged + b.merged, b.now_ms)
