"""`server.db` in the book's folder: tokens, answered idempotency keys, the ends of audit chains, and the history."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import apsw

from tidebook.runtime.metrics import Metrics
from tidebook.sqlite.database import Schema
from tidebook.sqlite.shared_files import SqliteAdapter
from tidebook.sqlite.writer import WriteTransaction, unsynced

FILE: Final = "server.db"
SCHEMA: Final = Schema(
    name="server",
    application_id=0x7B10_0010,
    steps=(
        """
        CREATE TABLE token (
            id TEXT NOT NULL PRIMARY KEY,
            hash BLOB NOT NULL UNIQUE,
            name TEXT NOT NULL,
            role INTEGER NOT NULL,
            prefix TEXT NOT NULL,
            created_at INTEGER NOT NULL,
            expires_at INTEGER,
            used_at INTEGER,
            revoked_at INTEGER
        ) WITHOUT ROWID;

        -- A row without a status is a request that began and was not answered.
        CREATE TABLE answered (
            key BLOB NOT NULL PRIMARY KEY,
            request BLOB NOT NULL,
            at INTEGER NOT NULL,
            status INTEGER,
            body BLOB
        ) WITHOUT ROWID;
        CREATE INDEX answered_at ON answered (at);

        -- The last entry of each audit chain that this server wrote: its number and its hash.
        CREATE TABLE chain (
            id TEXT NOT NULL PRIMARY KEY,
            entries INTEGER NOT NULL,
            hash TEXT NOT NULL
        ) WITHOUT ROWID;
        """,
        """
        -- A ring: a sample replaces the one that had its slot hours ago.
        CREATE TABLE history (
            slot INTEGER NOT NULL PRIMARY KEY,
            at INTEGER NOT NULL,
            sample BLOB NOT NULL
        );
        """,
    ),
)

R = TypeVar("R")
Change = Callable[[apsw.Connection], Any]


def _change(transaction: WriteTransaction, changes: Sequence[Change]) -> list[Any]:
    return [change(transaction.connection) for change in changes]


@unsynced
def _change_unsynced(transaction: WriteTransaction, changes: Sequence[Change]) -> list[Any]:
    return _change(transaction, changes)


class ServerFile(SqliteAdapter):
    """`server.db`, opened by one process."""

    def __init__(self, folder: Path, metrics: Metrics | None = None) -> None:
        super().__init__(folder, FILE, SCHEMA, metrics)

    async def change(self, change: Change, *, synced: bool = True) -> Any:
        """Run a change in the writer's transaction, which others may share, and return its result."""
        return await self._run(_change if synced else _change_unsynced, change)

    def select(self, sql: str, bindings: tuple[Any, ...] = ()) -> list[Any]:
        """Return the rows of a query."""
        return self._select(sql, bindings)


class ServerDatabase:
    """Opens `server.db` when it is needed: the first change creates it, and until then it reads as empty."""

    def __init__(self, folder: Path, metrics: Metrics | None = None) -> None:
        self._folder = folder.expanduser()
        self._metrics = metrics
        self._file: ServerFile | None = None

    def _open(self, *, create: bool) -> ServerFile | None:
        if self._file is None and (create or (self._folder / FILE).exists()):
            self._file = ServerFile(self._folder, self._metrics)
        return self._file

    async def change(self, change: Change, *, synced: bool = True) -> Any:
        """Run a change; see `ServerFile.change`."""
        file = self._open(create=True)
        assert file is not None
        return await file.change(change, synced=synced)

    def select(self, sql: str, bindings: tuple[Any, ...] = ()) -> list[Any]:
        """Return the rows of a query; none if there is no file."""
        file = self._open(create=False)
        return [] if file is None else file.select(sql, bindings)

    async def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            file, self._file = self._file, None
            await file.close()
