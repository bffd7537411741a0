"""The swap of a rebuild: copies of tables under other names, which then replace the live ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, MetaData, Table, inspect, text
from sqlalchemy.sql.compiler import IdentifierPreparer

from tidebook.core.errors import Corrupt, InvalidInput


def has_transactional_ddl(dialect: str) -> bool:
    """Return whether a database can rename tables in the transaction that moves the offsets."""
    return dialect in ("postgresql", "sqlite")


def copied(table: Table, suffix: str) -> Table:
    """Return a copy of a table under another name; names of indexes and constraints must differ too."""
    if table.foreign_keys:
        raise InvalidInput(f"table {table.name} has foreign keys: a rebuild cannot copy it")
    copy = table.to_metadata(MetaData(), name=f"{table.name}{suffix}")
    named: list[Any] = [*copy.indexes, *copy.constraints]
    for item in named:
        if isinstance(item.name, str):
            item.name = f"{item.name}{suffix}"
    return copy


class _Rename:
    """The names of a table in a swap, quoted and with its schema; `name` and `old_name` are quoted only."""

    def __init__(self, table: Table, copy: Table, suffix: str, prepare: IdentifierPreparer) -> None:
        self.copy = copy
        old = f"{table.name}{suffix}_old"
        schema = "" if table.schema is None else f"{prepare.quote_schema(table.schema)}."
        self.name, self.old_name = prepare.quote(table.name), prepare.quote(old)
        self.live, self.new, self.old = (f"{schema}{prepare.quote(name)}" for name in (table.name, copy.name, old))


def swap_tables(connection: Connection, tables: Sequence[Table], copies: Mapping[str, Table], suffix: str) -> None:
    """Replace live tables by their copies; those that an announced swap has renamed before are left alone."""
    database, dialect = inspect(connection), connection.dialect
    renames = [_Rename(table, copies[table.key], suffix, dialect.identifier_preparer) for table in tables]
    pending = [each for each in renames if database.has_table(each.copy.name, schema=each.copy.schema)]
    if has_transactional_ddl(dialect.name):
        if missing := [each.copy.key for each in renames if each not in pending]:
            raise Corrupt(f"the rebuild has lost its tables {', '.join(missing)}: rebuild again")
        for each in pending:
            connection.execute(text(f"ALTER TABLE {each.live} RENAME TO {each.old_name}"))
            connection.execute(text(f"ALTER TABLE {each.new} RENAME TO {each.name}"))
    elif pending:  # one statement, which is atomic
        steps = [f"{each.live} TO {each.old}, {each.new} TO {each.live}" for each in pending]
        connection.execute(text(f"RENAME TABLE {', '.join(steps)}"))
    for each in renames:
        connection.execute(text(f"DROP TABLE IF EXISTS {each.old}"))
