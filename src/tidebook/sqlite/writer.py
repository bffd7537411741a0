"""The writer thread of a file, with group commit: operations that arrive during a commit share the next one."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from functools import partial
from itertools import islice
from typing import Any

import apsw

from tidebook.core.errors import TidebookError, Unavailable
from tidebook.runtime.futures import resolve_future
from tidebook.runtime.metrics import Metrics
from tidebook.sqlite.database import LOCK_S_MAX, Database
from tidebook.sqlite.errors import from_commit, from_sqlite
from tidebook.sqlite.wakeups import Wakeups
from tidebook.sqlite.write_queue import (
    OnDone,
    OperationOutcome,
    QueuedOperation,
    WriteOperation,
    WriteQueue,
    WriteTransaction,
    deliver,
    nothing,
    unsynced,
)

__all__ = ["OnDone", "WriteOperation", "WriteTransaction", "Writer", "nothing", "unsynced"]

#: How long a transaction accepts operations, and how long the lock is held while there are more of them.
TRANSACTION_S_MAX = 0.05
TRANSACTION_BYTES_MAX = 16_000_000
#: Maximum number of operations of one kind that are executed by one call.
GROUP_MAX = 256


class Writer:
    """Executes operations from any event loop, in order, and reports each outcome in the loop that posted it."""

    def __init__(self, database: Database, wakeups: Wakeups, *, metrics: Metrics | None = None) -> None:
        self._database = database
        self._file_name = database.path.name
        self._wakeups = wakeups
        self._metrics = metrics or Metrics()
        with database.writing as connection:
            self._transaction = WriteTransaction(connection)
        self._queue = WriteQueue()
        self._waiting: deque[QueuedOperation] = deque()
        self._version = -1
        self._synced = True
        self._lock_until = 0.0
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=f"writer of {database.path.name}", daemon=True)
        self._thread.start()

    def post(self, run: WriteOperation, argument: Any, done: OnDone, size_bytes: int = 0) -> None:
        """Queue an operation; `done` receives its outcome, a value or an exception, in the running event loop."""
        self._refuse()
        self._queue.post(run, argument, done, size_bytes)

    async def run(self, run: WriteOperation, argument: Any, size_bytes: int = 0) -> Any:
        """Execute an operation; return its value or raise its error. Cancelling the call does not withdraw it."""
        self._refuse()  # first: in a forked child there may be no running loop
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.post(run, argument, partial(resolve_future, future), size_bytes)
        return await future

    def _refuse(self) -> None:
        if self._closed or self._database.forked:
            self._database.refuse()
            raise Unavailable(f"{self._database.path} is closed")

    def close(self) -> None:
        """Execute the operations that were posted, then stop the thread."""
        self._closed = True
        if not self._database.forked:
            self._queue.close()
            self._thread.join()

    def _work(self) -> None:
        queue, waiting = self._queue, self._waiting
        more = True
        while more or waiting:
            if not waiting:
                self._become_idle()
            while more and (not waiting or not queue.empty()):
                items = queue.take()
                more = items is not None
                waiting.extend(items or ())
            if waiting:
                self._run_transaction()
        self._become_idle()

    def _become_idle(self) -> None:
        self._release_lock()
        self._wakeups.flush()

    def _release_lock(self) -> None:
        if self._database.lock.held and self._queue.empty():
            self._database.lock.release()

    def _run_transaction(self) -> None:
        try:
            self._take_lock()
            with self._database.writing as connection:
                self._adopt(connection)
                self._choose_sync()
                outcomes = self._run_grouped() or self._run_singly()
        except TidebookError as error:  # no lock or no transaction: no operation was executed
            outcomes = [(item, error) for item in self._waiting]
            self._waiting.clear()
        channels, self._transaction.channels = self._transaction.channels, set()
        if not self._waiting:
            self._release_lock()  # before the callers resume, since this thread then waits long for the GIL
        deliver(outcomes)
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

    def _adopt(self, connection: apsw.Connection) -> None:
        """Reset all state if a fork has replaced the connection: `data_version` is only comparable within one."""
        if connection is not self._transaction.connection:
            self._transaction.connection = connection
            self._transaction.memory.clear()
            self._version = -1
            self._synced = True

    def _choose_sync(self) -> None:
        """Sync at the commit, unless all operations are marked `unsynced`."""
        synced = not all(hasattr(item[0], "unsynced") for item in self._waiting)
        if synced != self._synced:
            try:
                self._transaction.connection.execute(f"PRAGMA synchronous = {'FULL' if synced else 'NORMAL'}")
            except apsw.Error as error:
                raise from_sqlite(error, self._database.path) from error
            self._synced = synced

    def _run_grouped(self) -> list[OperationOutcome]:
        """Execute operations in groups and commit; if one raises, roll back and return an empty list."""
        waiting = self._waiting
        outcomes: list[OperationOutcome] = []
        deadline = time.monotonic() + TRANSACTION_S_MAX
        size_bytes = 0
        self._begin()
        while waiting and size_bytes < TRANSACTION_BYTES_MAX and time.monotonic() < deadline:
            run = waiting[0][0]
            group: list[QueuedOperation] = []
            for item in islice(waiting, GROUP_MAX):
                if item[0] != run or size_bytes >= TRANSACTION_BYTES_MAX:
                    break
                group.append(item)
                size_bytes += item[4]
            try:
                outcomes += zip(group, run(self._transaction, [item[1] for item in group]), strict=True)
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
                (outcome,) = item[0](transaction, [item[1]])
                execute("RELEASE one")
            except Exception as error:
                outcome = from_sqlite(error, self._database.path) if isinstance(error, apsw.Error) else error
                if (
                    not transaction.connection.in_transaction
                ):  # SQLite rolled all of it back: a full disk, a failed write
                    self._roll_back()
                    return [(each, outcome) for each, _ in outcomes] + [(item, outcome)]
                try:
                    execute("ROLLBACK TO one; RELEASE one")
                except apsw.Error:  # the whole transaction has to be rolled back
                    self._roll_back()
                    return [(each, outcome) for each, _ in outcomes] + [(item, outcome)]
                transaction.memory.clear()
            outcomes.append((item, outcome))
        return self._commit(outcomes)

    def _begin(self) -> None:
        connection = self._transaction.connection
        try:
            connection.execute("BEGIN IMMEDIATE")
            version = connection.execute("PRAGMA data_version").get
        except apsw.Error as error:
            self._roll_back()
            raise from_sqlite(error, self._database.path) from error
        if version != self._version:
            self._transaction.memory.clear()
            self._version = version

    def _commit(self, outcomes: list[OperationOutcome]) -> list[OperationOutcome]:
        try:
            self._transaction.connection.execute("COMMIT")
        except apsw.Error as error:
            self._roll_back()
            failure = from_commit(error, self._database.path)
            return [(item, failure) for item, _ in outcomes]
        self._metrics.count("folder_commits", file=self._file_name)
        self._metrics.count("folder_operations", len(outcomes), file=self._file_name)
        return outcomes

    def _roll_back(self) -> None:
        self._transaction.memory.clear()
        self._transaction.channels.clear()
        try:
            if self._transaction.connection.in_transaction:
                self._transaction.connection.execute("ROLLBACK")
        except apsw.Error:
            pass  # the callers get an error anyway; if the connection is broken, the next BEGIN fails
