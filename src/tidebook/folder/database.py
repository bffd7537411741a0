"""One SQLite file of a book's folder: made whole or not at all, never made again over damage."""

from __future__ import annotations

import ctypes
import os
import secrets
import threading
import weakref
from pathlib import Path

import apsw

from tidebook.core.errors import Corrupt, InvalidInput, Unavailable, UnknownVersion
from tidebook.folder.damage import look_for_damage, look_for_missing_pages
from tidebook.folder.failures import from_os, from_sqlite
from tidebook.folder.lock import FairLock
from tidebook.folder.schema import Schema

BUSY_MS_MAX = 5_000
LOCK_S_MAX = 10.0
#: Pages that a commit may leave in the write-ahead file before it is taken over into the database.
CHECKPOINT_PAGES = 4_000
WAL_BYTES_KEPT = 64_000_000
_READ_CACHE_KIB, _WRITE_CACHE_KIB = 4_096, 16_384
_STATEMENTS_CACHED = 200


class Database:
    """Connections to one file: one for the writer, and one for each thread that reads."""

    def __init__(self, path: Path, schema: Schema) -> None:
        self.path = path
        self.schema = schema
        self.forked = self.closed = False
        self.lock = FairLock(path)
        try:
            self.lock.acquire(LOCK_S_MAX)
            try:
                look_for_damage(path)
                if not path.exists():
                    _make(path, schema)
                self.connection = self._connect(writable=True)
                self._check()
            finally:
                self.lock.release()
        except BaseException:
            self.lock.close()
            raise
        self._mine = threading.local()
        self._readers: list[apsw.Connection] = []
        _open_databases.add(self)

    def reader(self) -> apsw.Connection:
        """This thread's connection for reading. No cursor on it may stay open over an await: it would pin the WAL."""
        try:
            connection: apsw.Connection = self._mine.connection
        except AttributeError:
            self.refuse()
            connection = self._mine.connection = self._connect(writable=False)
            self._readers.append(connection)
        return connection

    def refuse(self) -> None:
        """Raise where it cannot be used: SQLite connections do not survive a fork."""
        if self.closed:
            raise Unavailable(f"{self.path} is closed")
        if self.forked:
            raise InvalidInput(f"{self.path} was opened before this process forked: open the book again in the child")

    def failure(self, error: apsw.Error) -> Exception:
        """A failed read, as Tidebook's error."""
        return from_sqlite(error, self.path)

    def damage(self) -> list[str]:
        """What SQLite finds wrong when it reads the whole file; empty where all is well."""
        try:
            found = [str(line) for (line,) in self.reader().execute("PRAGMA quick_check")]
        except apsw.Error as error:
            return [str(error)]
        return [] if found == ["ok"] else found

    def close(self) -> None:
        """Close every connection; the last one on the machine folds the write-ahead file into the database."""
        _open_databases.discard(self)
        self.closed = True
        if self.forked:
            return
        for connection in self._readers:
            connection.close()
        self._readers.clear()
        self._mine = threading.local()
        self.connection.close()
        self.lock.close()

    def _connect(self, *, writable: bool) -> apsw.Connection:
        try:
            connection = apsw.Connection(
                str(self.path), flags=apsw.SQLITE_OPEN_READWRITE, statementcachesize=_STATEMENTS_CACHED
            )
            connection.set_busy_timeout(BUSY_MS_MAX)
            # A plan does not depend on the values it is given: else SQLite compiles a statement anew with each of them.
            connection.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)
            # The file that readers share stays when the last one leaves: on a full disk it could not be made again.
            stays = ctypes.c_int(1)
            connection.file_control("main", apsw.SQLITE_FCNTL_PERSIST_WAL, ctypes.addressof(stays))
            connection.execute(  # fetched, for a statement that returns a row holds up those behind it
                f"""PRAGMA synchronous = FULL; PRAGMA fullfsync = ON; PRAGMA foreign_keys = ON;
                PRAGMA trusted_schema = OFF; PRAGMA cell_size_check = ON;
                PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}; PRAGMA journal_size_limit = {WAL_BYTES_KEPT};
                PRAGMA cache_size = -{_WRITE_CACHE_KIB if writable else _READ_CACHE_KIB};
                PRAGMA query_only = {"OFF" if writable else "ON"}"""
            ).fetchall()
        except apsw.Error as error:
            raise _opening(error, self.path) from error
        return connection

    def _check(self) -> None:
        connection = self.connection
        # Closing what is refused must not write: the pages in the write-ahead file would cover up that others lack.
        connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        try:
            owner, version = connection.pragma("application_id"), connection.pragma("user_version")
            if owner != self.schema.application_id:
                raise Corrupt(f"{self.path} is not Tidebook's {self.schema.name}: it is left as it is")
            if version > self.schema.version:
                raise UnknownVersion(str(self.path), version=version, known=self.schema.version)
            if connection.pragma("journal_mode") != "wal":
                raise Corrupt(f"{self.path} was changed by another program: it is no longer in WAL mode")
            page_bytes = connection.pragma("page_size")
            look_for_missing_pages(self.path, pages=connection.pragma("page_count"), page_bytes=page_bytes)
            if version < self.schema.version:
                _upgrade(connection, self.schema, version)
            connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 0)
        except apsw.Error as error:
            connection.close()
            raise _opening(error, self.path) from error
        except BaseException:
            connection.close()
            raise


def _make(path: Path, schema: Schema) -> None:
    # Elsewhere first, then renamed: an empty or half-made file under the real name can only be damage.
    new = path.with_name(f"{path.name}.new-{secrets.token_hex(4)}")
    try:
        connection = apsw.Connection(str(new))
        connection.execute("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL").fetchall()
        _upgrade(connection, schema, 0)
        connection.close()
        _sync(new)
        os.rename(new, path)
        _sync(path.parent)
    except apsw.Error as error:
        raise _opening(error, path) from error
    except OSError as error:
        raise from_os(error, path) from error
    finally:
        for left in path.parent.glob(f"{new.name}*"):
            left.unlink()


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


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _opening(error: apsw.Error, path: Path) -> Exception:
    if isinstance(error, apsw.ReadOnlyError | apsw.PermissionsError | apsw.CantOpenError):
        return InvalidInput(f"{path} cannot be opened for writing: {error}: give a folder that may be written")
    return from_sqlite(error, path)


_open_databases: weakref.WeakSet[Database] = weakref.WeakSet()
_left_behind: list[Database] = []


def _after_fork() -> None:
    # Closing a parent's connection in the child could damage the file: they are kept, and refused.
    for database in list(_open_databases):
        database.forked = True
        database._mine = threading.local()
        database.lock.close()
        _left_behind.append(database)
    _open_databases.clear()


os.register_at_fork(after_in_child=_after_fork)
