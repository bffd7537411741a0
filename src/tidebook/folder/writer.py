"""The one thread of a process that writes to a file: what gathers while it commits shares the next commit."""

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
from tidebook.core.metrics import Metrics
from tidebook.core.settle import settle
from tidebook.folder.database import LOCK_S_MAX, Database
from tidebook.folder.failures import from_commit, from_sqlite
from tidebook.folder.inbox import Answer, Done, Inbox, Item, Run, Session, answer, nothing, unsynced
from tidebook.folder.ping import Pings

__all__ = ["Done", "Run", "Session", "Writer", "nothing", "unsynced"]

#: How long a transaction takes in new work, and how long the lock is kept while there is more of it.
TURN_S_MAX = 0.05
TRANSACTION_BYTES_MAX = 16_000_000
#: Operations of one kind that are run together.
GROUP_MAX = 256


class Writer:
    """Takes operations from any event loop and answers each in the loop that posted it, in order."""

    def __init__(self, database: Database, pings: Pings, *, metrics: Metrics | None = None) -> None:
        self._database = database
        self._file_name = database.path.name
        self._pings = pings
        self._metrics = metrics or Metrics()
        self._session = Session(database.connection)
        self._inbox = Inbox()
        self._waiting: deque[Item] = deque()
        self._version = -1
        self._synced = True
        self._lock_until = 0.0
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=f"writer of {database.path.name}", daemon=True)
        self._thread.start()

    def post(self, run: Run, argument: Any, done: Done, size_bytes: int = 0) -> None:
        """Have an operation run; `done` gets its outcome, a value or an exception, in this thread's event loop."""
        if self._closed or self._database.forked:
            self._database.refuse()
            raise Unavailable(f"{self._database.path} is closed")
        self._inbox.post(run, argument, done, size_bytes)

    async def run(self, run: Run, argument: Any, size_bytes: int = 0) -> Any:
        """Post an operation and await its outcome; a cancelled wait does not take it back."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.post(run, argument, partial(settle, future), size_bytes)
        return await future

    def close(self) -> None:
        """Finish what was posted, then end the thread."""
        self._closed = True
        if not self._database.forked:
            self._inbox.close()
            self._thread.join()

    def _work(self) -> None:
        inbox, waiting = self._inbox, self._waiting
        more = True
        while more or waiting:
            if not waiting:
                self._rest()
            while more and (not waiting or not inbox.empty()):
                items = inbox.take()
                more = items is not None
                waiting.extend(items or ())
            if waiting:
                self._turn()
        self._rest()

    def _rest(self) -> None:
        self._let_go()
        self._pings.flush()

    def _let_go(self) -> None:
        if self._database.lock.held and self._inbox.empty():
            self._database.lock.release()

    def _turn(self) -> None:
        try:
            self._take_lock()
            self._choose_sync()
            answers = self._quickly() or self._carefully()
        except TidebookError as error:  # no turn, or no transaction: nothing was tried
            answers = [(item, error) for item in self._waiting]
            self._waiting.clear()
        channels, self._session.channels = self._session.channels, set()
        if not self._waiting:
            self._let_go()  # now: who is answered takes the interpreter's lock, and gives it back late
        answer(answers)
        if channels:
            self._pings.ping(channels)

    def _take_lock(self) -> None:
        lock = self._database.lock
        if lock.held and time.monotonic() > self._lock_until:
            lock.release()
        if not lock.held:
            self._pings.flush()  # it may be a while
            lock.acquire(LOCK_S_MAX)
            self._lock_until = time.monotonic() + TURN_S_MAX

    def _choose_sync(self) -> None:
        """Wait for the disk at the commit, unless all that it would be for may be forgotten."""
        synced = not all(hasattr(item[0], "unsynced") for item in self._waiting)
        if synced != self._synced:
            try:
                self._session.connection.execute(f"PRAGMA synchronous = {'FULL' if synced else 'NORMAL'}")
            except apsw.Error as error:
                raise from_sqlite(error, self._database.path) from error
            self._synced = synced

    def _quickly(self) -> list[Answer]:
        """Run whole groups and commit them; an empty list, with nothing changed, where one of them failed."""
        waiting = self._waiting
        answers: list[Answer] = []
        deadline = time.monotonic() + TURN_S_MAX
        size_bytes = 0
        self._begin()
        while waiting and size_bytes < TRANSACTION_BYTES_MAX and time.monotonic() < deadline:
            run = waiting[0][0]
            group: list[Item] = []
            for item in islice(waiting, GROUP_MAX):
                if item[0] != run or size_bytes >= TRANSACTION_BYTES_MAX:
                    break
                group.append(item)
                size_bytes += item[4]
            try:
                answers += zip(group, run(self._session, [item[1] for item in group]), strict=True)
            except Exception:  # told apart, one by one, by `_carefully`
                self._undo()
                waiting.extendleft(item for item, _ in reversed(answers))
                return []
            for _ in group:
                waiting.popleft()
        return self._commit(answers)

    def _carefully(self) -> list[Answer]:
        """Run operations each in a savepoint of its own: one that fails leaves its neighbours alone."""
        session, execute = self._session, self._session.connection.execute
        answers: list[Answer] = []
        self._begin()
        for _ in range(min(len(self._waiting), GROUP_MAX)):
            item = self._waiting.popleft()
            outcome: Any
            try:
                execute("SAVEPOINT one")
                (outcome,) = item[0](session, [item[1]])
                execute("RELEASE one")
            except Exception as error:
                outcome = from_sqlite(error, self._database.path) if isinstance(error, apsw.Error) else error
                if not session.connection.in_transaction:  # SQLite has undone all of it: a full disk, a failed write
                    self._undo()
                    return [(each, outcome) for each, _ in answers] + [(item, outcome)]
                try:
                    execute("ROLLBACK TO one; RELEASE one")
                except apsw.Error:  # then nothing of this transaction is kept
                    self._undo()
                    return [(each, outcome) for each, _ in answers] + [(item, outcome)]
                session.memory.clear()
            answers.append((item, outcome))
        return self._commit(answers)

    def _begin(self) -> None:
        connection = self._session.connection
        try:
            connection.execute("BEGIN IMMEDIATE")
            version = connection.execute("PRAGMA data_version").get
        except apsw.Error as error:
            self._undo()
            raise from_sqlite(error, self._database.path) from error
        if version != self._version:
            self._session.memory.clear()
            self._version = version

    def _commit(self, answers: list[Answer]) -> list[Answer]:
        try:
            self._session.connection.execute("COMMIT")
        except apsw.Error as error:
            self._undo()
            failure = from_commit(error, self._database.path)
            return [(item, failure) for item, _ in answers]
        self._metrics.count("folder_commits", file=self._file_name)
        self._metrics.count("folder_operations", len(answers), file=self._file_name)
        return answers

    def _undo(self) -> None:
        self._session.memory.clear()
        self._session.channels.clear()
        try:
            if self._session.connection.in_transaction:
                self._session.connection.execute("ROLLBACK")
        except apsw.Error:
            pass  # whoever was to be answered has an error by now; the next transaction meets this one by itself
