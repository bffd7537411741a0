"""A lock that one open book holds for as long as its process lives: the kernel releases it when the process ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from tidebook.sqlite.errors import from_os
from tidebook.sqlite.forks import no_fork, open_objects


class ProcessLock:
    """A lock on a separate file of a book's folder, which nothing else opens.

    It is not fair and nobody waits in it: a process tries from time to time. Two locks on one file exclude each other
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
        """Take the lock; return False if another holder has it, or if the folder does not exist."""
        if self._file is not None:
            return True
        with no_fork():
            try:
                file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except FileNotFoundError:
                return False
            except OSError as error:
                raise from_os(error, self._path) from error
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(file)
                return False
            except OSError as error:
                os.close(file)
                raise from_os(error, self._path) from error
            self._file = file
            open_objects.add(self)
        return True

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
