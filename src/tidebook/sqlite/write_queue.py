"""The queue between event loops and the writer thread: operations in, outcomes out, batched per loop iteration."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, TypeVar

import apsw

from tidebook.core.errors import TidebookError, Unavailable

#: Bound on queued operations: more are rejected, since callers that outpace the disk would exhaust memory.
WAITING_MAX = 200_000


class WriteTransaction:
    """The writer's transaction, as an operation sees it."""

    __slots__ = ("channels", "connection", "memory")

    def __init__(self, connection: apsw.Connection) -> None:
        self.connection = connection
        #: A cache of what operations have read from the file. It is cleared when a transaction fails, and when another
        #: process has written to the file.
        self.memory: dict[Any, Any] = {}
        #: The wake-up channels to ping after the commit.
        self.channels: set[str] = set()


#: Executes operations of one kind, given by their arguments, and returns one outcome for each: a value or an error. It
#: may be called again after a rollback, so it must not change anything outside the transaction. If it raises, the
#: operations are executed one by one, and only those that raise then fail.
WriteOperation = Callable[[WriteTransaction, Sequence[Any]], Sequence[Any]]
_Operation = TypeVar("_Operation", bound=Callable[..., Sequence[Any]])


def unsynced(run: _Operation) -> _Operation:
    """Mark an operation that a power failure may undo: a commit of such operations alone does not sync the disk.

    Commits stay ordered: a later commit survives only if this one does.
    """
    run.unsynced = True  # type: ignore[attr-defined]
    return run


#: Receives the outcome of an operation, a value or an exception, in the event loop that posted it.
OnDone = Callable[[Any], None]
QueuedOperation = tuple[WriteOperation, Any, OnDone, asyncio.AbstractEventLoop, int]
OperationOutcome = tuple[QueuedOperation, Any]


class WriteQueue:
    """Collects the operations posted in one iteration of an event loop, and passes them to the writer at its end.

    If the first post woke the writer, the two threads would compete for the GIL during the whole iteration, for commits
    of a few operations each.
    """

    def __init__(self) -> None:
        self._collecting: dict[asyncio.AbstractEventLoop, list[QueuedOperation]] = {}
        self._ready: SimpleQueue[list[QueuedOperation] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._queued = 0
        self._closed = False

    def post(self, run: WriteOperation, argument: Any, done: OnDone, size_bytes: int) -> None:
        """Queue an operation from the running event loop; raise Unavailable if WAITING_MAX are queued."""
        loop = asyncio.get_running_loop()
        items = self._collecting.get(loop)
        if items is None:
            items = self._collecting[loop] = []
            loop.call_soon(self._pass_on, loop)
        if self._queued + len(items) >= WAITING_MAX:
            raise Unavailable(f"{WAITING_MAX:,} writes wait already: await some of them first")
        items.append((run, argument, done, loop, size_bytes))

    def empty(self) -> bool:
        """Return whether no operations are ready for the writer."""
        return self._ready.empty()

    def take(self) -> list[QueuedOperation] | None:
        """Wait for the next operations and return them; None once the queue is closed and empty."""
        items = self._ready.get()
        if items is not None:
            with self._lock:
                self._queued -= len(items)
        return items

    def close(self) -> None:
        """Pass on the operations posted so far, then end the queue; later ones fail with Unavailable."""
        with self._lock:
            for items in list(self._collecting.values()):
                self._ready.put(items)
                self._queued += len(items)
            self._collecting.clear()
            self._closed = True
            self._ready.put(None)

    def _pass_on(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            items = self._collecting.pop(loop, [])
            if items and not self._closed:
                self._ready.put(items)
                self._queued += len(items)
                return
        closed: TidebookError = Unavailable("the file was closed before the write was started")
        deliver([(item, closed) for item in items])


def deliver(outcomes: list[OperationOutcome]) -> None:
    """Deliver outcomes to their event loops, with one call per loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[OnDone, Any]]] = {}
    for item, outcome in outcomes:
        calls = by_loop.get(item[3])
        if calls is None:
            calls = by_loop[item[3]] = []
        calls.append((item[2], outcome))
    for loop, calls in by_loop.items():
        try:
            loop.call_soon_threadsafe(_call, loop, calls)
        except RuntimeError:  # the loop is closed, so no caller is waiting
            pass


def _call(loop: asyncio.AbstractEventLoop, calls: list[tuple[OnDone, Any]]) -> None:
    for done, outcome in calls:
        try:
            done(outcome)
        except Exception as error:  # a callback that fails must not affect the others
            loop.call_exception_handler({"message": "a callback failed", "exception": error})


def nothing(transaction: WriteTransaction, arguments: Sequence[Any]) -> list[None]:
    """Do nothing: an operation that completes after all operations posted before it."""
    return [None] * len(arguments)
