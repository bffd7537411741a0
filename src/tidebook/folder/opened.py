"""What this process has open: one writer a file and one set of wake-ups a folder, however often they are asked for."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from tidebook.core.metrics import Metrics
from tidebook.folder.database import Database
from tidebook.folder.failures import from_os
from tidebook.folder.ping import Pings
from tidebook.folder.schema import Schema
from tidebook.folder.writer import Writer


class _Closes(Protocol):
    def close(self) -> None: ...


T = TypeVar("T", bound=_Closes)
#: A folder's device and number, which all of its paths share, and a file's name in it.
Identity = tuple[int, int, str]


class _Shared(Generic[T]):
    """Things by identity, each made for the first who asks and closed by the last who lets go."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._things: dict[Identity, tuple[T, int]] = {}

    def take(self, at: Identity, make: Callable[[], T]) -> T:
        with self._lock:
            thing, users = self._things.get(at) or (make(), 0)
            self._things[at] = (thing, users + 1)
            return thing

    def give_back(self, at: Identity, thing: T) -> None:
        with self._lock:
            kept = self._things.get(at)
            if kept is None or kept[0] is not thing:  # it belongs to the process that this one was forked from
                return
            if kept[1] > 1:
                self._things[at] = (thing, kept[1] - 1)
                return
            del self._things[at]
            thing.close()


class File:
    """A file of a book's folder: its database, its writer, and the folder's wake-ups. Open with `File.open`."""

    def __init__(self, path: Path, schema: Schema, metrics: Metrics | None, identity: Identity) -> None:
        self.path = path
        self._identity = identity
        self.database = Database(path, schema)
        try:
            self.pings = _pings.take((*identity[:2], ""), lambda: Pings(path.parent))
        except BaseException:
            self.database.close()
            raise
        self.writer = Writer(self.database, self.pings, metrics=metrics)

    @staticmethod
    def open(folder: str | Path, name: str, schema: Schema, *, metrics: Metrics | None = None) -> File:
        """The file `name` of a folder, made where it is missing; to be released by whoever opened it."""
        path = Path(folder).expanduser().absolute() / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            told = path.parent.stat()
        except OSError as error:
            raise from_os(error, path.parent) from error
        identity = (told.st_dev, told.st_ino, name)
        return _files.take(identity, lambda: File(path, schema, metrics, identity))

    def release(self) -> None:
        """Let go of it; the last one waits for what was posted and closes it."""
        _files.give_back(self._identity, self)

    def close(self) -> None:
        """Called by the last release."""
        self.writer.close()
        _pings.give_back((*self._identity[:2], ""), self.pings)
        self.database.close()


_files: _Shared[File] = _Shared()
_pings: _Shared[Pings] = _Shared()


def _after_fork() -> None:
    # A forked child begins with nothing open; the lock may have been held by a thread that it does not have.
    _files.__init__()  # type: ignore[misc]
    _pings.__init__()  # type: ignore[misc]


os.register_at_fork(after_in_child=_after_fork)
