"""The queue's SQL for PostgreSQL: `schema.sql` once a database, the other files once for each group of period tables.

`@schema@`, `@table@` and `@now@` stand for the schema, the parent table, and the database's time in milliseconds: when
the statement came. `@later@` is the time at which it is asked for, in the middle of a function; `@earlier@` the one at
which the transaction began, before any snapshot of it was taken.
"""

from __future__ import annotations

from functools import cache
from hashlib import blake2b
from importlib.resources import files

#: Raised with every change of the files beside this one: they are then installed anew.
VERSION = 14
NOW = "(extract(epoch FROM statement_timestamp()) * 1000)::bigint"
TABLE_FILES = ("table.sql", "bundle.sql", "put.sql", "runout.sql", "claim.sql", "fail.sql", "due.sql", "floor.sql")


@cache
def digest(*, schema: str, now: str = NOW) -> str:
    """What all the files together come to: a change of any shows, whether or not the version was raised."""
    texts = [text(name, schema=schema, now=now) for name in ("schema.sql", *TABLE_FILES)]
    return blake2b("\0".join([str(VERSION), *texts]).encode(), digest_size=8).hexdigest()


@cache
def text(file: str, *, schema: str, table: str = "", now: str = NOW) -> str:
    """One of the files, for a schema and a parent table."""
    raw = files(__package__).joinpath(file).read_text(encoding="utf-8")
    later = now.replace("statement_timestamp()", "clock_timestamp()")
    earlier = now.replace("statement_timestamp()", "transaction_timestamp()")
    named = {"@schema@": schema, "@table@": table, "@now@": now, "@later@": later, "@earlier@": earlier}
    for name, value in named.items():
        raw = raw.replace(name, value)
    return raw
