"""The files that this process has open, with reference counts: one writer per file, one set of wake-ups per folder."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

import apsw

from tidebook.core.errors import TidebookError, Unavailable
from tidebook.runtime.metrics import Metrics
from tidebook.sqlite.database import Database, Schema, make_folder
from tidebook.sqlite.errors import from_os
from tidebook.sqlite.forks import open_objects
from tidebook.sqlite.wakeups import POLL_S, Wakeups
from tidebook.sqlite.writer import WriteOperation, Writer, nothing


class _Closes(Protocol):
    def close(self) -> None: ...


T = TypeVar("T", bound=_Closes)
P = ParamSpec("P")
R = TypeVar("R")
#: A folder's device and inode, which are the same for all paths to it, and a file's name in it.
Identity = tuple[int, int, str]


class _Shared(Generic[T]):
    """Reference-counted objects by identity: the first `take` creates one, and the last `give_back` closes it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shared: dict[Identity, tuple[T, int]] = {}
        open_objects.add(self)

    def close_in_child(self) -> None:
        """In a forked child: start with no open files; the lock may be held by a thread that does not exist here."""
        self.__init__()  # type: ignore[misc]

    def take(self, identity: Identity, create: Callable[[], T]) -> T:
        with self._lock:
            shared, users = self._shared.get(identity) or (create(), 0)
            self._shared[identity] = (shared, users + 1)
            return shared

    def give_back(self, identity: Identity, shared: T) -> None:
        with self._lock:
            found = self._shared.get(identity)
            if found is None or found[0] is not shared:  # it belongs to the process that this one was forked from
                return
            self._shared[identity] = (shared, found[1] - 1)
            if found[1] == 1:
                del self._shared[identity]
                shared.close()


class SharedFile:
    """A file of a book's folder: its database, its writer, and the folder's wake-ups. Created by `open`."""

    def __init__(self, path: Path, schema: Schema, metrics: Metrics | None, identity: Identity) -> None:
        self.path = path
        self._identity = identity
        self.database = Database(path, schema)
        try:
            self.wakeups = _wakeups.take((*identity[:2], ""), lambda: Wakeups(path.parent))
        except BaseException:
            self.database.close()
            raise
        self.writer = Writer(self.database, self.wakeups, metrics=metrics)

    @staticmethod
    def open(folder: str | Path, name: str, schema: Schema, *, metrics: Metrics | None = None) -> SharedFile:
        """Open the file `name` of a folder, creating both if they are missing; call `release` once for each `open`."""
        path = Path(folder).expanduser().absolute() / name
        make_folder(path.parent)
        try:
            stats = path.parent.stat()
        except OSError as error:
            raise from_os(error, path.parent) from error
        identity = (stats.st_dev, stats.st_ino, name)
        return _files.take(identity, lambda: SharedFile(path, schema, metrics, identity))

    def release(self) -> None:
        """Give up this use of the file; the last one waits for the posted operations and closes it."""
        _files.give_back(self._identity, self)

    def close(self) -> None:
        """Close the file. Only the last `release` calls this."""
        self.writer.close()
        _wakeups.give_back((*self._identity[:2], ""), self.wakeups)
        self.database.close()


class SqliteAdapter:
    """The base of adapters on a folder's files: it reads in the calling thread and writes through the file's writer."""

    def __init__(self, folder: str | Path, name: str, schema: Schema, metrics: Metrics | None) -> None:
        self._file = SharedFile.open(folder, name, schema, metrics=metrics)
        self._database = self._file.database
        self._closed = False

    @property
    def path(self) -> Path:
        """The path of the file."""
        return self._file.path

    def damage(self) -> list[str]:
        """Read the whole file and return the problems that SQLite finds; an empty list if there are none."""
        return self._database.damage()

    async def close(self) -> None:
        """Wait for the writes in progress, then release the file. A second call does nothing."""
        if self._closed or self._database.forked:
            return
        self._closed = True
        try:
            await self._file.writer.run(nothing, None)
        except TidebookError:  # the callers of the writes get the same error
            pass
        finally:
            await asyncio.to_thread(self._file.release)

    async def _run(self, run: WriteOperation, argument: Any, size_bytes: int = 0) -> Any:
        if self._closed:
            raise Unavailable(f"{self._file.path} is closed")
        return await self._file.writer.run(run, argument, size_bytes)

    def _read(self, read: Callable[Concatenate[apsw.Connection, P], R], *arguments: P.args, **options: P.kwargs) -> R:
        """Return `read(connection, …)`, which must neither yield nor leave a cursor open."""
        try:
            with self._database.reading() as connection:
                return read(connection, *arguments, **options)
        except apsw.Error as error:
            raise self._database.failure(error) from error

    def _select(self, sql: str, bindings: tuple[Any, ...]) -> list[Any]:
        return self._read(_fetch_all, sql, bindings)

    async def _wait(self, channel: str, reached: Callable[[], bool], timeout_s: float | None) -> bool:
        """Return True as soon as `reached()`, checked at each wake-up, or False after `timeout_s` (None: no limit)."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        wakeups = self._file.wakeups
        while True:
            seen = wakeups.count(channel)
            if reached():
                return True
            left_s = POLL_S if deadline is None else deadline - time.monotonic()
            if left_s <= 0:
                return False
            await wakeups.wait(channel, since=seen, timeout_s=left_s)


def _fetch_all(connection: apsw.Connection, sql: str, bindings: tuple[Any, ...]) -> list[Any]:
    return connection.execute(sql, bindings).fetchall()


_files: _Shared[SharedFile] = _Shared()
_wakeups: _Shared[Wakeups] = _Shared()
