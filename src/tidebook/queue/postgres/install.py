"""Create the queue's tables and functions, and upgrade those of an older version.

`sql/schema.sql` runs once per schema, the other files once per partitioned table. `@schema@` and `@table@` stand for
the names of the schema and the table, `@now@` for the database's time in milliseconds.
"""

from __future__ import annotations

import re
from importlib.resources import files

from psycopg import errors

from tidebook.core.errors import InvalidInput, UnknownVersion
from tidebook.postgres.connect import Connection

#: Raise it with every change of the SQL files: it makes every database reinstall the functions.
VERSION = 1
SHARED_TABLE = "entry"
SLOTS_FIRST = 2
FUNCTION_FILES = ("leases.sql", "put.sql", "claim.sql", "due.sql")
#: The advisory lock that serializes installations.
_INSTALL_LOCK = 0x7469_6465
_NAME = re.compile(r"[a-z_][a-z0-9_]{0,39}")


def schema_name(value: str) -> str:
    """Return the name of a schema; raise InvalidInput if it would need quoting."""
    if not _NAME.fullmatch(value):
        raise InvalidInput(f"schema {value!r} must be 1 to 40 of a-z, 0-9 and _, and not begin with a digit")
    return value


def _text(file: str, schema: str, table: str, now: str) -> str:
    text = files(__package__).joinpath("sql", file).read_text(encoding="utf-8")
    return text.replace("@schema@", schema).replace("@table@", table).replace("@now@", now)


async def install(connection: Connection, *, schema: str, now: str) -> None:
    """Create what all queues share, and upgrade the functions of tables of an older version.

    If all of it is current, nothing is locked, and a user without the right to create anything can still put and claim.
    """
    comment = f"Queues of Tidebook, version {VERSION}"
    cursor = await connection.execute("SELECT obj_description(to_regnamespace(%s), 'pg_namespace')", (schema,))
    if await cursor.fetchone() == (comment,):
        return
    async with connection.transaction():
        await connection.execute("SELECT pg_advisory_xact_lock(%s)", (_INSTALL_LOCK,))
        await connection.execute(_text("schema.sql", schema, "", now))
        await make_table(connection, SHARED_TABLE, schema=schema, now=now)
        cursor = await connection.execute(f"SELECT table_name, version FROM {schema}.period")
        for table, version in await cursor.fetchall():
            if version > VERSION:
                raise UnknownVersion(f"{schema}.{table}", version=version, known=VERSION)
            if version < VERSION:
                await _make_functions(connection, table, schema=schema, now=now)
        try:
            async with connection.transaction():
                await connection.execute(f"COMMENT ON SCHEMA {schema} IS '{comment}'")
        except errors.InsufficientPrivilege:
            pass  # another user owns the schema: then the installation is checked on every start


async def make_table(connection: Connection, table: str, *, schema: str, now: str) -> None:
    """Create a partitioned table with its first partitions, if it is missing. Call it inside a transaction."""
    cursor = await connection.execute(f"SELECT FROM {schema}.period WHERE table_name = %s", (table,))
    if await cursor.fetchone() is not None:
        return
    await connection.execute(_text("table.sql", schema, table, now))
    for slot in range(SLOTS_FIRST):
        await add_slot(connection, table, slot, schema=schema)
    await connection.execute(
        f"INSERT INTO {schema}.period (table_name, current_slot, draining, began_at, version)"
        f" VALUES (%s, 0, '{{}}', {now}, 0)",
        (table,),
    )
    await _make_functions(connection, table, schema=schema, now=now)


async def add_slot(connection: Connection, table: str, slot: int, *, schema: str) -> None:
    """Create a partition and attach it to its parent, without blocking the parent's readers and writers."""
    name = f"{schema}.{table}_{slot}"
    await connection.execute(f"CREATE TABLE {name} (LIKE {schema}.{table} INCLUDING DEFAULTS INCLUDING STORAGE)")
    await connection.execute(f"ALTER TABLE {name} ADD CONSTRAINT slot CHECK (slot = {slot})")
    await connection.execute(f"ALTER TABLE {schema}.{table} ATTACH PARTITION {name} FOR VALUES IN ({slot})")
    await connection.execute(f"ALTER TABLE {name} DROP CONSTRAINT slot")


async def _make_functions(connection: Connection, table: str, *, schema: str, now: str) -> None:
    for name in FUNCTION_FILES:
        await connection.execute(_text(name, schema, table, now))
    await connection.execute(f"UPDATE {schema}.period SET version = %s WHERE table_name = %s", (VERSION, table))
