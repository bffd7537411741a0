"""The queue's SQL for PostgreSQL: `schema.sql` once per database, the other files once per partitioned table.

`@schema@` and `@table@` stand for the names of the schema and the partitioned table. `@now@`, `@later@` and
`@earlier@` stand for the database's time in milliseconds: at the start of the statement, at the moment of the call,
and at the start of the transaction, before its first snapshot.
"""

from __future__ import annotations

from functools import cache
from hashlib import blake2b
from importlib.resources import files

#: Raise it with every change of the SQL files: it makes every database reinstall the functions.
VERSION = 15
NOW = "(extract(epoch FROM statement_timestamp()) * 1000)::bigint"
TABLE_FILES = (
    "table.sql",
    "bundle.sql",
    "put.sql",
    "expired_leases.sql",
    "claim.sql",
    "fail.sql",
    "due.sql",
    "watermarks.sql",
)


@cache
def digest(*, schema: str, now: str = NOW) -> str:
    """Return a digest of all files: it changes with any of them, even if VERSION was not raised."""
    texts = [text(name, schema=schema, now=now) for name in ("schema.sql", *TABLE_FILES)]
    return blake2b("\0".join([str(VERSION), *texts]).encode(), digest_size=8).hexdigest()


@cache
def text(file: str, *, schema: str, table: str = "", now: str = NOW) -> str:
    """Return the text of a file for a schema and a partitioned table."""
    raw = files(__package__).joinpath(file).read_text(encoding="utf-8")
    later = now.replace("statement_timestamp()", "clock_timestamp()")
    earlier = now.replace("statement_timestamp()", "transaction_timestamp()")
    values_by_name = {"@schema@": schema, "@table@": table, "@now@": now, "@later@": later, "@earlier@": earlier}
    for name, value in values_by_name.items():
        raw = raw.replace(name, value)
    return raw
