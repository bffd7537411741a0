"""A lock that one open book holds for as long as its process lives: the kernel releases it when the process ends.

A process that is suspended or hangs keeps the lock. So the holder calls `take` regularly (a beat), and another process
may seize the lock of a holder that is silent: it replaces the file, which the former holder notices at its next beat.
"""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

from tidebook.sqlite.errors import from_os
from tidebook.sqlite.forks import no_fork, open_objects


class ProcessLock:
    """A lock on a separate file of a book's folder, which nothing else opens.

    It is not fair and never blocks, so a process must retry. Two locks on one file exclude each other
    within a process too.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None

    @property
    def held(self) -> bool:
        """Whether this object holds the lock."""
        return self._file is not None

    def take(self) -> bool:
        """Take the lock, or renew a held one; return False if another holder has it or the folder does not exist."""
        if self._file is not None:
            if self._is_current(self._file):
                os.utime(self._file)
                return True
            self.release()
            return False
        with no_fork():
            try:
                file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except FileNotFoundError:
                return False
            except OSError as error:
                raise from_os(error, self._path) from error
            if not self._lock(file) or not self._is_current(file):
                os.close(file)
                return False
            self._hold(file)
        return True

    def last_beat(self) -> int | None:
        """Return a number that changes with each beat of the holder; None if there is no file."""
        try:
            return os.stat(self._path).st_mtime_ns
        except OSError:
            return None

    def seize(self) -> None:
        """Take the lock from its holder; of several processes that do so at once, the last one keeps it."""
        self.release()
        new = self._path.with_name(f"{self._path.name}.{os.getpid()}-{threading.get_ident()}")
        with no_fork():
            try:
                file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except OSError as error:
                raise from_os(error, self._path) from error
            self._lock(file)  # no other process has opened it
            try:
                os.rename(new, self._path)
            except OSError as error:
                os.close(file)
                raise from_os(error, self._path) from error
            self._hold(file)

    def _hold(self, file: int) -> None:
        os.utime(file)
        self._file = file
        open_objects.add(self)

    def _lock(self, file: int) -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            os.close(file)
            raise from_os(error, self._path) from error
        return True

    def _is_current(self, file: int) -> bool:
        """Return whether the file is still the one at the path."""
        try:
            return os.path.samestat(os.fstat(file), os.stat(self._path))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Release the lock, if this object holds it."""
        with no_fork():
            file, self._file = self._file, None
            open_objects.discard(self)
            if file is not None:
                os.close(file)

    def close_in_child(self) -> None:
        """Close the descriptor in a forked child: the lock is held as long as any process has its file open."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)
