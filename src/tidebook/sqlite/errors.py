"""Translate errors of SQLite and of the file system into Tidebook's. This is the only place that does."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import apsw

from tidebook.core.errors import Corrupt, InvalidInput, OutcomeUnknown, TidebookError, Unavailable

_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG}
_REFUSED |= {errno.ENOENT, errno.ELOOP, errno.EINVAL}
_FULL = {errno.ENOSPC, errno.EDQUOT}
#: With less free space the disk counts as full: SQLite's shared-memory file alone needs as much.
_FREE_BYTES_MIN = 32_768
#: Results of a COMMIT after which the write-ahead log may or may not hold the transaction.
_UNKNOWN = {apsw.SQLITE_IOERR_FSYNC, apsw.SQLITE_IOERR_DIR_FSYNC, apsw.SQLITE_IOERR_CLOSE}


def from_os(error: OSError, path: Path) -> TidebookError:
    """Return the error for a failed file operation at `path`."""
    reason = error.strerror or str(error)
    if error.errno in _REFUSED:
        return InvalidInput(
            f"{path} cannot be used for a book: {reason}: use a folder that this user may write, with its files"
        )
    if error.errno in _FULL:
        return Unavailable(f"{path}: the disk is full: {reason}: make room, then try again")
    return Unavailable(f"{path}: {reason}")


def from_sqlite(error: apsw.Error, path: Path) -> TidebookError:
    """Return the error for a failed statement other than COMMIT."""
    if isinstance(error, apsw.FullError):
        return Unavailable(f"{path}: the disk is full, nothing was changed: make room, then try again")
    if isinstance(error, apsw.CorruptError | apsw.NotADBError):
        return Corrupt(f"{path} is damaged ({error}): it was not changed; restore a copy of it")
    if isinstance(error, apsw.BusyError | apsw.LockedError):
        return Unavailable(f"{path} is locked by another program, which does not release it: {error}")
    if isinstance(error, apsw.ReadOnlyError | apsw.PermissionsError | apsw.AuthError | apsw.CantOpenError):
        return Unavailable(f"{path} cannot be opened or written: {error}")
    if isinstance(error, apsw.IOError):
        if _extended(error) == apsw.SQLITE_IOERR_DATA:
            return Corrupt(f"{path} is damaged: a page does not match its checksum; restore a copy of it")
        if _extended(error) == apsw.SQLITE_IOERR_CORRUPTFS:
            return Corrupt(f"{path}: the file system is damaged: {error}")
        if _is_full(path):
            return Unavailable(f"{path}: the disk is full ({error}): make room, then try again")
        return Unavailable(f"{path}: reading or writing failed: {error}")
    return Unavailable(f"{path}: {type(error).__name__}: {error}")


def _is_full(path: Path) -> bool:
    try:
        stats = os.statvfs(path.parent)
    except OSError:
        return False
    return stats.f_bavail * stats.f_frsize < _FREE_BYTES_MIN


def _extended(error: apsw.Error) -> int:
    return int(getattr(error, "extendedresult", 0))


def from_commit(error: apsw.Error, path: Path) -> TidebookError:
    """Return the error for a failed COMMIT: OutcomeUnknown if a sync failed, since a crash may keep or lose it."""
    if isinstance(error, apsw.IOError) and _extended(error) in _UNKNOWN:
        return OutcomeUnknown(f"{path}: the disk did not confirm what was written: {error}")
    return from_sqlite(error, path)
