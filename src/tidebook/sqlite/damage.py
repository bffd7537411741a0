"""Checks for damage that SQLite itself would not notice: it takes a truncated or missing file for an empty one."""

from __future__ import annotations

from pathlib import Path

import apsw

from tidebook.core.errors import Corrupt
from tidebook.sqlite.errors import from_os, from_sqlite

_HEADER = b"SQLite format 3\x00"
_HEADER_BYTES = 100
_WAL_MAGIC = (b"\x37\x7f\x06\x82", b"\x37\x7f\x06\x83")
_WAL_HEADER_BYTES, _FRAME_HEADER_BYTES = 32, 24


def check_headers(path: Path) -> None:
    """Raise Corrupt if `path` or its write-ahead log has a header that SQLite cannot have written. Call before opening.

    The database file is read through SQLite's VFS: if this process closed a file descriptor of its own, the kernel
    would drop all POSIX locks that SQLite holds on the file. SQLite holds none on the write-ahead log.
    """
    wal = path.with_name(path.name + "-wal")
    try:
        wal_header = _wal_header(wal)
        if not path.exists():
            if wal.exists():  # it is never removed (SQLITE_FCNTL_PERSIST_WAL), so the database must have existed
                raise Corrupt(f"{wal} exists, but {path.name} does not: restore a copy, or remove both to start empty")
            return
        header = _database_header(path)
    except OSError as error:
        raise from_os(error, path) from error
    except apsw.Error as error:
        raise from_sqlite(error, path) from error
    if len(header) < _HEADER_BYTES:
        raise Corrupt(f"{path} has only {len(header)} bytes: it was truncated; restore a copy of it")
    if not header.startswith(_HEADER):
        raise Corrupt(f"{path} is not a SQLite file: it was not changed; restore a copy of it")
    if wal_header and wal_header not in _WAL_MAGIC and wal_header.strip(b"\x00"):
        raise Corrupt(f"{wal} is damaged, and it holds the latest writes: restore a copy of both files")


def check_page_count(path: Path, *, pages: int, page_bytes: int) -> None:
    """Raise Corrupt if any of the database's `pages` is neither in the file nor in its write-ahead log."""
    in_file = path.stat().st_size // page_bytes
    if in_file >= pages:
        return
    missing = set(range(in_file + 1, pages + 1))
    wal = path.with_name(path.name + "-wal")
    if wal.exists():
        with wal.open("rb") as file:
            frame_start = _WAL_HEADER_BYTES
            while missing:
                file.seek(frame_start)
                page_number = file.read(4)
                if len(page_number) < 4:
                    break
                missing.discard(int.from_bytes(page_number, "big"))
                frame_start += _FRAME_HEADER_BYTES + page_bytes
    if missing:
        raise Corrupt(f"{path} lacks {len(missing):,} of its {pages:,} pages: it was truncated; restore a copy of it")


def _database_header(path: Path) -> bytes:
    size_bytes = min(path.stat().st_size, _HEADER_BYTES)
    file = apsw.VFSFile("", str(path), [apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_MAIN_DB, 0])
    try:
        return file.xRead(size_bytes, 0) if size_bytes else b""
    finally:
        file.xClose()


def _wal_header(wal: Path) -> bytes:
    try:
        with wal.open("rb") as file:
            return file.read(4)
    except FileNotFoundError:
        return b""
