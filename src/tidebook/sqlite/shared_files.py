"""The files that this process has open, with reference counts: one writer per file, one set of wake-ups per folder."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from tidebook.runtime.metrics import Metrics
from tidebook.sqlite.database import Database
from tidebook.sqlite.durable_folder import make_folder
from tidebook.sqlite.errors import from_os
from tidebook.sqlite.schema import Schema
from tidebook.sqlite.wakeups import Wakeups
from tidebook.sqlite.writer import Writer


class _Closes(Protocol):
    def close(self) -> None: ...


T = TypeVar("T", bound=_Closes)
#: A folder's device and inode, which are the same for all paths to it, and a file's name in it.
Identity = tuple[int, int, str]


class _Shared(Generic[T]):
    """Reference-counted objects by identity: the first `take` creates one, and the last `give_back` closes it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shared: dict[Identity, tuple[T, int]] = {}

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
            if found[1] > 1:
                self._shared[identity] = (shared, found[1] - 1)
                return
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


_files: _Shared[SharedFile] = _Shared()
_wakeups: _Shared[Wakeups] = _Shared()


def _after_fork() -> None:
    # A child starts with no open files; the lock may be held by a thread that does not exist in the child.
    _files.__init__()  # type: ignore[misc]
    _wakeups.__init__()  # type: ignore[misc]


os.register_at_fork(after_in_child=_after_fork)
