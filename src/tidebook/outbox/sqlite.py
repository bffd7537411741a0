"""The outbox on SQLite: a file of the application, or one in the book's folder.

It uses the standard library's SQLite, as most applications do: a second copy of SQLite in the process (apsw brings one)
would drop the locks of the first on a file that both have open, so that combination is refused. The file's journal mode
is not changed: the standard library's copy may have a write-ahead log bug that loses pages.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tidebook.core.errors import Corrupt, TidebookError, Unavailable
from tidebook.outbox.settings import OutboxSettings
from tidebook.outbox.store import OutboxDatabase, OutboxStore, Row
from tidebook.runtime.process import generation, refuse_fork
from tidebook.sqlite.database import make_folder
from tidebook.sqlite.forks import GuardedConnection, no_fork, refuse_inherited
from tidebook.sqlite.libraries import closed_by_standard_library, opened_by_standard_library

#: How long a write may wait for another transaction.
BUSY_S_MAX = 5.0


class FetchedRows(NamedTuple):
    """The rows of a statement, fetched while no fork can happen."""

    rows: list[Row]

    def fetchall(self) -> list[Row]:
        """Return the rows."""
        return self.rows


class SqliteOutboxStore(OutboxStore):
    """One connection. Its transactions take the write lock when they begin, so they cannot fail halfway."""

    dialect = "sqlite"

    def __init__(self, path: Path, settings: OutboxSettings) -> None:
        super().__init__(settings)
        self._path = path
        self._generation = generation()
        self._closed = False
        self._guarded = GuardedConnection(self._connect)
        with no_fork():
            refuse_inherited(path)
            opened_by_standard_library(self, path)
            try:
                make_folder(path.parent)
                with self._guarded:
                    pass
            except BaseException:
                closed_by_standard_library(self)
                raise

    def close(self) -> None:
        self._closed = True
        self._guarded.close()
        closed_by_standard_library(self)

    def _connect(self) -> sqlite3.Connection:
        refuse_fork(self._generation, str(self._path))
        if self._closed:
            raise Unavailable(f"{self._path} is closed")
        try:
            return sqlite3.connect(
                self._path, timeout=BUSY_S_MAX, isolation_level=None, check_same_thread=False, uri=False
            )
        except sqlite3.Error as error:
            raise Unavailable(f"{self._path}: {error}") from error

    def _execute(self, sql: str, parameters: Sequence[Any] = ()) -> FetchedRows:
        with self._translated(), self._guarded as connection:
            return FetchedRows(connection.execute(sql.replace("%s", "?"), tuple(parameters)).fetchall())

    @contextmanager
    def _transaction(self, *, durable: bool) -> Iterator[None]:
        with self._translated(), self._guarded as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise _translate(error, self._path) from error


class SqliteOutboxDatabase(OutboxDatabase):
    """Opens connections to one file."""

    def __init__(self, path: Path, settings: OutboxSettings) -> None:
        self._path = path
        self._settings = settings

    def connect(self) -> SqliteOutboxStore:
        return SqliteOutboxStore(self._path, self._settings)


def _translate(error: sqlite3.Error, path: Path) -> TidebookError:
    if "no such table" in str(error) or "no such column" in str(error):
        return Unavailable(f"the outbox's tables are missing or old ({error}): run 'tidebook outbox migrate'")
    if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError):
        return Corrupt(f"{path} is damaged ({error}): it was not changed; restore it from a backup")
    return Unavailable(f"{path}: {error}")
