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


class _Shared(Generic[T]):
    """Things by path, each made for the first who asks and closed by the last who lets go."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._things: dict[Path, tuple[T, int]] = {}

    def take(self, path: Path, make: Callable[[], T]) -> T:
        with self._lock:
            thing, users = self._things.get(path) or (make(), 0)
            self._things[path] = (thing, users + 1)
            return thing

    def give_back(self, path: Path, thing: T) -> None:
        with self._lock:
            kept = self._things.get(path)
            if kept is None or kept[0] is not thing:  # it belongs to the process that this one was forked from
                return
            if kept[1] > 1:
                self._things[path] = (thing, kept[1] - 1)
                return
            del self._things[path]
            thing.close()


class File:
    """A file of a book's folder: its database, its writer, and the folder's wake-ups. Open with `File.open`."""

    def __init__(self, path: Path, schema: Schema, metrics: Metrics | None) -> None:
        self.path = path
        self.database = Database(path, schema)
        try:
            self.pings = _pings.take(path.parent, lambda: Pings(path.parent))
        except BaseException:
            self.database.close()
            raise
        self.writer = Writer(self.database, self.pings, metrics=metrics)

    @staticmethod
    def open(folder: str | Path, name: str, schema: Schema, *, metrics: Metrics | None = None) -> File:
        """The file `name` of a folder, made where it is missing; to be released by whoever opened it."""
        try:
            path = Path(folder).expanduser().resolve() / name
        except OSError as error:
            raise from_os(error, Path(folder)) from error
        return _files.take(path, lambda: File(path, schema, metrics))

    def release(self) -> None:
        """Let go of it; the last one waits for what was posted and closes it."""
        _files.give_back(self.path, self)

    def close(self) -> None:
        """Called by the last release."""
        self.writer.close()
        _pings.give_back(self.path.parent, self.pings)
        self.database.close()


_files: _Shared[File] = _Shared()
_pings: _Shared[Pings] = _Shared()


def _after_fork() -> None:
    # A forked child begins with nothing open; the lock may have been held by a thread that it does not have.
    _files.__init__()  # type: ignore[misc]
    _pings.__init__()  # type: ignore[misc]


os.register_at_fork(after_in_child=_after_fork)
