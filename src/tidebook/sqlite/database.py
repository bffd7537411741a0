"""One SQLite file of a book's folder: created atomically, upgraded, and never recreated over a damaged one."""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import struct
import threading
from contextlib import suppress
from pathlib import Path

import apsw
import msgspec

from tidebook.core.errors import Corrupt, InvalidInput, Unavailable, UnknownVersion
from tidebook.sqlite.checksums import connect, find_damage, has_checksums, reserve_checksums
from tidebook.sqlite.errors import from_os, from_sqlite
from tidebook.sqlite.fair_lock import FairLock
from tidebook.sqlite.forks import GuardedConnection, no_fork, open_objects, refuse_inherited

BUSY_MS_MAX = 5_000
LOCK_S_MAX = 10.0
#: The size of the pages in the write-ahead log at which a commit starts a checkpoint.
CHECKPOINT_BYTES = 16_384_000
WAL_BYTES_KEPT = 64_000_000
_READ_CACHE_KIB, _WRITE_CACHE_KIB = 4_096, 16_384
_STATEMENTS_CACHED = 200
_HEADER = b"SQLite format 3\x00"
_HEADER_BYTES = 100
_WAL_MAGIC = (b"\x37\x7f\x06\x82", b"\x37\x7f\x06\x83")
_WAL_HEADER_BYTES, _FRAME_HEADER_BYTES = 32, 24
#: Where the headers hold the salt, which is new after each reset of the log, the page count of a commit, and the
#: checksum of all frames so far.
_WAL_SALT, _FRAME_COMMIT, _FRAME_SALT, _FRAME_CHECKSUM = slice(16, 24), slice(4, 8), slice(8, 16), slice(16, 24)


class Schema(msgspec.Struct, frozen=True):
    """The SQL steps of a schema: each upgrades a file by one version. Steps are appended, never changed."""

    name: str
    #: SQLite's `application_id`, which identifies the program that owns a file.
    application_id: int
    steps: tuple[str, ...]
    #: The page size of a new file. A commit writes whole pages.
    page_bytes: int = 4_096

    @property
    def version(self) -> int:
        return len(self.steps)


class Database:
    """The connections to one file: one for the writer, and one for each thread that reads.

    Opening it creates the file if it is missing. Raise Corrupt if the file is damaged or belongs to another program,
    and UnknownVersion if a later version of Tidebook wrote it.
    """

    def __init__(self, path: Path, schema: Schema) -> None:
        self.path = path
        self.schema = schema
        self.forked = self.closed = False
        self._of_thread = threading.local()
        self._readers: dict[threading.Thread, GuardedConnection[apsw.Connection]] = {}
        #: The writer's connection.
        self.writing = self._guarded(writable=True)
        with no_fork():
            refuse_inherited(path)
            self.lock = FairLock(path)
            try:
                self.lock.acquire(LOCK_S_MAX)
                try:
                    _check_headers(path)
                    if not path.exists():
                        _create(path, schema)
                    with self.writing as connection:
                        self._check(connection)
                finally:
                    self.lock.release()
            except BaseException:
                self.writing.close()
                self.lock.close()
                raise
            open_objects.add(self)

    def reading(self) -> GuardedConnection[apsw.Connection]:
        """Return this thread's read-only connection: `with database.reading() as connection`.

        Do not await or yield inside the block: an open cursor prevents checkpoints, and `close` and forks wait for it.
        """
        try:
            guarded: GuardedConnection[apsw.Connection] = self._of_thread.guarded
        except AttributeError:
            self._close_readers_of_ended_threads()
            guarded = self._of_thread.guarded = self._guarded(writable=False)
            self._readers[threading.current_thread()] = guarded
        return guarded

    def _close_readers_of_ended_threads(self) -> None:
        ended = [thread for thread in list(self._readers) if not thread.is_alive()]
        if ended:  # otherwise a new reader would wait for a `close` that waits for other readers
            with no_fork():
                for thread in ended:
                    if (guarded := self._readers.pop(thread, None)) is not None:
                        guarded.close()

    def check_usable(self) -> None:
        """Raise if the database is closed, or was opened before a fork, which SQLite connections do not survive."""
        if self.closed:
            raise Unavailable(f"{self.path} is closed")
        if self.forked:
            raise InvalidInput(f"{self.path} was opened before this process forked: open the book again in the child")

    def failure(self, error: apsw.Error) -> Exception:
        """Translate the error of a failed read."""
        return from_sqlite(error, self.path)

    def damage(self) -> list[str]:
        """Read the whole file and return the problems that SQLite finds; an empty list if there are none."""
        try:
            with self.reading() as connection:
                return find_damage(connection)
        except apsw.Error as error:
            return [str(error)]

    def close(self) -> None:
        """Wait for reads in progress, then close every connection and refuse new ones.

        The last process that closes the file checkpoints its write-ahead log.
        """
        self.closed = True
        if self.forked:
            return
        with no_fork():
            open_objects.discard(self)
            for guarded in [*list(self._readers.values()), self.writing]:
                guarded.close()
            self.lock.close()

    def close_in_child(self) -> None:
        """In a forked child: refuse every use, and close the inherited descriptors of the lock."""
        self.forked = True
        self.lock.close()

    def _guarded(self, *, writable: bool) -> GuardedConnection[apsw.Connection]:
        # Do not checkpoint before a fork: it may take long, and the parent opens the file again at once.
        return GuardedConnection(
            lambda: self._connect(writable=writable),
            before_fork=lambda connection: connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1),
        )

    def _connect(self, *, writable: bool) -> apsw.Connection:
        self.check_usable()
        try:
            connection = connect(self.path, flags=apsw.SQLITE_OPEN_READWRITE, statementcachesize=_STATEMENTS_CACHED)
            connection.set_busy_timeout(BUSY_MS_MAX)
            # Query plans must not depend on bound values: otherwise SQLite compiles a statement again for new values.
            connection.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)
            # Keep the write-ahead log and its shared-memory file when the last connection closes: on a full disk they
            # could not be created again.
            persist = ctypes.c_int(1)
            connection.file_control("main", apsw.SQLITE_FCNTL_PERSIST_WAL, ctypes.addressof(persist))
            connection.execute(  # fetch the rows: a statement that returns one blocks those after it
                f"""PRAGMA synchronous = FULL; PRAGMA fullfsync = ON; PRAGMA foreign_keys = ON;
                PRAGMA trusted_schema = OFF; PRAGMA cell_size_check = ON;
                PRAGMA journal_size_limit = {WAL_BYTES_KEPT};
                PRAGMA cache_size = -{_WRITE_CACHE_KIB if writable else _READ_CACHE_KIB};
                PRAGMA query_only = {"OFF" if writable else "ON"}"""
            ).fetchall()
            connection.set_wal_hook(self._on_commit)  # replaces SQLite's automatic checkpoints
        except apsw.Error as error:
            raise _from_opening(error, self.path) from error
        return connection

    def _on_commit(self, connection: apsw.Connection, _: str, pages: int) -> int:
        """Checkpoint if the write-ahead log is long; a failure must not look like one of the commit, which is done."""
        if pages >= CHECKPOINT_BYTES // self.schema.page_bytes:
            with suppress(apsw.Error):  # the disk is full, or another process checkpoints: a later commit tries again
                connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
        return apsw.SQLITE_OK

    def _check(self, connection: apsw.Connection) -> None:
        # A file that is rejected must not be checkpointed on close: that would hide which pages are missing.
        connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        try:
            owner, version = connection.pragma("application_id"), connection.pragma("user_version")
            if owner != self.schema.application_id:
                raise Corrupt(f"{self.path} is not Tidebook's {self.schema.name}: it was not changed")
            if not has_checksums(connection):
                raise Corrupt(f"{self.path} has no checksums in its pages: it was not changed; restore a copy of it")
            if version > self.schema.version:
                raise UnknownVersion(str(self.path), version=version, known=self.schema.version)
            if connection.pragma("journal_mode") != "wal":
                raise Corrupt(f"{self.path} was changed by another program: it is no longer in WAL mode")
            page_bytes = connection.pragma("page_size")
            _check_page_count(self.path, pages=connection.pragma("page_count"), page_bytes=page_bytes)
            frames, _ = connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_NOOP)
            _check_wal_end(self.path, frames=frames, page_bytes=page_bytes)
            if version < self.schema.version:
                _upgrade(connection, self.schema, version)
            connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 0)
        except apsw.Error as error:
            raise _from_opening(error, self.path) from error


def _create(path: Path, schema: Schema) -> None:
    # Create under a temporary name, then rename, so that an empty or incomplete file under the real name is always
    # damage.
    new = path.with_name(f"{path.name}.new-{secrets.token_hex(4)}")
    try:
        connection = connect(new)
        connection.pragma("page_size", schema.page_bytes)
        reserve_checksums(connection)
        connection.execute("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL").fetchall()
        _upgrade(connection, schema, 0)
        connection.close()
        sync(new)
        os.rename(new, path)
        sync_folders(path.parent)
    except apsw.Error as error:
        raise _from_opening(error, path) from error
    except OSError as error:
        raise from_os(error, path) from error
    finally:
        for leftover in path.parent.glob(f"{new.name}*"):
            leftover.unlink()


def _upgrade(connection: apsw.Connection, schema: Schema, version: int) -> None:
    connection.execute("BEGIN IMMEDIATE")
    try:
        for step in schema.steps[version:]:
            connection.execute(step)
        connection.pragma("application_id", schema.application_id)
        connection.pragma("user_version", schema.version)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _from_opening(error: apsw.Error, path: Path) -> Exception:
    if isinstance(error, apsw.CantOpenError):
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as too_many:
            if too_many.errno in (errno.EMFILE, errno.ENFILE):
                return Unavailable(
                    f"{path} cannot be opened: this process has too many open files; raise its limit (ulimit -n)"
                )
    if isinstance(error, apsw.ReadOnlyError | apsw.PermissionsError | apsw.CantOpenError):
        return InvalidInput(f"{path} cannot be opened for writing: {error}: use a writable folder")
    return from_sqlite(error, path)


def _check_headers(path: Path) -> None:
    """Raise Corrupt if `path` or its write-ahead log has a header that SQLite cannot have written. Call before opening.

    The database file is read through SQLite's VFS: if this process closed its own file descriptor, the kernel
    would drop all POSIX locks that SQLite holds on the file. SQLite holds none on the write-ahead log.
    """
    wal = path.with_name(path.name + "-wal")
    try:
        if not path.exists():
            if wal.exists():  # it is never removed (SQLITE_FCNTL_PERSIST_WAL), so the database must have existed
                raise Corrupt(f"{wal} exists, but {path.name} does not: restore a copy, or remove both to start empty")
            return
        size_bytes = min(path.stat().st_size, _HEADER_BYTES)
        file = apsw.VFSFile("", str(path), [apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_MAIN_DB, 0])
        try:
            header = file.xRead(size_bytes, 0) if size_bytes else b""
        finally:
            file.xClose()
        wal_header = b""
        if wal.exists():
            with wal.open("rb") as wal_file:
                wal_header = wal_file.read(4)
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


def _check_page_count(path: Path, *, pages: int, page_bytes: int) -> None:
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


def _check_wal_end(path: Path, *, frames: int, page_bytes: int) -> None:
    """Raise Corrupt if SQLite stopped reading the write-ahead log inside a transaction that was synced.

    SQLite reads up to the first damaged frame. A power cut may damage the last transaction, which was never
    acknowledged; but a frame that continues after a commit is written only once that commit was synced.
    """
    wal = path.with_name(path.name + "-wal")
    if not wal.exists():
        return
    frame_bytes = _FRAME_HEADER_BYTES + page_bytes
    with wal.open("rb") as file:
        log_header = file.read(_WAL_HEADER_BYTES)
        order = ">" if log_header.startswith(_WAL_MAGIC[1]) else "<"
        file.seek(_WAL_HEADER_BYTES + frames * frame_bytes)
        commit = b""
        while len(frame := file.read(frame_bytes)) == frame_bytes:
            of_this_log = frame[_FRAME_SALT] == log_header[_WAL_SALT]
            if commit and of_this_log and _continues(commit, frame, order):
                raise Corrupt(f"{wal} is damaged at frame {frames + 1:,}: restore a copy of both files")
            commit = frame if of_this_log and any(frame[_FRAME_COMMIT]) else b""


def _continues(previous: bytes, frame: bytes, order: str) -> bool:
    """Return whether the checksum of a frame continues that of the previous one."""
    low, high = struct.unpack(">2I", previous[_FRAME_CHECKSUM])
    checked = frame[:8] + frame[_FRAME_HEADER_BYTES:]
    words = struct.unpack(f"{order}{len(checked) // 4}I", checked)
    for first, second in zip(words[::2], words[1::2], strict=True):
        low = (low + first + high) & 0xFFFF_FFFF
        high = (high + second + low) & 0xFFFF_FFFF
    return (low, high) == struct.unpack(">2I", frame[_FRAME_CHECKSUM])


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents durably; raise InvalidInput if the path cannot be used as a folder."""
    try:
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            sync_folders(folder)
    except OSError as error:
        raise from_os(error, folder) from error


def sync_folders(folder: Path) -> None:
    """Sync a folder and its parents on the same device: a directory entry is durable once its folder is synced.

    All parents are synced, since a process that was killed may have created some of them without syncing them.
    """
    device = folder.stat().st_dev
    for parent in (folder, *folder.absolute().parents):
        if parent.stat().st_dev != device:
            return
        try:
            sync(parent)
        except PermissionError:  # this user cannot have created a folder that it may not read
            return


def sync(path: Path) -> None:
    """Sync a folder or a file. Nothing else in this process may have the file open: closing it drops POSIX locks."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
