"""The writer thread of a file, with group commit: operations that arrive during a commit share the next one."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial, wraps
from itertools import islice
from queue import SimpleQueue
from typing import Any, TypeVar

import apsw
import msgspec

from tidebook.core.errors import TidebookError, Unavailable
from tidebook.runtime.futures import resolve_future
from tidebook.runtime.metrics import Metrics
from tidebook.sqlite.database import LOCK_S_MAX, Database
from tidebook.sqlite.errors import from_commit, from_sqlite
from tidebook.sqlite.wakeups import Wakeups

#: Bound on queued operations: more are rejected, since callers that outpace the disk would exhaust memory.
WAITING_MAX = 200_000
#: How long a transaction accepts operations, and how long the lock is held while there are more of them.
TRANSACTION_S_MAX = 0.05
TRANSACTION_BYTES_MAX = 16_000_000
#: The maximum number of operations of one kind that one call executes.
GROUP_MAX = 256


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
#: Receives the outcome of an operation, a value or an exception, in the event loop that posted it.
OnDone = Callable[[Any], None]
_Operation = TypeVar("_Operation", bound=Callable[..., Sequence[Any]])
_A = TypeVar("_A")
_R = TypeVar("_R")


def unsynced(run: _Operation) -> _Operation:
    """Mark an operation that a power failure may undo: a commit of such operations alone does not sync the disk.

    Commits stay ordered: a later commit survives only if this one does.
    """
    run.unsynced = True  # type: ignore[attr-defined]
    return run


def one_by_one(run: Callable[[WriteTransaction, _A], _R]) -> Callable[[WriteTransaction, Sequence[_A]], list[_R]]:
    """Turn a function that executes a single operation into a write operation."""

    @wraps(run)
    def run_each(transaction: WriteTransaction, arguments: Sequence[_A]) -> list[_R]:
        return [run(transaction, argument) for argument in arguments]

    return run_each


@one_by_one
def nothing(transaction: WriteTransaction, argument: None) -> None:
    """Do nothing: an operation that completes after all operations posted before it."""


class QueuedOperation(msgspec.Struct, frozen=True):
    """An operation that waits for the writer."""

    run: WriteOperation
    argument: Any
    done: OnDone
    loop: asyncio.AbstractEventLoop
    size_bytes: int


OperationOutcome = tuple[QueuedOperation, Any]


class Writer:
    """Executes operations from any event loop, in order, and reports each outcome in the loop that posted it.

    Operations are collected during an iteration of their event loop and handed over at its end. If the first one woke
    the writer's thread, the two threads would compete for the GIL, and each commit would have only a few operations.
    """

    def __init__(self, database: Database, wakeups: Wakeups, *, metrics: Metrics | None = None) -> None:
        self._database = database
        self._wakeups = wakeups
        self._metrics = metrics or Metrics()
        self._collecting: dict[asyncio.AbstractEventLoop, list[QueuedOperation]] = {}
        #: The operations that were handed over, one list for each loop iteration, and None at the end.
        self._ready: SimpleQueue[list[QueuedOperation] | None] = SimpleQueue()
        self._queued = 0
        self._closed = False
        #: Guards `_collecting` as a whole, `_queued` and `_closed`.
        self._lock = threading.Lock()
        # The rest is used by the thread alone.
        with database.writing as connection:
            self._transaction = WriteTransaction(connection)
        self._waiting: deque[QueuedOperation] = deque()
        self._version = -1
        self._synced = True
        self._lock_until = 0.0
        self._thread = threading.Thread(target=self._work, name=f"writer of {database.path.name}", daemon=True)
        self._thread.start()

    def post(self, run: WriteOperation, argument: Any, done: OnDone, size_bytes: int = 0) -> None:
        """Queue an operation; `done` receives its outcome, a value or an exception, in the running event loop.

        Raise Unavailable if WAITING_MAX are queued.
        """
        self._check_usable()
        loop = asyncio.get_running_loop()
        items = self._collecting.get(loop)
        if items is None:
            items = self._collecting[loop] = []
            loop.call_soon(self._hand_over, loop)
        if self._queued + len(items) >= WAITING_MAX:
            raise Unavailable(f"{WAITING_MAX:,} writes are waiting already: await some of them first")
        items.append(QueuedOperation(run, argument, done, loop, size_bytes))

    async def run(self, run: WriteOperation, argument: Any, size_bytes: int = 0) -> Any:
        """Execute an operation; return its value or raise its error. Cancelling the call does not withdraw it."""
        self._check_usable()  # first: in a forked child there may be no running loop
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.post(run, argument, partial(resolve_future, future), size_bytes)
        return await future

    def close(self) -> None:
        """Execute the operations that were posted, then stop the thread; later ones fail with Unavailable."""
        if self._database.forked:
            self._closed = True
            return
        with self._lock:
            self._closed = True
            for loop in list(self._collecting):
                self._put(self._collecting.pop(loop))
            self._ready.put(None)
        self._thread.join()

    def _check_usable(self) -> None:
        if self._closed or self._database.forked:
            self._database.check_usable()
            raise Unavailable(f"{self._database.path} is closed")

    def _hand_over(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            items = self._collecting.pop(loop, [])
            if items and not self._closed:
                self._put(items)
                return
        closed = Unavailable("the file was closed before the write was started")
        _deliver([(item, closed) for item in items])

    def _put(self, items: list[QueuedOperation]) -> None:
        self._queued += len(items)
        self._ready.put(items)

    def _work(self) -> None:
        more = True
        while True:
            if not self._waiting:
                self._release_lock()
                self._wakeups.flush()
                if not more:
                    return
            while more and (not self._waiting or not self._ready.empty()):
                items = self._ready.get()
                more = items is not None
                if items is not None:
                    with self._lock:
                        self._queued -= len(items)
                    self._waiting.extend(items)
            if self._waiting:
                self._run_transaction()

    def _release_lock(self) -> None:
        if self._database.lock.held and self._ready.empty():
            self._database.lock.release()

    def _run_transaction(self) -> None:
        try:
            self._take_lock()
            with self._database.writing as connection:
                self._prepare(connection)
                outcomes = self._run_grouped() or self._run_singly()
        except TidebookError as error:  # no lock or no transaction: no operation was executed
            outcomes = [(item, error) for item in self._waiting]
            self._waiting.clear()
        channels, self._transaction.channels = self._transaction.channels, set()
        if not self._waiting:
            self._release_lock()  # before the callers resume, because they compete with this thread for the GIL
        _deliver(outcomes)
        if channels:
            self._wakeups.ping(channels)

    def _take_lock(self) -> None:
        lock = self._database.lock
        if lock.held and time.monotonic() > self._lock_until:
            lock.release()
        if not lock.held:
            self._wakeups.flush()  # taking the lock may take long
            lock.acquire(LOCK_S_MAX)
            self._lock_until = time.monotonic() + TRANSACTION_S_MAX

    def _prepare(self, connection: apsw.Connection) -> None:
        if connection is not self._transaction.connection:  # a fork has replaced it, so nothing is known about this one
            self._transaction.connection = connection
            self._transaction.memory.clear()
            self._version = -1
            self._synced = True
        synced = not all(hasattr(item.run, "unsynced") for item in self._waiting)
        if synced != self._synced:
            self._execute(f"PRAGMA synchronous = {'FULL' if synced else 'NORMAL'}")
            self._synced = synced

    def _run_grouped(self) -> list[OperationOutcome]:
        """Execute operations in groups and commit; if one raises, roll back and return an empty list."""
        waiting = self._waiting
        outcomes: list[OperationOutcome] = []
        deadline = time.monotonic() + TRANSACTION_S_MAX
        size_bytes = 0
        self._begin()
        while waiting and size_bytes < TRANSACTION_BYTES_MAX and time.monotonic() < deadline:
            run = waiting[0].run
            group: list[QueuedOperation] = []
            for item in islice(waiting, GROUP_MAX):
                if item.run != run or size_bytes >= TRANSACTION_BYTES_MAX:
                    break
                group.append(item)
                size_bytes += item.size_bytes
            try:
                outcomes += zip(group, run(self._transaction, [item.argument for item in group]), strict=True)
            except Exception:  # `_run_singly` finds out which operation fails
                self._roll_back()
                waiting.extendleft(item for item, _ in reversed(outcomes))
                return []
            for _ in group:
                waiting.popleft()
        return self._commit(outcomes)

    def _run_singly(self) -> list[OperationOutcome]:
        """Execute each operation in its own savepoint, so that one that fails does not affect the others."""
        transaction, execute = self._transaction, self._transaction.connection.execute
        outcomes: list[OperationOutcome] = []
        self._begin()
        for _ in range(min(len(self._waiting), GROUP_MAX)):
            item = self._waiting.popleft()
            outcome: Any
            try:
                execute("SAVEPOINT one")
                (outcome,) = item.run(transaction, [item.argument])
                execute("RELEASE one")
            except Exception as error:
                outcome = from_sqlite(error, self._database.path) if isinstance(error, apsw.Error) else error
                try:
                    execute("ROLLBACK TO one; RELEASE one")
                except apsw.Error:  # there is no savepoint: SQLite rolled all of it back, or the rollback failed
                    self._roll_back()
                    return [(each, outcome) for each, _ in outcomes] + [(item, outcome)]
                transaction.memory.clear()
            outcomes.append((item, outcome))
        return self._commit(outcomes)

    def _begin(self) -> None:
        self._execute("BEGIN IMMEDIATE")
        version = self._execute("PRAGMA data_version").get
        if version != self._version:
            self._transaction.memory.clear()
            self._version = version

    def _execute(self, sql: str) -> apsw.Cursor:
        try:
            return self._transaction.connection.execute(sql)
        except apsw.Error as error:
            self._roll_back()
            raise from_sqlite(error, self._database.path) from error

    def _commit(self, outcomes: list[OperationOutcome]) -> list[OperationOutcome]:
        try:
            self._transaction.connection.execute("COMMIT")
        except apsw.Error as error:
            self._roll_back()
            failure = from_commit(error, self._database.path)
            return [(item, failure) for item, _ in outcomes]
        self._metrics.count("sqlite_commits", file=self._database.path.name)
        self._metrics.count("sqlite_operations", len(outcomes), file=self._database.path.name)
        return outcomes

    def _roll_back(self) -> None:
        self._transaction.memory.clear()
        self._transaction.channels.clear()
        try:
            if self._transaction.connection.in_transaction:
                self._transaction.connection.execute("ROLLBACK")
        except apsw.Error:
            pass  # the callers get an error anyway; if the connection is broken, the next BEGIN fails


def _deliver(outcomes: list[OperationOutcome]) -> None:
    """Deliver outcomes to their event loops, with one call per loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[OperationOutcome]] = {}
    for outcome in outcomes:
        by_loop.setdefault(outcome[0].loop, []).append(outcome)
    for loop, of_loop in by_loop.items():
        try:
            loop.call_soon_threadsafe(_call, loop, of_loop)
        except RuntimeError:  # the loop is closed, so no caller is waiting
            pass


def _call(loop: asyncio.AbstractEventLoop, outcomes: list[OperationOutcome]) -> None:
    for item, outcome in outcomes:
        try:
            item.done(outcome)
        except Exception as error:  # a callback that fails must not affect the others
            loop.call_exception_handler({"message": "a callback failed", "exception": error})
