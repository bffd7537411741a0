"""Creates the queue's tables and functions, and upgrades those of an older version."""

from __future__ import annotations

import re

from psycopg import errors

from tidebook.core.errors import InvalidInput, UnknownVersion
from tidebook.postgres.connect import Connection
from tidebook.queue.port import Drained
from tidebook.queue.postgres.sql import TABLE_FILES, VERSION, digest, text

SHARED_TABLE = "entry"
SLOTS_FIRST = 2
#: The advisory lock that serializes installations.
_INSTALL_LOCK = 0x7469_6465
_QUOTE = "'"
_NAME = re.compile(r"[a-z_][a-z0-9_]{0,39}")


def schema_name(value: str) -> str:
    """Return the name of a schema; raise InvalidInput if it would need quoting."""
    if not _NAME.fullmatch(value):
        raise InvalidInput(f"schema {value!r} must be 1 to 40 of a-z, 0-9 and _, and not begin with a digit")
    return value


async def install(connection: Connection, *, schema: str, now: str) -> None:
    """Create what all queues share, and upgrade the functions of tables of an older version.

    If all of it is current, nothing is locked, and a user without the right to create anything can still put and claim.
    """
    comment = f"Tidebook's queues, {digest(schema=schema, now=now)}"
    cursor = await connection.execute("SELECT obj_description(to_regnamespace(%s), 'pg_namespace')", (schema,))
    if await cursor.fetchone() == (comment,):
        return
    async with connection.transaction():
        await connection.execute("SELECT pg_advisory_xact_lock(%s)", (_INSTALL_LOCK,))
        await connection.execute(text("schema.sql", schema=schema, now=now))
        await make_table(connection, SHARED_TABLE, schema=schema, now=now)
        cursor = await connection.execute(f"SELECT table_name, version FROM {schema}.period")
        for table, version in await cursor.fetchall():
            if version > VERSION:
                raise UnknownVersion(f"{schema}.{table}", version=version, known=VERSION)
            if version < VERSION:
                await _make_functions(connection, table, schema=schema, now=now)
        try:
            async with connection.transaction():
                await connection.execute(f"COMMENT ON SCHEMA {schema} IS '{comment.replace(_QUOTE, _QUOTE * 2)}'")
        except errors.InsufficientPrivilege:
            pass  # another user owns the schema: then the installation is checked on every start


async def make_table(connection: Connection, table: str, *, schema: str, now: str) -> None:
    """Create a partitioned table with its first partitions, if it is missing. Call it inside a transaction."""
    cursor = await connection.execute(f"SELECT FROM {schema}.period WHERE table_name = %s", (table,))
    if await cursor.fetchone() is not None:
        return
    await connection.execute(text("table.sql", schema=schema, table=table, now=now))
    # a bundle is short-lived: compressing it costs more than it saves
    await connection.execute(f"ALTER TABLE {schema}.{table} ALTER COLUMN parts SET STORAGE EXTERNAL")
    for slot in range(SLOTS_FIRST):
        await add_slot(connection, table, slot, schema=schema)
    await _make_functions(connection, table, schema=schema, now=now)
    await connection.execute(
        f"INSERT INTO {schema}.period (table_name, current_slot, draining, began_at, version)"
        f" VALUES (%s, 0, '{{}}', {now}, %s)",
        (table, VERSION),
    )


async def add_slot(connection: Connection, table: str, slot: int, *, schema: str) -> None:
    """Create a partition and attach it to its parent, without blocking the parent's readers and writers."""
    name = f"{schema}.{table}_{slot}"
    await connection.execute(f"CREATE TABLE {name} (LIKE {schema}.{table} INCLUDING DEFAULTS INCLUDING STORAGE)")
    await connection.execute(f"ALTER TABLE {name} ADD CONSTRAINT slot CHECK (slot = {slot})")
    await connection.execute(f"ALTER TABLE {schema}.{table} ATTACH PARTITION {name} FOR VALUES IN ({slot})")
    await connection.execute(f"ALTER TABLE {name} DROP CONSTRAINT slot")


async def clear_slot(connection: Connection, table: str, slot: int, drained: Drained, *, schema: str) -> None:
    """Truncate, drop or keep a drained partition, inside a transaction that has locked it and found it empty."""
    match drained:
        case "truncate":
            await connection.execute(f"TRUNCATE {schema}.{table}_{slot}")
        case "drop":
            await connection.execute(f"DROP TABLE {schema}.{table}_{slot}")
        case "reset":
            pass  # vacuum frees its pages for reuse


async def _make_functions(connection: Connection, table: str, *, schema: str, now: str) -> None:
    for name in TABLE_FILES[1:]:
        await connection.execute(text(name, schema=schema, table=table, now=now))
    await connection.execute(f"UPDATE {schema}.period SET version = %s WHERE table_name = %s", (VERSION, table))
