"""What SQLite and the file system report, as Tidebook's own errors. Nowhere else are they translated."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import apsw

from tidebook.core.errors import Corrupt, InvalidInput, OutcomeUnknown, TidebookError, Unavailable

_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG}
_REFUSED |= {errno.ENOENT, errno.ELOOP, errno.EINVAL}
_FULL = {errno.ENOSPC, errno.EDQUOT}
#: Less than this is no room: the file that all readers of a book share takes as much.
_ROOM_BYTES_LEAST = 32_768
#: Results of a COMMIT after which the log of SQLite may hold the whole transaction, or not.
_UNKNOWN = {apsw.SQLITE_IOERR_FSYNC, apsw.SQLITE_IOERR_DIR_FSYNC, apsw.SQLITE_IOERR_CLOSE}


def from_os(error: OSError, path: Path) -> TidebookError:
    """The file system refused or failed something at `path`."""
    told = error.strerror or str(error)
    if error.errno in _REFUSED:
        return InvalidInput(f"{path} cannot be used as a book's folder: {told}: give a folder that may be written")
    if error.errno in _FULL:
        return Unavailable(f"{path}: the disk is full: {told}: make room, then try again")
    return Unavailable(f"{path}: {told}")


def from_sqlite(error: apsw.Error, path: Path) -> TidebookError:
    """SQLite failed something other than a commit."""
    if isinstance(error, apsw.FullError):
        return Unavailable(f"{path}: the disk is full, nothing was changed: make room, then try again")
    if isinstance(error, apsw.CorruptError | apsw.NotADBError):
        return Corrupt(f"{path} is damaged ({error}): it is left as it is; restore a copy of it")
    if isinstance(error, apsw.BusyError | apsw.LockedError):
        return Unavailable(f"{path} is locked by a program that does not let go: {error}")
    if isinstance(error, apsw.ReadOnlyError | apsw.PermissionsError | apsw.AuthError | apsw.CantOpenError):
        return Unavailable(f"{path} cannot be opened or written: {error}")
    if isinstance(error, apsw.IOError):
        if _extended(error) == apsw.SQLITE_IOERR_CORRUPTFS:
            return Corrupt(f"{path}: the file system is damaged: {error}")
        if _is_full(path):
            return Unavailable(f"{path}: the disk is full ({error}): make room, then try again")
        return Unavailable(f"{path}: reading or writing failed: {error}")
    return Unavailable(f"{path}: {type(error).__name__}: {error}")


def _is_full(path: Path) -> bool:
    try:
        told = os.statvfs(path.parent)
    except OSError:
        return False
    return told.f_bavail * told.f_frsize < _ROOM_BYTES_LEAST


def _extended(error: apsw.Error) -> int:
    return int(getattr(error, "extendedresult", 0))


def from_commit(error: apsw.Error, path: Path) -> TidebookError:
    """SQLite failed a commit: only a failed sync leaves it open whether the transaction is there after a crash."""
    if isinstance(error, apsw.IOError) and _extended(error) in _UNKNOWN:
        return OutcomeUnknown(f"{path}: the disk did not confirm what was written: {error}")
    return from_sqlite(error, path)
