"""Queues for threads without an event loop."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic

from tidebook.queue.entry import Date, Entry
from tidebook.queue.job import D
from tidebook.queue.port import Put
from tidebook.queue.priority import DEFAULT
from tidebook.queue.queue import Queue
from tidebook.queue.queues import Queues
from tidebook.runtime.blocking_facade import BlockingFacade, blocking, iterating
from tidebook.runtime.blocking_portal import BlockingPortal


class SyncQueue(BlockingFacade[Queue[D]], Generic[D]):
    """The blocking form of `Queue`; a put in a transaction runs in the caller's thread, which owns the connection."""

    def __init__(self, portal: BlockingPortal, target: Queue[D]) -> None:
        super().__init__(portal, target)
        self.name = target.name

    def put(
        self,
        data: D,
        *,
        key: str | None = None,
        priority: int = DEFAULT,
        process_at: Date = None,
        expires_at: Date = None,
        transaction: object = None,
    ) -> Put:
        """Add an entry; see `Queue.put`."""
        entry = Entry(data=data, key=key, priority=priority, process_at=process_at, expires_at=expires_at)
        return self.put_many([entry], transaction=transaction)

    def put_many(self, entries: Iterable[Entry | D], *, transaction: object = None) -> Put:
        """Add entries; see `Queue.put_many`."""
        if transaction is None:
            return self._portal.run(self._target.put_many(entries))
        return self.open()._target.put_many_in(transaction, entries)

    def put_in(self, transaction: object, data: D, **entry: Any) -> Put:
        """Add an entry inside your transaction."""
        return self.put_many([Entry(data=data, **entry)], transaction=transaction)

    def put_many_in(self, transaction: object, entries: Iterable[Entry | D]) -> Put:
        """Add entries inside your transaction."""
        return self.put_many(entries, transaction=transaction)

    def open(self) -> SyncQueue[D]:
        """Create the queue if it is missing, and return it."""
        self._portal.run(self._target.open())
        return self

    claim = blocking(Queue.claim)
    put_once = blocking(Queue.put_once)
    marks = blocking(Queue.marks)
    heartbeat = blocking(Queue.heartbeat)
    done = blocking(Queue.done)
    fail = blocking(Queue.fail)
    listen = iterating(Queue.listen)
    entries = blocking(Queue.entries)
    status = blocking(Queue.status)
    workers = blocking(Queue.workers)
    report_worker = blocking(Queue.report_worker)
    remove_worker = blocking(Queue.remove_worker)
    pause = blocking(Queue.pause)
    resume = blocking(Queue.resume)
    dead_letters = blocking(Queue.dead_letters)
    retry = blocking(Queue.retry)
    edit = blocking(Queue.edit)
    drop = blocking(Queue.drop)


class SyncQueues(BlockingFacade[Queues]):
    """The blocking form of `Queues`: all queues of a book."""

    names = blocking(Queues.names)
    status = blocking(Queues.status)
    dead_letters = blocking(Queues.dead_letters)
