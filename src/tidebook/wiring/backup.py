"""Back up an embedded book while processes use it, and restore it: all files are copied as of one moment."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import apsw
import msgspec

from tidebook.core.errors import Corrupt, InvalidInput, NotFound, Unavailable
from tidebook.sqlite.checksums import connect, find_damage
from tidebook.sqlite.database import BUSY_MS_MAX, LOCK_S_MAX, make_folder, sync, sync_folders
from tidebook.sqlite.errors import from_os, from_sqlite
from tidebook.sqlite.fair_lock import FairLock
from tidebook.sqlite.libraries import closed_by_standard_library, opened_by_standard_library
from tidebook.wiring.outbox import FILE as OUTBOX_FILE
from tidebook.wiring.settings import PROCESS_FILE, check_path

MANIFEST_FILE = "backup.json"
#: The files that are written with the standard library's SQLite, and have no checksums.
BY_STANDARD_LIBRARY = frozenset({OUTBOX_FILE, PROCESS_FILE})
_PAGES_PER_STEP = 1_000

#: Called with the name of a file, how much of it is copied, and its size: in pages, or in bytes for a restore.
Progress = Callable[[str, int, int], None]


class BackupManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Describes a backup. It is written last, so that a folder without it is an incomplete backup."""

    version: int = 1
    made_at: datetime
    #: The size of each file in bytes, by name.
    files: dict[str, int]


def back_up(folder: Path, files: Sequence[str], target: Path, progress: Progress) -> BackupManifest:
    """Copy those of `files` that exist in a book's folder into the new folder `target`.

    Writers wait only until every file has a snapshot, and while the files without checksums are copied. Raise
    NotFound if none of `files` exists, InvalidInput if `target` is not empty, and Corrupt if a page does not match its
    checksum. After any error, no files of the backup remain.
    """
    check_path(target)
    try:
        sources = [folder / file for file in files if (folder / file).exists()]
    except OSError as error:
        raise from_os(error, folder) from error
    if not sources:
        raise NotFound(f"{folder} contains no files of a book: nothing was backed up")
    _refuse_unless_empty(target)
    existed = target.exists()
    make_folder(target)
    try:
        _copy_files(sources, target, progress)
        sizes = {source.name: (target / source.name).stat().st_size for source in sources}
        manifest = BackupManifest(made_at=datetime.now(UTC), files=sizes)
        (target / MANIFEST_FILE).write_bytes(msgspec.json.encode(manifest))
        sync(target / MANIFEST_FILE)
        sync_folders(target)
    except BaseException as error:
        for name in (*files, MANIFEST_FILE):
            for leftover in target.glob(f"{name}*"):
                leftover.unlink()
        if not existed:
            target.rmdir()
        if isinstance(error, OSError):
            raise from_os(error, target) from error
        raise
    return manifest


def _copy_files(sources: Sequence[Path], target: Path, progress: Progress) -> None:
    checked = [source for source in sources if source.name not in BY_STANDARD_LIBRARY]
    with contextlib.ExitStack() as snapshots:
        with contextlib.ExitStack() as locks:
            # A writer holds the lock of one file at a time, so waiting for all of them cannot deadlock.
            for source in checked:
                lock = FairLock(source)
                locks.callback(lock.close)
                lock.acquire(LOCK_S_MAX)
            connections = [_open_snapshot(source, snapshots) for source in checked]
            # While the locks are held, no process manager can store an offset whose effects are not in the snapshots.
            for source in sources:
                if source.name in BY_STANDARD_LIBRARY:
                    _copy_with_standard_library(source, target / source.name, progress)
        for source, connection in zip(checked, connections, strict=True):
            _copy_snapshot(source, connection, target / source.name, progress)


def _open_snapshot(source: Path, closing: contextlib.ExitStack) -> apsw.Connection:
    """Return a connection whose read transaction sees the file as it is now, regardless of later writes."""
    try:
        connection = connect(source, flags=apsw.SQLITE_OPEN_READWRITE)
        closing.callback(connection.close)
        connection.set_busy_timeout(BUSY_MS_MAX)
        connection.pragma("query_only", True)
        connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        connection.execute("BEGIN; SELECT count(*) FROM sqlite_schema").fetchall()
    except apsw.Error as error:
        raise from_sqlite(error, source) from error
    return connection


def _copy_snapshot(source: Path, connection: apsw.Connection, path: Path, progress: Progress) -> None:
    try:
        copy = connect(path)
        try:
            with copy.backup("main", connection, "main") as backup:
                while not backup.done:
                    backup.step(_PAGES_PER_STEP)
                    progress(source.name, backup.page_count - backup.remaining, backup.page_count)
        finally:
            copy.close()
    except apsw.Error as error:
        raise from_sqlite(error, source) from error
    sync(path)


def _copy_with_standard_library(source: Path, path: Path, progress: Progress) -> None:
    """Copy a file with the standard library's SQLite, which its writers use too; they wait until it is copied."""
    with contextlib.ExitStack() as opened:
        opened_by_standard_library(opened, source)
        opened.callback(closed_by_standard_library, opened)
        try:
            locking, reading, copy = (
                opened.enter_context(
                    contextlib.closing(sqlite3.connect(each, timeout=LOCK_S_MAX, isolation_level=None))
                )
                for each in (source, source, path)
            )
            locking.execute("BEGIN IMMEDIATE")
            reading.backup(
                copy, pages=_PAGES_PER_STEP, progress=lambda _, left, pages: progress(source.name, pages - left, pages)
            )
            locking.execute("ROLLBACK")
            damage = find_damage(copy, 1)
        except sqlite3.Error as error:
            raise Unavailable(f"{source} cannot be copied: {error}") from error
    if damage:
        raise Corrupt(f"{source} is damaged ({damage[0]}): restore it from a backup")
    sync(path)


def restore(backup: Path, folder: Path, progress: Progress) -> BackupManifest:
    """Create a book's folder from a backup, and check every page of it.

    Raise NotFound if `backup` has no manifest, Corrupt if a file is missing or damaged, and InvalidInput if `folder`
    is not empty. If this raises, `folder` is unchanged.
    """
    manifest = _read_manifest(backup)
    _refuse_unless_empty(folder)
    make_folder(folder.parent)
    new = folder.with_name(f"{folder.name}.restoring")
    try:
        shutil.rmtree(new, ignore_errors=True)  # left by a restore that was killed
        new.mkdir()
        for name, size_bytes in manifest.files.items():
            source = backup / name
            if not source.is_file() or source.stat().st_size != size_bytes:
                raise Corrupt(f"{source} is missing, or not {size_bytes:,} bytes long: this backup cannot be restored")
            progress(name, 0, size_bytes)
            shutil.copyfile(source, new / name)
            _check(new / name, source)
            progress(name, size_bytes, size_bytes)
        for name in manifest.files:
            sync(new / name)
        sync(new)
        if folder.exists():
            folder.rmdir()
        os.rename(new, folder)
        sync_folders(folder.parent)
    except OSError as error:
        raise from_os(error, folder) from error
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return manifest


def _read_manifest(backup: Path) -> BackupManifest:
    path = backup / MANIFEST_FILE
    try:
        data = path.read_bytes()
    except OSError as error:
        raise NotFound(f"{backup} is not a complete backup: it has no {MANIFEST_FILE}") from error
    try:
        manifest = msgspec.json.decode(data, type=BackupManifest)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"{path} is damaged: {error}") from error
    if manifest.version != 1 or any(Path(name).name != name for name in manifest.files):
        raise Corrupt(f"{path} was not written by this version of Tidebook, or is damaged")
    return manifest


def _refuse_unless_empty(folder: Path) -> None:
    try:
        if folder.exists() and any(folder.iterdir()):
            raise InvalidInput(f"{folder} is not empty: choose a folder that does not exist yet")
    except OSError as error:
        raise from_os(error, folder) from error


def _check(path: Path, source: Path) -> None:
    """Raise Corrupt if a page of a copied file is damaged."""
    try:
        connection = connect(path)
        try:
            damage = find_damage(connection, 1)
        finally:
            connection.close()
    except apsw.Error as error:
        found = from_sqlite(error, source)
        if not isinstance(found, Corrupt):
            raise found from error
        raise Corrupt(f"{source} is damaged: this backup cannot be restored") from error
    if damage:
        raise Corrupt(f"{source} is damaged ({damage[0]}): this backup cannot be restored")
