"""The tables of Deimos' database backend in PostgreSQL, for reading only."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, LiteralString

import msgspec
import psycopg

from tidebook.core.errors import InvalidInput, NotFound, Unavailable
from tidebook.outbox.message import Message
from tidebook.postgres.connect import Connection, connect_first
from tidebook.postgres.errors import from_psycopg

MESSAGES_PAGE = 500
#: A lock of Deimos that was not renewed for this long may be taken over; a younger one belongs to a running executor.
LOCK_S = 60
_COLUMNS = frozenset({"id", "topic", "message", "key", "partition_key"})


class DeimosTopic(msgspec.Struct, frozen=True):
    """A topic that has messages, and how many."""

    topic: str
    messages: int


class DeimosMessage(msgspec.Struct, frozen=True):
    """A message, and its id in Deimos' table."""

    id: int
    message: Message


class DeimosTables:
    """Reads messages and locks through one connection, on which every statement sees its own snapshot."""

    def __init__(self, connection: Connection, source: str) -> None:
        self._connection = connection
        #: Identifies the table. A table that is created again has another identity, since its ids start again.
        self.source = source

    async def topics(self) -> list[DeimosTopic]:
        """Return the topics that have messages, sorted."""
        rows = await self._query("SELECT topic, count(*) FROM kafka_messages GROUP BY topic ORDER BY topic")
        return [DeimosTopic(*row) for row in rows]

    async def count(self, topic: str, up_to: int) -> int:
        """Return how many messages of a topic have an id up to `up_to`."""
        [[count]] = await self._query("SELECT count(*) FROM kafka_messages WHERE topic = %s AND id <= %s", topic, up_to)
        return int(count)

    async def messages(self, topic: str, after: int) -> list[DeimosMessage]:
        """Return the next messages of a topic in the order of their ids, in which Deimos sends them."""
        rows = await self._query(
            "SELECT id, message, key, partition_key FROM kafka_messages WHERE topic = %s AND id > %s "
            "ORDER BY id LIMIT %s",
            topic, after, MESSAGES_PAGE,
        )  # fmt: skip
        return [
            DeimosMessage(id, Message(topic, payload, key, None if partition_key is None else partition_key.encode()))
            for id, payload, key, partition_key in rows
        ]

    async def refuse_running(self) -> None:
        """Raise Unavailable if an executor of Deimos holds a topic: it would also send the copied messages."""
        rows = await self._query(
            "SELECT topic, locked_by FROM kafka_topic_info WHERE locked_by IS NOT NULL "
            "AND locked_at > now() AT TIME ZONE 'UTC' - %s * interval '1 second' ORDER BY topic LIMIT 1",
            LOCK_S,
        )
        for topic, owner in rows:
            raise Unavailable(
                f"Deimos' executor {owner} works on topic {topic}: stop the executors, "
                f"wait {LOCK_S} s if one was killed, and import again"
            )

    async def _query(self, sql: LiteralString, *values: Any) -> list[tuple[Any, ...]]:
        try:
            cursor = await self._connection.execute(sql, values)
            return await cursor.fetchall()
        except psycopg.Error as error:
            raise from_psycopg(error, writes=False) from error


@asynccontextmanager
async def open_deimos_tables(url: str) -> AsyncIterator[DeimosTables]:
    """Connect and yield the tables; raise NotFound if they are missing, and InvalidInput if they are not Deimos'."""
    try:
        settings = "-c default_transaction_read_only=on"
        connection = await connect_first(url, application="tidebook-import", settings=settings)
    except psycopg.Error as error:
        raise from_psycopg(error, writes=False) from error
    async with connection:
        yield await _find(connection)


async def _find(connection: Connection) -> DeimosTables:
    """Return the tables, and resolve their names in their schema from now on.

    Tidebook's outbox has tables of the same names, which may come first in the search path.
    """
    try:
        cursor = await connection.execute(
            "SELECT n.nspname, c.oid, current_database(), array_agg(a.attname::text) "
            "FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace JOIN pg_attribute a ON a.attrelid = c.oid "
            "WHERE c.relname = 'kafka_messages' AND n.nspname = ANY (current_schemas(false)) AND a.attnum > 0 "
            "AND NOT a.attisdropped GROUP BY 1, 2, 3 ORDER BY array_position(current_schemas(false), n.nspname)"
        )
        found = await cursor.fetchall()
        for schema, oid, database, columns in found:
            if {*columns} >= _COLUMNS:
                await connection.execute("SELECT set_config('search_path', quote_ident(%s), false)", (schema,))
                return DeimosTables(connection, f"deimos:{database}:{oid}")
    except psycopg.Error as error:
        raise from_psycopg(error, writes=False) from error
    if found:
        raise InvalidInput(
            f"kafka_messages in schema {found[0][0]} is not a table of Deimos, because it lacks "
            f"{', '.join(sorted(_COLUMNS - {*found[0][3]}))}: Tidebook's outbox has a table of the same name"
        )
    raise NotFound("the database has no table kafka_messages: is it the one that Deimos' migration ran on?")
