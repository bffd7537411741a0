"""Connections that check every page they read: SQLite's checksum VFS keeps a checksum in each page of a file.

A flipped bit, wherever it is, makes the read fail instead of returning a wrong row or missing one.
"""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path
from typing import Any

import apsw
import apsw.sqlite_extra

from tidebook.core.errors import Unavailable

#: How many bytes of each page hold its checksum.
CHECKSUM_BYTES = 8
_EXTENSION, _VFS = "cksumvfs", "cksmvfs"
_loading = threading.Lock()


def connect(path: Path, **options: Any) -> apsw.Connection:
    """Open a file whose pages have checksums; `options` are those of `apsw.Connection`."""
    _load()
    return apsw.Connection(str(path), vfs=_VFS, **options)


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
