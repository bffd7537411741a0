"""Signs of damage that SQLite would take for a new or a finished file, looked for before it opens one."""

from __future__ import annotations

from pathlib import Path

from tidebook.core.errors import Corrupt
from tidebook.folder.failures import from_os

_HEADER = b"SQLite format 3\x00"
_HEADER_BYTES = 100
_WAL_MAGIC = (b"\x37\x7f\x06\x82", b"\x37\x7f\x06\x83")
_WAL_HEADER_BYTES, _FRAME_HEADER_BYTES = 32, 24


def look_for_damage(path: Path) -> None:
    """Raise Corrupt where `path`, or the write-ahead file beside it, cannot be what SQLite left behind.

    Only before this process has opened the file with SQLite: closing any other handle of it drops SQLite's locks.
    """
    wal = path.with_name(path.name + "-wal")
    try:
        wal_start = _start_of(wal, 4)
        if not path.exists():
            if wal.exists():  # it stays for good, even when it is empty: only `path` can have been lost
                raise Corrupt(f"{wal} is there, but {path.name} is not: restore a copy, or remove both to begin anew")
            return
        start = _start_of(path, _HEADER_BYTES)
    except OSError as error:
        raise from_os(error, path) from error
    if len(start) < _HEADER_BYTES:
        raise Corrupt(f"{path} has only {len(start)} bytes: it was cut off; restore a copy of it")
    if not start.startswith(_HEADER):
        raise Corrupt(f"{path} is no SQLite file: it is left as it is; restore a copy of it")
    if wal_start and wal_start not in _WAL_MAGIC and wal_start.strip(b"\x00"):
        raise Corrupt(f"{wal} is damaged: what was written last is in it; restore a copy of both files")


def look_for_missing_pages(path: Path, *, pages: int, page_bytes: int) -> None:
    """Raise Corrupt where pages are neither in the file nor in the write-ahead file beside it."""
    there = path.stat().st_size // page_bytes
    if there >= pages:
        return
    missing = set(range(there + 1, pages + 1))
    wal = path.with_name(path.name + "-wal")
    if wal.exists():
        with wal.open("rb") as file:
            at = _WAL_HEADER_BYTES
            while missing:
                file.seek(at)
                frame = file.read(4)
                if len(frame) < 4:
                    break
                missing.discard(int.from_bytes(frame, "big"))
                at += _FRAME_HEADER_BYTES + page_bytes
    if missing:
        raise Corrupt(f"{path} lacks {len(missing):,} of its {pages:,} pages: it was cut off; restore a copy of it")


def _start_of(path: Path, size_bytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(size_bytes)
    except FileNotFoundError:
        return b""
