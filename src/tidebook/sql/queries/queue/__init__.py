"""The queue's SQL for PostgreSQL: `schema.sql` once a database, the other files once for each group of period tables.

`@schema@`, `@table@` and `@now@` stand for the schema, the parent table, and the database's time in milliseconds.
"""

from __future__ import annotations

from functools import cache
from hashlib import blake2b
from importlib.resources import files

#: Raised with every change of the files beside this one: they are then installed anew.
VERSION = 8
NOW = "(extract(epoch FROM statement_timestamp()) * 1000)::bigint"
TABLE_FILES = ("table.sql", "bundle.sql", "put.sql", "runout.sql", "claim.sql", "fail.sql", "due.sql")


@cache
def digest(*, schema: str, now: str = NOW) -> str:
    """What all the files together come to: a change of any shows, whether or not the version was raised."""
    texts = [text(name, schema=schema, now=now) for name in ("schema.sql", *TABLE_FILES)]
    return blake2b("\0".join([str(VERSION), *texts]).encode(), digest_size=8).hexdigest()


@cache
def text(name: str, *, schema: str, table: str = "", now: str = NOW) -> str:
    """One of the files, for a schema and a parent table."""
    raw = files(__package__).joinpath(name).read_text(encoding="utf-8")
    return raw.replace("@schema@", schema).replace("@table@", table).replace("@now@", now)
