"""Offsets in a table beside what events are made into: both in one transaction, so each event counts exactly once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from typing import Any, Final, Literal, Protocol

from tidebook.core.errors import Fenced
from tidebook.tags.event import TaggedEvent
from tidebook.tags.offset import decode_offset
from tidebook.tags.shares import share_of

TABLE: Final = """CREATE TABLE IF NOT EXISTS tidebook_tag_offset (
    group_name VARCHAR(200) NOT NULL, tag VARCHAR(200) NOT NULL, share INTEGER NOT NULL, tag_offset TEXT NOT NULL,
    PRIMARY KEY (group_name, tag, share))"""
#: For MySQL and MariaDB, whose texts do not tell "Paid" from "paid" unless they are told to.
TABLE_MYSQL: Final = f"{TABLE} CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"


class Cursor(Protocol):
    """A cursor of any DB-API driver."""

    rowcount: int

    def execute(self, sql: str, parameters: Sequence[Any] = ...) -> Any: ...

    def fetchall(self) -> Any: ...

    def close(self) -> Any: ...


class Connection(Protocol):
    """A connection of any DB-API driver, with transactions."""

    def cursor(self) -> Any: ...

    def close(self) -> Any: ...


class SqlOffsets:
    """The offsets of one group and tag in the table `tidebook_tag_offset`."""

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
        self._mark = "?" if paramstyle == "qmark" else "%s"

    def __call__(self, shares: Iterable[int]) -> Mapping[int, str]:
        """Where shares were left, read on a connection of its own."""
        with closing(self._connect()) as connection, closing(connection.cursor()) as cursor:
            return {share: found for share in shares if (found := self._offset(cursor, share)) is not None}

    def advance(self, connection: Connection, event: TaggedEvent) -> bool:
        """Within the caller's transaction: the event is done. False: it was before, so do not do it again.

        Fenced where another member moved the same share meanwhile: roll back.
        """
        share = share_of(event.topic, event.id)
        with closing(connection.cursor()) as cursor:
            before = self._offset(cursor, share)
            if before is not None:
                if decode_offset(self._tag, before) >= decode_offset(self._tag, event.tag_offset):
                    return False
                sql = "UPDATE tidebook_tag_offset SET tag_offset = ? WHERE group_name = ? AND tag = ? AND share = ?"
                cursor.execute(self._sql(f"{sql} AND tag_offset = ?"), (event.tag_offset, *self._at, share, before))
                if cursor.rowcount != 1:
                    raise Fenced(f"tag {self._tag!r}: another member has moved share {share} on: roll back")
            else:  # a second one who inserts the first offset is refused by the primary key
                sql = "INSERT INTO tidebook_tag_offset (group_name, tag, share, tag_offset) VALUES (?, ?, ?, ?)"
                cursor.execute(self._sql(sql), (*self._at, share, event.tag_offset))
        return True

    def _offset(self, cursor: Cursor, share: int) -> str | None:
        sql = "SELECT tag_offset FROM tidebook_tag_offset WHERE group_name = ? AND tag = ? AND share = ?"
        cursor.execute(self._sql(sql), (*self._at, share))
        rows = cursor.fetchall()
        return rows[0][0] if rows else None

    def _sql(self, text: str) -> str:
        return text.replace("?", self._mark)
