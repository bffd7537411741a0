"""Offsets in a SQL table of the application: stored in one transaction with its own data, for exactly-once effects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any, Final, Literal

from tidebook.core.errors import Fenced, InvalidInput
from tidebook.runtime.autocommit import number_placeholders, sqlalchemy_connection
from tidebook.tags.event import TaggedEvent, decode_offset
from tidebook.tags.subscription import share_of

TABLE: Final = """CREATE TABLE IF NOT EXISTS tidebook_tag_offset (
    group_name VARCHAR(200) NOT NULL, tag VARCHAR(200) NOT NULL, share INTEGER NOT NULL, tag_offset TEXT NOT NULL,
    PRIMARY KEY (group_name, tag, share))"""
#: For MySQL and MariaDB, whose default collation does not distinguish "Paid" from "paid".
TABLE_MYSQL: Final = f"{TABLE} CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"


#: A connection of any DB-API driver, with transactions, or a SQLAlchemy session or connection: duck-typed.
Connection = Any
#: The placeholder in a statement, by SQLAlchemy's name of the parameter style.
_PLACEHOLDERS: dict[str, str] = {"qmark": "?", "format": "%s", "pyformat": "%s", "numeric_dollar": "$"}


class SqlOffsets:
    """The offsets of one group and tag in the table `tidebook_tag_offset`.

    A connection comes from any DB-API driver, with the given `paramstyle`, or is a SQLAlchemy session or connection,
    which knows its own style. With an async session: `await session.run_sync(lambda s: offsets.advance(s, event))`.
    """

    def __init__(
        self,
        tag: str,
        group: str,
        connect: Callable[[], Connection],
        *,
        paramstyle: Literal["qmark", "format"] = "qmark",
    ) -> None:
        self._group_and_tag = (group, tag)
        self._tag = tag
        self._connect = connect
        self._placeholder = _PLACEHOLDERS[paramstyle]

    def __call__(self, shares: Iterable[int]) -> Mapping[int, str]:
        """Return the offsets of shares, read on a separate connection."""
        with closing(self._connect()) as connection:
            found = {share: self._offset(connection, share) for share in shares}
        return {share: offset for share, offset in found.items() if offset is not None}

    def advance(self, connection: Connection, event: TaggedEvent) -> bool:
        """Mark the event as handled, within the caller's transaction; return False if it was handled before.

        Raise `Fenced`, or the driver's error for a duplicate key if this is the first event of its share, if another
        member advanced the same share meanwhile; the caller must then roll back.
        """
        share = share_of(event.topic, event.id)
        before = self._offset(connection, share)
        if before is None:  # a concurrent first insert violates the primary key
            sql = "INSERT INTO tidebook_tag_offset (group_name, tag, share, tag_offset) VALUES (?, ?, ?, ?)"
            with self._executed(connection, sql, *self._group_and_tag, share, event.tag_offset):
                return True
        if decode_offset(self._tag, before) >= decode_offset(self._tag, event.tag_offset):
            return False
        sql = "UPDATE tidebook_tag_offset SET tag_offset = ? WHERE group_name = ? AND tag = ? AND share = ?"
        with self._executed(
            connection, f"{sql} AND tag_offset = ?", event.tag_offset, *self._group_and_tag, share, before
        ) as result:
            if result.rowcount != 1:
                raise Fenced(f"tag {self._tag!r}: another member advanced share {share}: roll back")
        return True

    def _offset(self, connection: Connection, share: int) -> str | None:
        sql = "SELECT tag_offset FROM tidebook_tag_offset WHERE group_name = ? AND tag = ? AND share = ?"
        with self._executed(connection, sql, *self._group_and_tag, share) as result:
            rows = result.fetchall()
        return rows[0][0] if rows else None

    @contextmanager
    def _executed(self, connection: Connection, sql: str, *parameters: object) -> Iterator[Any]:
        """Execute a statement in the connection's transaction; yield the cursor, or SQLAlchemy's result."""
        if callable(getattr(connection, "run_sync", None)):
            raise InvalidInput("with an async session, call advance inside run_sync: session.run_sync(lambda s: …)")
        known = sqlalchemy_connection(connection)
        if known is None:
            with closing(connection.cursor()) as cursor:
                cursor.execute(sql.replace("?", self._placeholder), parameters)
                yield cursor
            return
        style = known.dialect.paramstyle
        if style not in _PLACEHOLDERS:
            raise InvalidInput(
                f"the driver's parameter style {style!r} is not supported: use psycopg or another driver"
            )
        # Execute through SQLAlchemy, so that it knows of the transaction.
        mark = _PLACEHOLDERS[style]
        text = number_placeholders(sql, "?") if mark == "$" else sql.replace("?", mark)
        with closing(known.exec_driver_sql(text, parameters)) as result:
            yield result
