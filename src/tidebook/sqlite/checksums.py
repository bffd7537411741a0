"""Connections that check every page they read: SQLite's checksum VFS keeps a checksum in each page of a file.

A flipped bit, wherever it is, makes the read fail instead of returning a wrong row or missing one.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import apsw
import apsw.sqlite_extra

from tidebook.core.errors import Unavailable

#: How many bytes of each page hold its checksum.
CHECKSUM_BYTES = 8
#: How long a check waits for another program that has locked the file.
BUSY_MS = 10_000
_EXTENSION, _VFS = "cksumvfs", "cksmvfs"
_loading = threading.Lock()


def connect(path: Path, **options: Any) -> apsw.Connection:
    """Open a file whose pages have checksums; `options` are those of `apsw.Connection`."""
    _load()
    return apsw.Connection(str(path), vfs=_VFS, **options)


class _Connection(Protocol):
    """A connection of apsw or of the standard library."""

    def execute(self, statements: str, /) -> Iterable[Any]: ...


def find_damage(connection: _Connection, problems_max: int = 100) -> list[str]:
    """Read every page of an open file and return the problems that SQLite finds; an empty list if there are none.

    Raise the connection's own error if a page cannot be read, or does not match its checksum.
    """
    found = [str(line) for (line,) in connection.execute(f"PRAGMA quick_check({problems_max})")]
    return [] if found == ["ok"] else found


def find_file_damage(path: Path, problems_max: int = 100) -> list[str]:
    """Open a file that processes may be using, and return its problems and the errors of reading it."""
    in_use = path.with_name(f"{path.name}-wal").exists()
    try:
        connection = connect(path, flags=apsw.SQLITE_OPEN_READWRITE)
        try:
            connection.set_busy_timeout(BUSY_MS)
            connection.pragma("query_only", True)
            if in_use:  # keep an existing write-ahead file; one that this check creates is removed on close
                connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
            return find_damage(connection, problems_max)
        finally:
            connection.close()
    except apsw.Error as error:
        return [str(error)]


def reserve_checksums(connection: apsw.Connection) -> None:
    """Make room for the checksums in the pages of a new file. Call before the first write."""
    _reserved_bytes(connection, CHECKSUM_BYTES)


def has_checksums(connection: apsw.Connection) -> bool:
    """Return whether the pages of a file have checksums; SQLite would read others without checking them."""
    return _reserved_bytes(connection, -1) == CHECKSUM_BYTES


def _reserved_bytes(connection: apsw.Connection, wanted: int) -> int:
    """Return how many bytes of each page are reserved, after reserving `wanted` unless it is negative."""
    reserved = ctypes.c_int(wanted)
    connection.file_control("main", apsw.SQLITE_FCNTL_RESERVE_BYTES, ctypes.addressof(reserved))
    return reserved.value


def _load() -> None:
    with _loading:
        if _VFS in apsw.vfs_names():
            return
        default = apsw.vfs_names()[0]
        loader = apsw.Connection(":memory:")
        try:
            apsw.sqlite_extra.load(loader, _EXTENSION)
        except (apsw.sqlite_extra.NotAvailable, apsw.ExtensionLoadingError) as error:
            raise Unavailable(
                f"this build of apsw has no {_EXTENSION}, which checks the pages of a book's files ({error}): "
                "install apsw from its wheel"
            ) from error
        finally:
            loader.close()
            apsw.set_default_vfs(default)  # the extension made its own the default, also for other users of apsw
