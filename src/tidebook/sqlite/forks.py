"""Fork safety: close every SQLite connection before a fork, and reopen it on its next use in the parent.

SQLite tracks in memory which files the process has open and which POSIX locks it holds on them. A fork copies that
memory but not the locks: a child that opened the same file would rely on locks that it does not hold, and lose commits.
A fork also copies SQLite's mutexes, which a thread that does not exist in the child may hold forever. So the forking
thread first waits until no other thread is inside SQLite, and closes all connections. If that fails, the child refuses
to open files.
"""

from __future__ import annotations

import ctypes
import os
import stat
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from tidebook.core.errors import InvalidInput

#: How long a fork waits for statements of other threads; longer than a writer waits for the file's lock.
FORK_S_MAX = 15.0


class _Closable(Protocol):
    def close(self) -> object: ...


class _ClosesInChild(Protocol):
    def close_in_child(self) -> None: ...


C = TypeVar("C", bound=_Closable)
#: Open objects with descriptors, locks or other state of the parent; a forked child calls their `close_in_child`.
open_objects: weakref.WeakSet[_ClosesInChild] = weakref.WeakSet()


class GuardedConnection(Generic[C]):
    """A connection that one thread uses at a time: `with guarded as connection`.

    The first use, and the first one after a fork, calls `open`, which raises if the connection may no longer be used.
    `before_fork` is called with an open connection before a fork closes it.
    """

    __slots__ = ("__weakref__", "_before_fork", "_connection", "_lock", "_open")

    def __init__(self, open: Callable[[], C], *, before_fork: Callable[[C], object] | None = None) -> None:
        self._open = open
        self._before_fork = before_fork
        # Reentrant: if a signal handler forks during a read, the read fails instead of waiting for itself.
        self._lock = threading.RLock()
        self._connection: C | None = None
        with _registering:
            _guards.add(self)

    def __enter__(self) -> C:
        self._lock.acquire()
        connection = self._connection
        if connection is None:
            try:
                connection = self._connection = self._open()
            except BaseException:
                self._lock.release()
                raise
        return connection

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._lock.release()

    def close(self) -> None:
        """Wait until no thread uses the connection, then close it."""
        with self._lock:
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.close()

    def _close_for_fork(self, fork: _Fork) -> bool:
        if not fork.take(self._lock):
            return False
        if self._connection is not None:
            try:
                if self._before_fork is not None:
                    self._before_fork(self._connection)
                self._connection.close()
            except Exception:  # a hook cannot prevent the fork: the child refuses to open files instead
                return False
            self._connection = None
        return True

    def _abandon(self) -> None:
        """In a child: drop the parent's connection without ever closing it, not even when the interpreter exits."""
        self._lock = threading.RLock()
        connection, self._connection = self._connection, None
        if connection is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))


class _Fork:
    """A fork in progress: the locks that the forking thread holds, and whether all connections were closed."""

    def __init__(self) -> None:
        self.clean = False
        self._deadline = time.monotonic() + FORK_S_MAX
        self._taken: list[Any] = []

    def take(self, lock: Any) -> bool:
        if lock.acquire(timeout=max(0.0, self._deadline - time.monotonic())):
            self._taken.append(lock)
            return True
        return False

    def release_all(self) -> None:
        for lock in reversed(self._taken):
            lock.release()


_guards: weakref.WeakSet[GuardedConnection[Any]] = weakref.WeakSet()
#: The forks under way by thread, innermost last: a signal handler may fork while its thread forks.
_forks: dict[int, list[_Fork]] = {}
#: Lock order: `_opening`, then `_registering`, then the lock of each connection.
_opening = threading.RLock()
_registering = threading.RLock()
#: Regular files (device, inode) that were open when this process was forked.
_inherited: frozenset[tuple[int, int]] = frozenset()
#: Whether this process was forked while another thread was inside SQLite.
_forked_inside_sqlite = False


def no_fork() -> AbstractContextManager[object]:
    """Block forks by other threads, while opening or closing files or taking file locks."""
    return _opening


def refuse_inherited(path: Path) -> None:
    """Raise InvalidInput if SQLite's in-memory state for `path` was inherited from the parent process."""
    if _forked_inside_sqlite:
        raise InvalidInput(
            f"{path}: this process was forked while another thread was inside SQLite: start processes with 'spawn' or "
            "'forkserver', or fork before the first book is opened"
        )
    if not _inherited:
        return
    try:
        stats = path.stat()
    except OSError:
        return
    if (stats.st_dev, stats.st_ino) in _inherited:
        raise InvalidInput(
            f"{path} was open when this process was forked, and SQLite cannot share it with the parent: close it "
            "before the fork, or start the process with 'spawn' (multiprocessing.get_context('spawn'))"
        )


def _before() -> None:
    fork = _Fork()
    _forks.setdefault(threading.get_ident(), []).append(fork)
    taken = [fork.take(_opening), fork.take(_registering)]
    fork.clean = all([*taken, *(guard._close_for_fork(fork) for guard in list(_guards))])


def _in_parent() -> None:
    under_way = _forks.get(threading.get_ident())
    if under_way:
        under_way.pop().release_all()
    if not under_way:
        _forks.pop(threading.get_ident(), None)


def _in_child() -> None:
    global _opening, _registering, _inherited, _forked_inside_sqlite
    under_way = _forks.get(threading.get_ident())
    _forked_inside_sqlite = _forked_inside_sqlite or not under_way or not under_way[-1].clean
    _forks.clear()
    _opening, _registering = threading.RLock(), threading.RLock()
    for guard in list(_guards):
        guard._abandon()
    _guards.clear()
    _inherited = _open_files()
    opened = list(open_objects)
    open_objects.clear()
    for each in opened:
        try:
            each.close_in_child()
        except OSError:  # another thread of the parent had just closed it
            pass


def _open_files() -> frozenset[tuple[int, int]]:
    """Return the regular files that this process has open, including those that the application opened."""
    folder = next(filter(os.path.isdir, ("/proc/self/fd", "/dev/fd")), None)
    found = set()
    for name in os.listdir(folder) if folder else ():
        try:
            stats = os.fstat(int(name))
        except OSError:  # the descriptor of the listing itself
            continue
        if stat.S_ISREG(stats.st_mode):
            found.add((stats.st_dev, stats.st_ino))
    return frozenset(found)


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
