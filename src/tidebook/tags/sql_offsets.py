"""Offsets in a SQL table of the application: stored in one transaction with its own data, for exactly-once effects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from typing import Any, Final, Literal, Protocol

from tidebook.core.errors import Fenced, InvalidInput
from tidebook.tags.event import TaggedEvent
from tidebook.tags.group_assignment import share_of
from tidebook.tags.offset import decode_offset

TABLE: Final = """CREATE TABLE IF NOT EXISTS tidebook_tag_offset (
    group_name VARCHAR(200) NOT NULL, tag VARCHAR(200) NOT NULL, share INTEGER NOT NULL, tag_offset TEXT NOT NULL,
    PRIMARY KEY (group_name, tag, share))"""
#: For MySQL and MariaDB, whose default collation does not distinguish "Paid" from "paid".
TABLE_MYSQL: Final = f"{TABLE} CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"


class Cursor(Protocol):
    """A cursor of any DB-API driver."""

    rowcount: int

    def execute(self, sql: str, parameters: Sequence[Any] = ...) -> Any: ...

    def fetchall(self) -> Any: ...

    def close(self) -> Any: ...


#: A connection of any DB-API driver, with transactions, or a SQLAlchemy session or connection: duck-typed.
Connection = Any


class _SqlAlchemyCursor:
    """A SQLAlchemy connection as a DB-API cursor, so that SQLAlchemy knows of the transaction."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._result: Any = None
        self.rowcount = -1

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> None:
        self._result = self._connection.exec_driver_sql(sql, tuple(parameters))
        self.rowcount = self._result.rowcount

    def fetchall(self) -> Any:
        return self._result.fetchall()

    def close(self) -> None:
        if self._result is not None:
            self._result.close()


#: SQLAlchemy's parameter style → the placeholder in a statement.
_PLACEHOLDERS: dict[str, str] = {"qmark": "?", "format": "%s", "pyformat": "%s", "numeric_dollar": "$"}


class SqlOffsets:
    """The offsets of one group and tag in the table `tidebook_tag_offset`.

    A connection is one of any DB-API driver, whose `paramstyle` is given, or a SQLAlchemy session or connection, which
    has its own. With an async session: `await session.run_sync(lambda each: offsets.advance(each, event))`.
    """

    def __init__(
        self,
        tag: str,
        group: str,
        connect: Callable[[], Connection],
        *,
        paramstyle: Literal["qmark", "format"] = "qmark",
    ) -> None:
        self._at = (group, tag)
        self._tag = tag
        self._connect = connect
        self._placeholder = _PLACEHOLDERS[paramstyle]

    def __call__(self, shares: Iterable[int]) -> Mapping[int, str]:
        """Return the offsets of shares, read on a separate connection."""
        with closing(self._connect()) as connection:
            cursor, placeholder = self._cursor(connection)
            with closing(cursor):
                return {
                    share: found for share in shares if (found := self._offset(cursor, placeholder, share)) is not None
                }

    def advance(self, connection: Connection, event: TaggedEvent) -> bool:
        """Mark the event as handled, within the caller's transaction; return False if it was handled before.

        Raise `Fenced` if another member advanced the same share meanwhile: roll back.
        """
        share = share_of(event.topic, event.id)
        cursor, placeholder = self._cursor(connection)
        with closing(cursor):
            before = self._offset(cursor, placeholder, share)
            if before is not None:
                if decode_offset(self._tag, before) >= decode_offset(self._tag, event.tag_offset):
                    return False
                sql = "UPDATE tidebook_tag_offset SET tag_offset = ? WHERE group_name = ? AND tag = ? AND share = ?"
                cursor.execute(
                    _sql(f"{sql} AND tag_offset = ?", placeholder), (event.tag_offset, *self._at, share, before)
                )
                if cursor.rowcount != 1:
                    raise Fenced(f"tag {self._tag!r}: another member advanced share {share}: roll back")
            else:  # a concurrent first insert violates the primary key
                sql = "INSERT INTO tidebook_tag_offset (group_name, tag, share, tag_offset) VALUES (?, ?, ?, ?)"
                cursor.execute(_sql(sql, placeholder), (*self._at, share, event.tag_offset))
        return True

    def _cursor(self, connection: Any) -> tuple[Cursor, str]:
        """Return a cursor in the connection's transaction, and the placeholder of its parameters."""
        if callable(getattr(connection, "run_sync", None)):
            raise InvalidInput("an async session is given to advance inside run_sync: session.run_sync(lambda s: …)")
        if callable(getattr(connection, "get_bind", None)) and callable(getattr(connection, "connection", None)):
            connection = connection.connection()  # the session's connection, with its transaction
        if not callable(getattr(connection, "exec_driver_sql", None)):
            return connection.cursor(), self._placeholder
        style = connection.dialect.paramstyle
        if style not in _PLACEHOLDERS:
            raise InvalidInput(
                f"the driver's parameter style {style!r} is not supported: use psycopg or another driver"
            )
        return _SqlAlchemyCursor(connection), _PLACEHOLDERS[style]

    def _offset(self, cursor: Cursor, placeholder: str, share: int) -> str | None:
        sql = "SELECT tag_offset FROM tidebook_tag_offset WHERE group_name = ? AND tag = ? AND share = ?"
        cursor.execute(_sql(sql, placeholder), (*self._at, share))
        rows = cursor.fetchall()
        return rows[0][0] if rows else None


def _sql(text: str, placeholder: str) -> str:
    if placeholder != "$":
        return text.replace("?", placeholder)
    first, *rest = text.split("?")
    return first + "".join(f"${number}{part}" for number, part in enumerate(rest, 1))
